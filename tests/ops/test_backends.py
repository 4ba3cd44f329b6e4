"""The choice of a backend, and the messages where one cannot run."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hdet_kernels.ops import backends as registry
from hdet_kernels.ops import operators as extension
from hdet_kernels.ops.backends import backends


def test_every_backend_says_ok_or_why_not() -> None:
    state = registry.backends()
    assert list(state) == ["cuda", "triton", "cpp", "torch"]
    assert state["torch"] == "ok"
    assert all(isinstance(reason, str) and reason for reason in state.values())


def test_triton_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not = registry._PROBES["triton"]
    installed = importlib.util.find_spec("triton") is not None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not() is None if installed else "pip install triton" in str(why_not())
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if installed:
        assert "no usable NVIDIA GPU (TRITON_INTERPRET=1" in str(why_not())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not() == "triton is not installed; pip install triton"


def test_the_fastest_available_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.ENVIRONMENT, raising=False)
    cpp = registry.backends()["cpp"] == "ok"
    assert registry.resolve("cpu") == ("cpp" if cpp else "torch")
    assert registry.resolve("meta") == "torch"
    for missing, expected in (((), "cpp"), (("cpp",), "torch")):
        monkeypatch.setattr(registry, "_reason", lambda name, missing=missing: "no" if name in missing else None)
        assert registry.resolve("cpu") == expected, "the interpreter is never chosen by itself"
    for missing, expected in (((), "cuda"), (("cuda",), "triton"), (("cuda", "triton"), "torch")):
        monkeypatch.setattr(registry, "_reason", lambda name, missing=missing: "no" if name in missing else None)
        assert registry.resolve("cuda") == expected


def test_precedence_is_argument_then_use_backend_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_reason", lambda name: None)
    monkeypatch.setenv(registry.ENVIRONMENT, "torch")
    assert registry.resolve("cpu") == "torch"
    registry.use_backend("cpp")
    try:
        assert registry.resolve("cpu") == "cpp"
        assert registry.resolve("cpu", "triton") == "triton"
    finally:
        registry.use_backend(None)
    assert registry.resolve("cpu") == "torch"


def test_an_unavailable_request_lists_reasons_and_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"cuda": "no GPU here", "cpp": "no compiler here", "triton": "not installed here"}
    monkeypatch.setattr(registry, "_reason", reasons.get)
    listing = r"not available.*cuda: no GPU here; triton: not installed here; cpp: no compiler here; torch: ok"
    for ask in (lambda: registry.resolve("cpu", "cpp"), lambda: registry.use_backend("cpp")):
        with pytest.raises(RuntimeError, match=rf"'cpp' \(\w+(=|\(\))\) is {listing}"):
            ask()
    monkeypatch.setenv(registry.ENVIRONMENT, "cuda")
    with pytest.raises(RuntimeError, match=r"'cuda' \(HDET_BACKEND\) is not available"):
        registry.resolve("cpu")


def test_unknown_and_unfit_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown backend 'metal'.*cuda, triton, cpp, torch"):
        registry.resolve("cpu", "metal")
    monkeypatch.setattr(registry, "_reason", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"'cuda' \(backend=\) cannot serve tensors on cpu.*are cpp, torch, triton"):
        registry.resolve("cpu", "cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"'triton' \(backend=\) cannot serve tensors on cpu.*are cpp, torch\."):
        registry.resolve("cpu", "triton")
    with pytest.raises(ValueError, match=r"'cpp' \(backend=\) cannot serve tensors on cuda.*are cuda, triton, torch"):
        registry.resolve("cuda", "cpp")


OPERATIONS = {
    "step": ("bind_step", "grad_norm"),
    "pack": ("pack", "unpack"),
    "wire": ("encode", "merge", "decode"),
    "rowwise": ("rowwise_adagrad",),
}


@pytest.mark.parametrize("name", ["cuda", "triton", "cpp", "torch"])
def test_every_backend_implements_every_operation(name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    for operation, functions in OPERATIONS.items():
        module = registry.implementation(name, operation)
        for function in functions:
            assert callable(getattr(module, function)), f"{module.__name__} lacks {function}"


ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_importing_loads_neither_the_extension_nor_triton() -> None:
    code = (
        "import sys, torch, hdet_kernels.ops, hdet_kernels.optim\n"
        "assert 'triton' not in sys.modules\n"
        "assert not hasattr(torch.ops.hdet_kernels, 'step_')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on PATH")
@pytest.mark.parametrize("source", sorted(path.name for path in (ROOT / "csrc").glob("*.cu")))
def test_the_cuda_sources_compile(source: str, tmp_path: Path) -> None:
    from torch.utils.cpp_extension import COMMON_NVCC_FLAGS, include_paths

    # Code for the GPU alone, without optimisation: nvcc finds errors of the rest too, and making code takes long. Only
    # the source that asks for the generation, which has all inline assembly, becomes machine code.
    options = subprocess.run(["nvcc", "--help"], capture_output=True, text=True, check=True).stdout
    quickly = ["--Ofast-compile", "max"] if "--Ofast-compile" in options else ["-Xptxas", "-O0"]
    command = ["nvcc", "-fatbin", str(ROOT / "csrc" / source), "-o", str(tmp_path / "object.fatbin"), *quickly]
    command += ["-std=c++20", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-Werror", "all-warnings"]
    command += [*COMMON_NVCC_FLAGS, "--threads", "2"]
    asks = re.search(r"__CUDA_ARCH__ *[<>=]", (ROOT / "csrc" / source).read_text())
    generations = [(80, "sm"), (100, "compute")] if asks else [(80, "compute")]
    command += [f"-gencode=arch=compute_{arch},code={code}_{arch}" for arch, code in generations]
    command += [argument for path in include_paths() for argument in ("-isystem", path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "object.fatbin").stat().st_size > 0


def test_the_reason_for_a_missing_extension_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = extension.why_not.__wrapped__()
    assert reason is not None
    assert "pip install --no-build-isolation" in reason


def test_a_file_that_is_no_library_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Spec:
        origin = str(tmp_path / "_native.abi3.so")

    Path(Spec.origin).write_bytes(b"no library")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: Spec)
    reason = extension.why_not.__wrapped__()
    assert reason is not None
    assert "could not be loaded" in reason
    assert "build it again" in reason


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_FAKES", {"another_step_": extension.fake_in_place})
    monkeypatch.setattr("torch.ops.load_library", lambda path: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: type("Spec", (), {"origin": "/old/_native.abi3.so"}))
    reason = extension.why_not.__wrapped__()
    assert reason is not None
    assert "lacks another_step_" in reason


@pytest.mark.skipif(extension.why_not() is not None, reason=f"{extension.why_not()}")
def test_the_extension_says_whether_it_has_a_cuda_part() -> None:
    registered = torch._C._dispatch_has_kernel_for_dispatch_key("hdet_kernels::step_", "CUDA")
    assert extension.has_cuda() == registered


def test_the_cuda_backend_says_what_it_lacks() -> None:
    reason = backends()["cuda"]
    if reason == "ok":
        pytest.skip("CUDA runs here")
    assert any(word in reason for word in ("not built", "no CUDA part", "no usable NVIDIA GPU")), reason
