"""The norm of all gradients, of each replica."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.ops.chunks import CHUNK
from hdet_kernels.ops.operators import why_not
from tests.ops.cases import BACKENDS, BF16, FP16, FP32, FP64, SIZES_OF_A_ROW, Case, available, make_case

DTYPES = {
    "fp32": (FP32, (FP32,)),
    "fp64": (FP64, (FP64,)),
    "bf16": (BF16, (BF16,)),
    "fp16": (FP16, (FP16,)),
    "mixed": (FP32, (FP32, BF16, FP16)),
}
# Whole chunks with and without vectors, an empty slot, odd tails.
SIZES = (CHUNK + 1, 2 * CHUNK + 9, 0, 1, CHUNK - 1)
TRITON = [available("triton", "cuda"), available("triton", "cpu")]


def gradients(dtype: torch.dtype, kinds: tuple[torch.dtype, ...], device: str) -> Case:
    return make_case("sgd", SIZES, dtype, device, optional=False, grads=kinds)


def norm(case: Case, backend: str, rows: int | None = None) -> Tensor:
    return ops.grad_norm(case.chunks, case.chunks.match(case.grads), rows=rows, backend=backend)


def true_norms(case: Case, rows: int = 1) -> Tensor:
    """Return the norm of the gradients of each replica, whose slots come one replica after the other."""
    each = len(case.grads) // rows
    by_row = [case.grads[row * each : (row + 1) * each] for row in range(rows)]
    flat = [torch.cat([grad.double().cpu() for grad in own if grad is not None]) for own in by_row]
    return torch.stack([torch.linalg.vector_norm(own) for own in flat])


@pytest.mark.parametrize(("dtype", "kinds"), DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("backend", BACKENDS)
class TestEveryDtype:
    def test_the_norm_is_that_of_float64(
        self, backend: tuple[str, str], dtype: torch.dtype, kinds: tuple[torch.dtype, ...]
    ) -> None:
        where, device = backend
        case = gradients(dtype, kinds, device)  # NaN around every gradient: if one is read, the norm is NaN
        for without in (None, 1, 0):
            if without is not None:
                case.grads[without] = None
            got = norm(case, where)
            assert (got.dtype, got.shape, got.device.type) == (FP64, (), device)
            assert got.item() == pytest.approx(true_norms(case).item(), rel=1e-14)

    def test_one_element_that_is_not_finite_shows_wherever_it_is(
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
            expected = float("nan") if value != value else float("inf")
            assert norm(case, where).item() == pytest.approx(expected, nan_ok=True), f"{value} in slot {slot}"
            grad[position] = kept
        assert norm(case, where).isfinite()


@pytest.mark.parametrize("backend", BACKENDS)
def test_squares_neither_overflow_nor_vanish(backend: tuple[str, str]) -> None:
    where, device = backend
    for kind, value in ((FP32, 1e25), (FP32, 1e-30), (BF16, 1e25), (BF16, 1e-30), (FP16, 65504.0)):
        case = make_case("sgd", (1000, 3), FP32, device, optional=False, grads=(kind,))
        for grad in case.grads:
            assert grad is not None
            grad.fill_(value)
        assert norm(case, where).item() == pytest.approx(true_norms(case).item(), rel=1e-14)
        assert 0 < norm(case, where).item() < float("inf")


@pytest.mark.parametrize("sizes", [(), (0, 0), (3, 5)], ids=["no-slots", "empty-slots", "no-gradients"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_gradients_the_norm_is_zero(backend: tuple[str, str], sizes: tuple[int, ...]) -> None:
    where, device = backend
    case = make_case("sgd", sizes, FP32, device, optional=False)
    if sizes == (3, 5):
        case.grads = [None, None]
    assert norm(case, where).item() == 0
    if sizes == (0, 0):
        assert norm(case, where, 2).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_norm_is_the_same_every_time(backend: tuple[str, str]) -> None:
    where, device = backend
    case = gradients(FP32, (FP32, BF16), device)
    assert len({norm(case, where).item() for _ in range(5)}) == 1


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_replica_has_its_norm(backend: tuple[str, str], rows: int) -> None:
    where, device = backend
    case = make_case("sgd", SIZES_OF_A_ROW * rows, FP32, device, optional=False, grads=(FP32, BF16))
    case.grads[1] = None
    got = norm(case, where, rows)
    assert (got.dtype, got.shape, got.device.type) == (FP64, (rows,), device)
    torch.testing.assert_close(got.cpu(), true_norms(case, rows), rtol=1e-14, atol=0)
    case.grads[-4] = torch.full_like(case.grads[-4], float("inf"))
    assert norm(case, where, rows).isfinite().tolist() == [True] * (rows - 1) + [False]


@pytest.mark.parametrize("backend", TRITON)
def test_triton_programs_share_chunks(backend: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """More chunks than programs, two programs for a replica of three chunks, and fewer programs than replicas."""
    from hdet_kernels.ops.triton import step as triton_step

    where, device = backend
    monkeypatch.setattr(triton_step, "PROGRAMS", 4)
    case = gradients(FP32, (FP32, BF16), device)
    assert len(case.chunks.chunks) == 7, "two chunks for each program but the last"
    assert norm(case, where).item() == pytest.approx(true_norms(case).item(), rel=1e-14)
    for programs, rows in ((4, 2), (2, 4)):
        monkeypatch.setattr(triton_step, "PROGRAMS", programs)
        case = make_case("sgd", (CHUNK + 1, 5) * rows, FP32, device, optional=False)
        torch.testing.assert_close(norm(case, where, rows).cpu(), true_norms(case, rows), rtol=1e-14, atol=0)


@pytest.mark.parametrize("rows", [0, 3])
def test_slots_that_cannot_be_divided_among_replicas_are_refused(rows: int) -> None:
    case = make_case("sgd", SIZES_OF_A_ROW, FP32, "cpu", optional=False)
    with pytest.raises(ValueError, match=f"each of rows={rows} replicas, got 4 slots and 5 chunks"):
        norm(case, "torch", rows)


@pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")
@pytest.mark.parametrize("in_place", [False, True], ids=["to_other_memory", "in_place"])
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("count", [0, 1, 15, 16384 + 17, 50_000])
def test_quotients_have_the_bits_of_a_division_and_are_measured(
    count: int, divisor: float, dtype: torch.dtype, in_place: bool
) -> None:
    values = torch.randn(count + 1, dtype=dtype, generator=torch.Generator().manual_seed(0))[1:]  # not aligned
    expected = values / torch.tensor(divisor, dtype=dtype)
    out = values if in_place else torch.full_like(values, torch.nan)
    squares = torch.ops.hdet_kernels.divide(values, divisor, out)
    assert torch.equal(out, expected)
    assert squares == pytest.approx(float(expected.double().square().sum()), rel=1e-13)


@pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_quotients_that_are_not_finite_show_in_their_squares(number: float) -> None:
    values = torch.ones(20_000)
    values[17_001] = number
    assert not math.isfinite(torch.ops.hdet_kernels.divide(values, 2.0, torch.empty(20_000)))
    with pytest.raises(RuntimeError, match="out"):
        torch.ops.hdet_kernels.divide(values, 2.0, torch.empty(19_999))
