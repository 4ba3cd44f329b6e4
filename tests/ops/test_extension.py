"""The compiled extension: its registration with torch, its checks, and that its sources compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hdet_kernels.ops import STATES, native
from hdet_kernels.ops.backends import backends
from hdet_kernels.ops.pack import MOST_ROWS
from tests.ops.cases import RULES, Case, available, make_case, make_table
from tests.ops.test_operators import packing

ROOT = Path(__file__).parents[2]
COMPILED = [available("cpp", "cpu"), available("cuda", "cuda")]


def arguments(case: Case, row: dict[str, float]) -> list[object]:
    """The arguments of the operator itself."""
    device = case.param.device.type
    return [
        list(STATES).index(case.rule),
        case.param,
        case.master,
        *[*case.states, None, None][:3],
        case.steps,
        make_table(device, row).tensor,
        case.chunks.slots,
        case.chunks.chunks,
        case.chunks.point_at(case.chunks.match(case.grads)),
        torch.zeros(native.SCRATCH_BYTES * len(case.chunks.entries), dtype=torch.uint8, device=device),
        torch.ones(1, device=device),
        torch.ones((), dtype=torch.float64, device=device),
        torch.zeros(1, device=device),
        False,
        1,
    ]


@pytest.mark.parametrize("name", ["sgd", "adamw-amsgrad", "lion"])
@pytest.mark.parametrize("backend", COMPILED)
def test_opcheck(backend: tuple[str, str], name: str) -> None:
    rule, row = RULES[name]
    case = make_case(rule, (33, 0, 5), torch.float32, backend[1], optional=name != "sgd")
    for flat in case.flats():
        flat.nan_to_num_(0.5)  # opcheck compares by equality
    torch.library.opcheck(torch.ops.hdet_kernels.step_.default, arguments(case, row))
    chunks, gradients = arguments(case, row)[9:11]
    torch.library.opcheck(torch.ops.hdet_kernels.grad_norm.default, (chunks, gradients, 1))
    torch.library.opcheck(torch.ops.hdet_kernels.all_finite.default, (chunks, gradients, 1))


@pytest.mark.parametrize("backend", COMPILED)
def test_a_compiled_function_calls_the_operators(backend: tuple[str, str]) -> None:
    results = []
    for compiled in (False, True):
        case = make_case("adamw", (33, 5000), torch.float32, backend[1], optional=True)

        def function(*given: object) -> torch.Tensor:
            torch.ops.hdet_kernels.step_(*given)
            finite = torch.ops.hdet_kernels.all_finite(given[9], given[10], 1)
            return torch.ops.hdet_kernels.grad_norm(given[9], given[10], 1) * finite

        call = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
        results.append([call(*arguments(case, RULES["adamw"][1])), *case.flats(), case.steps])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager, rtol=0, atol=0, equal_nan=True)


WRONG = {
    "master": (2, lambda value: torch.ones(5), "master must have"),
    "state dtype": (3, lambda value: value.double(), "state has another dtype"),
    "state size": (3, lambda value: value[:-1], r"state must have \d+ elements"),
    "state missing": (3, lambda value: None, "state 1 is given and one before it is not"),
    "steps": (6, lambda value: value.double(), "steps has another dtype"),
    "columns": (7, lambda value: value[:, :3].contiguous(), "must have 13 columns"),
    "slots": (8, lambda value: value[:, :2].contiguous(), "slots must have 3 columns"),
    "chunks": (9, lambda value: value.int(), "chunks has another dtype"),
    "gradients": (10, lambda value: value[:1], "gradients must have 2 rows, got 1"),
    "scratch": (11, lambda value: value[:-1], "scratch must have 256 elements, got 255"),
    "grad_scale": (12, lambda value: torch.ones(2), "grad_scale must have 1 elements, got 2"),
    "norm": (13, lambda value: value.float(), "norm has another dtype"),
    "norms": (13, lambda value: value.expand(3).contiguous(), "norm must have one element, or .* got 3 for 1 rows"),
    "found_inf": (14, lambda value: torch.ones(2), "found_inf must have 1 elements, got 2"),
    "rule": (0, lambda value: 17, "unknown rule 17"),
    "replicas": (16, lambda value: 5, r"param has \d+ elements, which are not 5 rows"),
    "table of replicas": (16, lambda value: 2, "equally many rows for each of 2 replicas, got 1"),
}


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
@pytest.mark.parametrize("what", WRONG)
def test_the_operator_checks_its_arguments(backend: tuple[str, str], what: str) -> None:
    case = make_case("adamw", (33, 5), torch.float32, backend[1], optional=True)
    given = arguments(case, RULES["adamw"][1])
    position, change, message = WRONG[what]
    given[position] = change(given[position])
    before = [flat.clone() for flat in case.flats()]
    with pytest.raises(RuntimeError, match=message):
        torch.ops.hdet_kernels.step_(*given)
    for flat, old in zip(case.flats(), before, strict=True):
        torch.testing.assert_close(flat, old, rtol=0, atol=0, equal_nan=True)


WRONG_PACKING = {
    "chunks": ("pack", 0, lambda value: value[:, :3].contiguous(), "chunks must have 4 columns"),
    "places": ("pack", 1, lambda value: value.int(), "places has another dtype"),
    "strides": ("pack", 2, lambda value: value[:-1], "strides must have 2 elements, got 1"),
    "staging dtype": ("pack", 5, lambda value: value.half(), "staging buffer must be float32 or float64"),
    "staging layout": ("unpack", 5, lambda value: value.repeat(2)[::2], "staging buffer must be contiguous"),
    "rows": ("unpack", 3, lambda value: 65, "rows must be 1 to 64, got 65"),
}


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
@pytest.mark.parametrize("what", WRONG_PACKING)
def test_the_packing_operators_check_their_arguments(backend: tuple[str, str], what: str) -> None:
    name, position, change, message = WRONG_PACKING[what]
    tensors, *both = packing(*backend)
    given = both[name == "unpack"]
    given[position] = change(given[position])
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.hdet_kernels, name)(*given)
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
def test_the_operator_takes_floating_parameters_only(backend: tuple[str, str]) -> None:
    case = make_case("sgd", (33,), torch.float32, backend[1], optional=False)
    given = arguments(case, {"lr": 0.1})
    given[1] = case.param.nan_to_num().to(torch.int32)
    with pytest.raises(RuntimeError, match="float32, float64, bfloat16 or float16"):
        torch.ops.hdet_kernels.step_(*given)


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
def test_threads_do_not_change_the_result(backend: tuple[str, str]) -> None:
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            case = make_case("adamw", (100_000, 3, 50_001), torch.float32, "cpu", optional=True)
            case.step(make_table("cpu", RULES["adamw"][1]), "cpp")
            results.append(case)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for mine, theirs in zip(other.flats(), results[0].flats(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_rules_are_numbered_as_in_the_header() -> None:
    header = (ROOT / "csrc" / "rules.h").read_text()
    assert f"enum class Rule : int64_t {{ {', '.join(STATES)} }};" in header


def test_as_many_rows_as_in_the_header() -> None:
    header = (ROOT / "csrc" / "pack.h").read_text()
    assert f"constexpr int kMostRows = {MOST_ROWS};" in header


def test_importing_loads_neither_the_extension_nor_triton() -> None:
    code = (
        "import sys, torch, hdet_kernels.ops, hdet_kernels.optim\n"
        "assert 'triton' not in sys.modules\n"
        "assert not torch._C._dispatch_has_kernel('hdet_kernels::step_')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def _setup(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    setup = f"import setuptools; setuptools.setup = lambda **given: print(sorted(given))\n{command}\nimport setup"
    return subprocess.run(
        [sys.executable, "-c", setup],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        check=False,
    )


def test_the_build_can_be_pure_python() -> None:
    done = _setup("", HDET_NATIVE="0")
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert "HDET_NATIVE=0: building pure Python" in done.stderr


def test_the_build_without_a_compiler_says_so() -> None:
    done = _setup("", CXX="/nowhere/c++")
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert "no C++ compiler (/nowhere/c++): building pure Python" in done.stderr


def test_the_build_without_torch_names_the_remedy() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler: the build does not ask for torch")
    done = _setup("import sys; sys.modules['torch'] = None", CXX="c++")
    assert done.returncode != 0
    assert "--no-build-isolation" in done.stderr


def test_a_cuda_build_that_cannot_be_is_an_error() -> None:
    if torch.version.cuda is not None and shutil.which("nvcc") is not None:
        pytest.skip("CUDA can be built here")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler: the build is pure Python")
    done = _setup("", HDET_CUDA="1", CXX="c++")
    assert done.returncode != 0
    assert "HDET_CUDA=1, but the CUDA part cannot be built:" in done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on PATH")
@pytest.mark.parametrize("source", sorted(path.name for path in (ROOT / "csrc").glob("*.cu")))
def test_the_cuda_sources_compile_for_every_generation(source: str, tmp_path: Path) -> None:
    from torch.utils.cpp_extension import COMMON_NVCC_FLAGS, include_paths

    # Without optimisation the same is checked in a fraction of the time.
    options = subprocess.run(["nvcc", "--help"], capture_output=True, text=True, check=True).stdout
    quickly = ["--Ofast-compile", "max"] if "--Ofast-compile" in options else ["-Xptxas", "-O0"]
    command = ["nvcc", "-c", str(ROOT / "csrc" / source), "-o", str(tmp_path / "object.o"), *quickly]
    command += ["-std=c++20", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-Werror", "all-warnings"]
    command += [*COMMON_NVCC_FLAGS, "--threads", "2"]
    # The oldest and the newest, this without machine code: nothing here depends on what is between.
    command += [f"-gencode=arch=compute_{arch},code={code}_{arch}" for arch, code in ((80, "sm"), (100, "compute"))]
    command += [argument for path in include_paths() for argument in ("-isystem", path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "object.o").stat().st_size > 0


def test_the_reason_for_a_missing_extension_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = native.why_not.__wrapped__()
    assert reason is not None
    assert "pip install --no-build-isolation" in reason


def test_a_library_that_is_none_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Spec:
        origin = str(tmp_path / "_native.abi3.so")

    Path(Spec.origin).write_bytes(b"no library")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: Spec)
    reason = native.why_not.__wrapped__()
    assert reason is not None
    assert "could not be loaded" in reason
    assert "build it again" in reason


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_FAKES", {"another_step_": native.operators.fake_step})
    monkeypatch.setattr("torch.ops.load_library", lambda path: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: type("Spec", (), {"origin": "/old/_native.abi3.so"}))
    reason = native.why_not.__wrapped__()
    assert reason is not None
    assert "lacks one of another_step_" in reason


def test_cuda_says_what_it_lacks() -> None:
    reason = backends()["cuda"]
    if reason == "ok":
        pytest.skip("CUDA runs here")
    assert any(word in reason for word in ("not built", "no CUDA part", "no usable NVIDIA GPU")), reason
