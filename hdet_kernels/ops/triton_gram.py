"""The kernels of Newton–Schulz in Triton: symmetric products, half of which is computed, and scaling by norms."""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hdet_kernels.ops.backends import interpreting
from hdet_kernels.ops.triton_rounding import nearest, widened

# The side of a tile of the result, the length of the part of the sum that is loaded at a time, warps and stages. Two
# programs share a multiprocessor. On an H200, 8 warps took 6 % less for x·xᵀ of [2048, 8192], but 13 to 27 % more for
# squares of 1024 and 2048, of which there are more. Tiles of 64 took 23 to 62 % more with 768 rows, 6 to 8 % more with
# 512, and 5 to 12 % less with 256.
TILE, INNER, WARPS, STAGES = 128, 64, 4, 3

# Elements that a program scales: 16 bytes a thread. On an H200 that reached 4.1 TB/s; 1024, 4096 and 8192 elements took
# 5 to 10 % longer.
BLOCK, SCALE_WARPS = 2048, 8


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
        out: float16 [batch, m, m], contiguous, and none of the others.
        alpha: The factor of the product.
        base: float16 [batch, m, m], symmetric and contiguous; None for 0.
        beta: The factor of ``base``.
        diagonal: The factor of the identity.

    Returns:
        ``out``.
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
    """Write ``factor·x``, divided by the norm of each matrix.

    Args:
        x: bfloat16 or float16 [batch, rows, columns], each matrix row by row without gaps.
        out: Like ``x``, in a dtype of its own. It may be the memory of ``x``.
        factor: The factor.
        norms: float32 [batch], contiguous; None for 1.

    Returns:
        ``out``.
    """
    length = x[0].numel()
    with torch.cuda.device_of(x):
        _scale[(triton.cdiv(length, BLOCK), len(x))](
            x, out, norms, factor, length, x.stride(0), out.stride(0), BLOCK=BLOCK, num_warps=SCALE_WARPS
        )
    return out
