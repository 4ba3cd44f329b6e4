"""Newton–Schulz on the Gram matrix: as near to float64 as the iteration in bfloat16, whatever the singular values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from hdet_kernels.ops.backends import backends
from hdet_kernels.ops.newton_schulz import orthogonalise_
from tests.ops.cases import available, naming

pytest.importorskip("triton", reason=f"triton: {backends()['triton']}")

from hdet_kernels.ops.triton import newton_schulz as on_gram
from hdet_kernels.ops.triton.newton_schulz import HALF, iterate_, segments

COEFFICIENTS = (3.4445, -4.775, 2.0315)
TRITON = [available("triton", "cuda"), available("triton", "cpu")]


def in_float64(x: Tensor, steps: int, eps: float) -> Tensor:
    """Return the iteration as Muon's authors write it, in float64."""
    a, b, c = COEFFICIENTS
    if x.shape[1] > x.shape[2]:
        return in_float64(x.mT, steps, eps).mT
    x = x.double()
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return x


@cache
def batch(rows: int, columns: int, device: str) -> tuple[list[str], Tensor]:
    """Return the names of the matrices, and the matrices."""
    with torch.device(device):
        names, found = zip(*matrices(rows, columns, torch.Generator(device).manual_seed(0)), strict=True)
    return list(names), torch.stack(found).bfloat16()


