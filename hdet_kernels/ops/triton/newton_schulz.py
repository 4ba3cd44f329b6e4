"""Newton–Schulz on the Gram matrix, in float16: the way of Muon's orthogonalisation on GPUs.

With X of [m, n], m ≤ n (a taller matrix is multiplied from the other side), the steps of a segment need X once at its
begin and once at its end::

    R = X·Xᵀ
    in every step:  Q = a·I + b·R + c·R·R
                    T ← Q·T             from the second step on; T = Q in the first
                    R ← (Q·R)·Q         but in the last step
    X ← T·X

All but X are symmetric [m, m] matrices that commute, so that half of each product is computed. With α = n/m, in units
of half a product of [m, m] matrices, a segment of s steps takes α for R, 4·s − 3 for its steps and 2·α for the new X.
That is 3·α·k + 4·steps − 3·k for k segments. Segments of one step are the iteration as it is usually written: for five
steps they take 15·α + 5, where 3 + 2 steps take 6·α + 14, and whole products 20·α + 10.

Rounding errors of R make some of its small eigenvalues negative, and every step multiplies these by a². A segment ends
before that matters. Numbers have 11 bits, where bfloat16 has 8: X is scaled so that entries of R, about 1/m and less,
are in the range of float16, and Q is rounded with a on its diagonal, the same Q for T and for R.
"""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hdet_kernels.ops.backends import interpreting
from hdet_kernels.ops.triton.rounding import nearest, widened

#: X is this times the normalised matrix, and R the square of it times its Gram matrix. Where all singular values are
#: alike, entries of R are about 2¹⁰/m on the diagonal and 2¹⁰/(m·√n) beside it: at m = n = 2¹⁶ that is 2⁻¹⁴, where
#: float16 begins to lose bits. Where one singular value dominates, they reach 2¹⁰, 64 times below the largest number.
SCALE = 32.0

#: The most that rounding errors of R, 2⁻¹¹ of its norm, may become within a segment, and the most steps of one.
GREATEST_ERROR, LONGEST = 0.1, 3

#: The time of half a symmetric product as a share of that of a whole one by cuBLAS: on an H200, 0.66 to 0.72 with 2048
#: rows, 0.75 to 0.80 with 1024, 0.67 to 0.75 with 768. Five steps, one by one and as 3 + 2, took 4.00 and 2.66 ms there
#: for four matrices of [2048, 8192], and 5.25 and 5.69 ms for sixteen of [2048, 2048].
HALF = 0.7

# The side of a tile of the result, the length of the part of the sum that is loaded at a time, warps and stages. Two
# programs share a multiprocessor. On an H200, 8 warps took 6 % less for x·xᵀ of [2048, 8192], but 13 to 27 % more for
# squares of 1024 and 2048, of which there are more. Tiles of 64 took 23 to 62 % more with 768 rows, 6 to 8 % more with
# 512, and 5 to 12 % less with 256.
TILE, INNER, WARPS, STAGES = 128, 64, 4, 3

# Elements that a program scales: 16 bytes a thread. On an H200 that reached 4.1 TB/s; 1024, 4096 and 8192 elements took
# 5 to 10 % longer.
BLOCK, SCALE_WARPS = 2048, 8


