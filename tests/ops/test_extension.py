"""Loading of the compiled extension, and that its CUDA sources compile."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hdet_kernels.ops import operators as extension
from hdet_kernels.ops.backends import backends

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
def test_the_cuda_sources_compile_for_every_generation(source: str, tmp_path: Path) -> None:
    from torch.utils.cpp_extension import COMMON_NVCC_FLAGS, include_paths

    # Without optimisation, which takes most of the time.
    options = subprocess.run(["nvcc", "--help"], capture_output=True, text=True, check=True).stdout
    quickly = ["--Ofast-compile", "max"] if "--Ofast-compile" in options else ["-Xptxas", "-O0"]
    command = ["nvcc", "-c", str(ROOT / "csrc" / source), "-o", str(tmp_path / "object.o"), *quickly]
    command += ["-std=c++20", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-Werror", "all-warnings"]
    command += [*COMMON_NVCC_FLAGS, "--threads", "2"]
    # The oldest generation and the newest, the latter without machine code. The sources do not depend on those between.
    command += [f"-gencode=arch=compute_{arch},code={code}_{arch}" for arch, code in ((80, "sm"), (100, "compute"))]
    command += [argument for path in include_paths() for argument in ("-isystem", path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "object.o").stat().st_size > 0


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