def matrices(rows: int, columns: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield matrices with singular values that are hard for products of few bits."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def product(inner: int) -> Tensor:
        return normal(rows, inner) @ normal(inner, columns)

    size = min(rows, columns)
    left, right = torch.linalg.qr(normal(rows, size)).Q, torch.linalg.qr(normal(columns, size)).Q
    yield "normal", normal(rows, columns)
    yield "low rank and noise", product(4) + 0.01 * normal(rows, columns)
    yield "one dominant", product(1) + 1e-3 * normal(rows, columns)
    yield "rank deficient", product(size // 2)
    yield "condition 1e6", left @ torch.logspace(0, -6, size).diag() @ right.mT
    yield "two levels", left @ (1.0 - 0.99 * (torch.arange(size) % 2)).diag() @ right.mT
    yield "diagonal", torch.eye(rows, columns) * torch.logspace(0, -6, columns)
    yield "zero", torch.zeros(rows, columns)
    yield "norm below eps", 1e-12 * normal(rows, columns)
    yield "norm far below eps", 1e-30 * normal(rows, columns)
    yield "heavy tails", normal(rows, columns) ** 5


def assert_near(shape: tuple[int, int], parts: list[int], device: str) -> None:
    """Compare each matrix with its iteration in float64, and the distance with that of the iteration in bfloat16."""
    names, given = batch(*shape, device)
    steps, eps, x = sum(parts), 1e-7, given.clone()
    expected, rounded = in_float64(x, steps, eps), x.clone()
    orthogonalise_(rounded, COEFFICIENTS, steps, eps, backend="torch")
    iterate_(x, COEFFICIENTS, eps, parts)
    # Entries below the range of float16 become 0, which is less than this after five steps.
    unseen = 1e-6 * (shape[0] * shape[1]) ** 0.5
    for name, ours, theirs, exact in zip(names, x, rounded, expected, strict=True):
        with naming(name, *shape, *parts):
            assert ours.isfinite().all()
            distance, allowed = ((each.double() - exact).norm().item() for each in (ours, theirs))
            assert distance <= max(allowed, unseen)


@pytest.mark.parametrize("backend", TRITON)
def test_every_matrix_is_as_near_to_float64_as_in_bfloat16(backend: tuple[str, str]) -> None:
    assert_near((20, 30) if backend[1] == "cpu" else (2048, 8192), [3, 2], backend[1])


def product_in_torch(
    x: Tensor,
    y: Tensor,
    out: Tensor,
    *,
    alpha: float = 1.0,
    base: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """Return :func:`on_gram.symmetric_product` with the same roundings, without an interpreter."""
    total = alpha * (x.float() @ y.float().mT) + diagonal * torch.eye(x.shape[1])
    total = total if base is None else total + beta * base.float()
    return out.copy_(total.triu() + total.triu(1).mT)


@pytest.fixture
def device(backend: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device of ``backend``. On a CPU, products of large matrices are left to torch."""
    if backend[1] == "cpu":
        monkeypatch.setattr(on_gram, "symmetric_product", product_in_torch)
    return backend[1]


@pytest.mark.full
@pytest.mark.parametrize("backend", TRITON)
def test_many_shapes_and_segments_are_as_near_to_float64_as_in_bfloat16(device: str) -> None:
    shapes = [(96, 384), (150, 70), (63, 64)]
    if device != "cpu":
        shapes += [(8192, 2048), (768, 768), (768, 3072), (3000, 1100), (1023, 1024)]
    for shape in shapes:
        for parts in ([3, 2], [2, 2], [1, 1, 1, 1, 1], [3, 3, 3]):
            assert_near(shape, parts, device)


@pytest.mark.full
@pytest.mark.parametrize("backend", TRITON)
def test_one_singular_value_and_entries_of_one_size_are_within_a_twentieth(device: str) -> None:
    """All entries of R are rounded the same way, so that errors add up; in bfloat16 they come to 0.035."""
    for rows, columns in ((64, 64), (96, 288), (100, 101), (128, 384), (255, 256)):
        x = torch.ones(1, rows, columns, dtype=torch.bfloat16, device=device)
        expected = in_float64(x, 5, 1e-7)
        iterate_(x, COEFFICIENTS, 1e-7, [3, 2])
        assert (x.double() - expected).norm() <= 0.05


@pytest.mark.parametrize("backend", TRITON)
def test_other_layouts_have_the_same_numbers(backend: tuple[str, str]) -> None:
    """Columns before rows, rows with gaps, and float64 parameters, through the function that chooses the way."""
    where, device = backend
    size = 4 if device == "cpu" else 256
    x = torch.randn(1, size, 2 * size, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    expected, in_columns, wide = x.clone(), x.mT.contiguous().mT, x.double()
    with_gaps = torch.zeros(1, size, 2 * size + 1, dtype=torch.bfloat16, device=device)[:, :, : 2 * size].copy_(x)
    for each in (expected, with_gaps, wide, in_columns):
        orthogonalise_(each, COEFFICIENTS, 2, 1e-7, backend=where)
    assert torch.equal(with_gaps, expected)
    assert torch.equal(wide.bfloat16(), expected)
    torch.testing.assert_close(in_columns, expected, rtol=2**-6, atol=1e-3)  # sums in another order


def test_segments_are_as_long_as_precision_allows_and_the_shape_pays() -> None:
    for shape, steps, expected in (
        ((2048, 8192), 5, [3, 2]),
        ((8192, 2048), 5, [3, 2]),
        ((2048, 2048), 5, [1] * 5),
        ((820, 1000), 5, [1] * 5),
        ((800, 1000), 5, [3, 2]),
        ((1, 9), 4, [2, 2]),
        ((1, 9), 7, [3, 2, 2]),
        ((1, 9), 1, [1]),
        ((1, 9), 0, []),
    ):
        assert segments(shape, COEFFICIENTS, steps) == expected
    # Of all ways to divide the steps, these take the least time.
    for columns in range(4, 20):
        for steps in range(1, 8):
            ways = (each for k in range(1, steps + 1) for each in itertools.product((1, 2, 3), repeat=k))
            times = [time(each, columns / 4) for each in ways if sum(each) == steps]
            found = segments((4, columns), COEFFICIENTS, steps)
            assert found is not None
            assert time(found, columns / 4) <= min(times) * (1 + 1e-9)


def time(parts: list[int] | tuple[int, ...], ratio: float) -> float:
    """Return the time of segments in whole products of [m, m] matrices, product by product."""
    found = 0.0
    for steps in parts:
        found += ratio * HALF + ratio  # R and the new X
        found += steps * HALF + (steps - 1) * HALF + (steps - 1) * 2 * HALF  # Q, T and R
    return found


def test_coefficients_decide_how_long_segments_are_and_whether_float16_can_hold_the_numbers() -> None:
    assert segments((4, 16), (4.0, -8.0, 4.0), 5) == [2, 2, 1]
    assert segments((4, 16), (18.0, -40.0, 22.0), 5) is None  # eigenvalues grow beyond all bounds
    assert segments((4, 16), (40.0, 0.0, 0.0), 1) is None
    assert segments((4, 16), (1e308, -1e308, 1e308), 5) is None
    assert segments((4, 16), (1.5, -0.5, 0.0), 99) == [3] * 33


@pytest.mark.parametrize("backend", TRITON)
def test_coefficients_beyond_float16_are_iterated_in_bfloat16(
    backend: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, device = backend
    monkeypatch.delattr(on_gram, "iterate_")
    size = 4 if device == "cpu" else 256
    x = torch.randn(1, size, size, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    expected = x.clone()
    orthogonalise_(expected, (40.0, 0.0, 0.0), 1, 1e-7, backend="torch")
    orthogonalise_(x, (40.0, 0.0, 0.0), 1, 1e-7, backend=where)
    torch.testing.assert_close(x, expected)