def orthogonalise_(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> bool:
    """Replace each matrix of a bfloat16 batch; return False if its numbers may leave the range of float16.

    The arguments are those of :func:`hdet_kernels.ops.newton_schulz.orthogonalise_`.
    """
    steps_of_segments = segments(x.shape[1:], coefficients, steps)
    if steps_of_segments is None:
        return False
    rows_first = x if x.stride(2) == 1 else x.mT
    if rows_first.stride()[1:] == (rows_first.shape[2], 1):
        iterate_(rows_first, coefficients, eps, steps_of_segments)
    else:
        without_gaps = x.contiguous()
        iterate_(without_gaps, coefficients, eps, steps_of_segments)
        x.copy_(without_gaps)
    return True


def iterate_(x: Tensor, coefficients: tuple[float, float, float], eps: float, steps_of_segments: Sequence[int]) -> None:
    """Replace each matrix of a batch, in segments.

    It takes the memory of another ``x``, and of two [m, m] matrices for each of the batch; four with segments of more
    than one step. Each matrix of ``x`` is without gaps, row by row.
    """
    count, rows, columns = x.shape
    tall, size = rows > columns, min(rows, columns)
    norms = torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float32).clamp_(min=eps)
    now, then = torch.empty(x.shape, dtype=torch.float16, device=x.device), x.view(torch.float16)
    scale(x, now, SCALE, norms)
    squares = 4 if max(steps_of_segments, default=1) > 1 else 2
    free = list(torch.empty((squares, count, size, size), dtype=torch.float16, device=x.device))
    for steps in steps_of_segments:
        together = _segment(now.mT if tall else now, coefficients, steps, free)
        _multiply(*((now, together) if tall else (together, now)), out=then)
        now, then = then, now
    scale(now, x, 1 / SCALE)


