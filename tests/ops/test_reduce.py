"""The norm of all gradients, and whether they are finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.ops.chunks import CHUNK
from tests.ops.cases import BACKENDS, BF16, FP16, FP32, FP64, Case, available, make_case

DTYPES = {
    "fp32": (FP32, (FP32,)),
    "fp64": (FP64, (FP64,)),
    "bf16": (BF16, (BF16,)),
    "fp16": (FP16, (FP16,)),
    "mixed": (FP32, (FP32, BF16, FP16)),
}
#: Whole chunks with and without vectors, empty slots, odd tails.
SIZES = (CHUNK + 1, 2 * CHUNK + 9, 0, 1, CHUNK - 1)


def gradients(dtype: torch.dtype, kinds: tuple[torch.dtype, ...], device: str) -> Case:
    return make_case("sgd", SIZES, dtype, device, optional=False, grads=kinds)


def norm(case: Case, backend: str) -> Tensor:
    return ops.grad_norm(case.chunks, case.chunks.match(case.grads), backend=backend)


def finite(case: Case, backend: str) -> Tensor:
    return ops.all_finite(case.chunks, case.chunks.match(case.grads), backend=backend)


def true_norm(case: Case) -> float:
    flat = torch.cat([grad.double().cpu() for grad in case.grads if grad is not None])
    return torch.linalg.vector_norm(flat).item()


@pytest.mark.parametrize(("dtype", "kinds"), DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("backend", BACKENDS)
class TestEveryDtype:
    def test_the_norm_is_that_of_float64(
        self, backend: tuple[str, str], dtype: torch.dtype, kinds: tuple[torch.dtype, ...]
    ) -> None:
        where, device = backend
        case = gradients(dtype, kinds, device)  # NaN around every gradient: one of them read, and the norm is NaN
        for without in (None, 1, 0):
            if without is not None:
                case.grads[without] = None
            got = norm(case, where)
            assert (got.dtype, got.shape, got.device.type) == (FP64, (), device)
            assert got.item() == pytest.approx(true_norm(case), rel=1e-14)
            assert finite(case, where).item() is True

    def test_one_element_that_is_not_finite_is_found_wherever_it_is(
        self, backend: tuple[str, str], dtype: torch.dtype, kinds: tuple[torch.dtype, ...]
    ) -> None:
        where, device = backend
        case = gradients(dtype, kinds, device)
        bad = iter([float("nan"), float("inf"), float("-inf")] * 3)
        for slot, position in ((0, 0), (0, CHUNK), (1, 1), (1, 2 * CHUNK + 8), (3, 0), (4, 777), (4, CHUNK - 2)):
            grad = case.grads[slot]
            assert grad is not None
            kept, value = grad[position].clone(), next(bad)
            grad[position] = value
            got = finite(case, where)
            assert (got.dtype, got.shape, got.device.type) == (torch.bool, (), device)
            assert got.item() is False, f"{value} at {position} of slot {slot} went unnoticed"
            expected = float("nan") if value != value else float("inf")
            assert norm(case, where).item() == pytest.approx(expected, nan_ok=True)
            grad[position] = kept
        assert finite(case, where).item() is True


@pytest.mark.parametrize("value", [1e25, 1e-30], ids=["large", "tiny"])
@pytest.mark.parametrize("kind", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_squares_neither_overflow_nor_vanish(backend: tuple[str, str], kind: torch.dtype, value: float) -> None:
    where, device = backend
    case = make_case("sgd", (1000, 3), FP32, device, optional=False, grads=(kind,))
    for grad in case.grads:
        assert grad is not None
        grad.fill_(value)
    assert norm(case, where).item() == pytest.approx(true_norm(case), rel=1e-14)
    assert 0 < norm(case, where).item() < float("inf")
    assert finite(case, where).item() is True


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_at_its_largest_is_finite(backend: tuple[str, str]) -> None:
    where, device = backend
    case = make_case("sgd", (1000,), FP16, device, optional=False)
    assert case.grads[0] is not None
    case.grads[0].fill_(65504.0)
    assert norm(case, where).item() == pytest.approx(65504 * 1000**0.5, rel=1e-14)
    assert finite(case, where).item() is True


@pytest.mark.parametrize("sizes", [(), (0, 0), (3, 5)], ids=["no-slots", "empty-slots", "no-gradients"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_gradients_the_norm_is_zero_and_all_is_finite(backend: tuple[str, str], sizes: tuple[int, ...]) -> None:
    where, device = backend
    case = make_case("sgd", sizes, FP32, device, optional=False)
    if sizes == (3, 5):
        case.grads = [None, None]
    assert norm(case, where).item() == 0
    assert finite(case, where).item() is True


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_norm_is_the_same_every_time(backend: tuple[str, str]) -> None:
    where, device = backend
    case = gradients(FP32, (FP32, BF16), device)
    assert len({norm(case, where).item() for _ in range(5)}) == 1


@pytest.mark.parametrize("backend", [available("triton", "cuda"), available("triton", "cpu")])
def test_triton_programs_share_more_chunks_than_there_are_programs(
    backend: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hdet_kernels.ops import triton_reduce

    where, device = backend
    monkeypatch.setattr(triton_reduce, "PROGRAMS", 4)
    case = gradients(FP32, (FP32, BF16), device)
    assert len(case.chunks.chunks) == 7, "two chunks for each program but the last"
    assert norm(case, where).item() == pytest.approx(true_norm(case), rel=1e-14)
    for grad in case.grads:
        assert grad is not None
        if grad.numel():
            kept = grad[-1].clone()
            grad[-1] = float("nan")
            assert finite(case, where).item() is False
            grad[-1] = kept