def segments(shape: Sequence[int], coefficients: tuple[float, float, float], steps: int) -> list[int] | None:
    """Return the numbers of steps from one product with X to the next.

    k segments take the time of α·k·(1 + h) + (4·steps − 3·k)·h whole products of [m, m] matrices, where h is
    :data:`HALF`. So there are as few segments as precision allows if α·(1 + h) > 3·h (α > 1.24), else steps alone.
    The result is None if the numbers may leave the range of float16.
    """
    if not _in_range(coefficients, steps):
        return None
    longest = 1
    if max(shape) * (1 + HALF) > 3 * HALF * min(shape):
        while longest < LONGEST and coefficients[0] ** (2 * longest) * 2**-11 <= GREATEST_ERROR:
            longest += 1
    count = -(-steps // longest)
    return [steps // count + (index < steps % count) for index in range(count)]


def _segment(x: Tensor, coefficients: tuple[float, float, float], steps: int, squares: Sequence[Tensor]) -> Tensor:
    """Return T, the product of the Q of ``steps`` steps, in one of the [count, m, m] matrices ``squares``."""
    a, b, c = coefficients
    gram, *free = squares
    symmetric_product(x, x, gram)
    together: Tensor | None = None
    for step in range(steps):
        factor = symmetric_product(gram, gram, free.pop(), alpha=c / SCALE**4, base=gram, beta=b / SCALE**2, diagonal=a)
        before, together = together, factor
        if before is not None:
            together = symmetric_product(factor, before, free.pop())
            free.append(before)
        if step < steps - 1:
            half = symmetric_product(factor, gram, free.pop())
            symmetric_product(half, factor, gram)
            free.append(half)
        if factor is not together:
            free.append(factor)
    assert together is not None
    return together


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    if out.device.type == "cpu":  # for Triton's interpreter: some CPUs multiply float16 at a hundredth of the speed
        out.copy_(torch.bmm(left.float(), right.float()))
    else:
        torch.bmm(left, right, out=out)


@cache
def _in_range(coefficients: tuple[float, float, float], steps: int) -> bool:
    """Return whether eigenvalues of R, Q·R and T stay below half of the largest number of float16."""
    a, b, c = coefficients
    values = np.linspace(0, 1.1, 1101)  # the eigenvalues of R; its norm is at most 1, but for roundings
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(steps):
            factors = a + b * values + c * values**2
            later = values * factors**2
            greatest = np.abs([values * factors * SCALE**2, later * SCALE**2, factors**LONGEST]).max()
            if not greatest < 2**15:  # also of NaN
                return False
            values = later
    return True


def symmetric_product(
    x: Tensor,
    y: Tensor,
    out: Tensor,
    *,
    alpha: float = 1.0,
    base: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """Write ``alpha·x·yᵀ + beta·base + diagonal·I`` of each matrix, which is symmetric, with sums in float32.

    The tiles of the upper triangle are computed and mirrored; those on the diagonal are as symmetric as the product is.

    Args:
        x: float16 [batch, m, n] of any strides.
        y: Like ``x``, with a symmetric product ``x·yᵀ``: x itself, or symmetric and commuting with a symmetric x.
        out: float16 [batch, m, m], contiguous, and none of the others. It is returned.
        base: float16 [batch, m, m], symmetric and contiguous; None for 0.
    """
    batch, size, inner = x.shape
    # The interpreter takes a time for each tile; small tiles let small tests have several.
    tile, part = (32, 64) if interpreting() else (TILE, INNER)
    tiles = triton.cdiv(size, tile)
    numbers = (size, inner, *x.stride(), *y.stride(), alpha, beta, diagonal)
    with torch.cuda.device_of(x):
        _product[(tiles * (tiles + 1) // 2, batch)](
            x, y, base, out, *numbers, TILE=tile, INNER=part, num_warps=WARPS, num_stages=STAGES
        )
    return out


def scale(x: Tensor, out: Tensor, factor: float, norms: Tensor | None = None) -> Tensor:
    """Write ``factor·x``, divided by the norm of each matrix, to ``out``, which may be the memory of ``x``.

    They are bfloat16 or float16 [batch, rows, columns], each matrix row by row without gaps.
    """
    length = x[0].numel()
    with torch.cuda.device_of(x):
        _scale[(triton.cdiv(length, BLOCK), len(x))](
            x, out, norms, factor, length, x.stride(0), out.stride(0), BLOCK=BLOCK, num_warps=SCALE_WARPS
        )
    return out


@triton.jit
def _product(
    x,
    y,
    base,
    out,
    size,
    inner,
    x_batch,
    x_row,
    x_column,
    y_batch,
    y_row,
    y_column,
    alpha,
    beta,
    diagonal,
    TILE: tl.constexpr,
    INNER: tl.constexpr,
):
    """Write one tile of ``alpha·x·yᵀ + beta·base + diagonal·I``, and the tile on the other side of the diagonal.

    ``base`` (may be ``None``) and ``out`` are [batch, size, size] without gaps.
    """
    # Tiles are counted down the columns of the upper triangle. The root is approximate, so that it may be off by one.
    tile = tl.program_id(0)
    beside = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    beside = tl.where(beside * (beside + 1) // 2 > tile, beside - 1, beside)
    beside = tl.where((beside + 1) * (beside + 2) // 2 <= tile, beside + 1, beside)
    above = tile - beside * (beside + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    rows = (above * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = (beside * TILE + tl.arange(0, TILE)).to(tl.int64)
    within = tl.arange(0, INNER).to(tl.int64)
    x += matrix * x_batch
    y += matrix * y_batch
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, inner, INNER):
        at = start + within
        left = tl.load(
            x + rows[:, None] * x_row + at[None, :] * x_column,
            mask=(rows[:, None] < size) & (at[None, :] < inner),
            other=0.0,
        )
        right = tl.load(
            y + columns[None, :] * y_row + at[:, None] * y_column,
            mask=(columns[None, :] < size) & (at[:, None] < inner),
            other=0.0,
        )
        total = tl.dot(left, right, total)
    inside = (rows[:, None] < size) & (columns[None, :] < size)
    first = matrix * size * size
    at = rows[:, None] * size + columns[None, :]
    total = alpha * total
    if base is not None:
        total += beta * tl.load(base + first + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + first + at, rounded, mask=inside)
    if above < beside:
        mirrored = columns[:, None] * size + rows[None, :]
        inside = (columns[:, None] < size) & (rows[None, :] < size)
        tl.store(out + first + mirrored, tl.trans(rounded), mask=inside)


@triton.jit
def _scale(x, out, norms, factor, length, x_batch, out_batch, BLOCK: tl.constexpr):
    """Write ``factor·x``, divided by the norm of its matrix unless ``norms`` is ``None``."""
    matrix = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = widened(tl.load(x + matrix * x_batch + at, mask=at < length, other=0.0), tl.float32)
    if norms is not None:
        value /= tl.load(norms + matrix)
    tl.store(out + matrix * out_batch + at, nearest(factor * value, out.dtype.element_ty), mask=at < length)
