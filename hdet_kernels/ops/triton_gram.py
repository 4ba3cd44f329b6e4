"""The symmetric products of Newton–Schulz in Triton: the tiles of the upper triangle are computed and mirrored."""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hdet_kernels.ops.backends import interpreting
from hdet_kernels.ops.triton_rounding import nearest

# The side of a tile of the result, the length of the part of the sum that is loaded at a time, warps and stages: the
# usual choice for products of bfloat16 on Hopper, not measured here.
TILE, INNER, WARPS, STAGES = 128, 64, 8, 3


@triton.jit
def _gram(
    x,
    base,
    out,
    size,
    inner,
    batch_stride,
    row_stride,
    column_stride,
    beta,
    alpha,
    TILE: tl.constexpr,
    INNER: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write one tile of ``beta·base + alpha·x·xᵀ``, and the tile on the other side of the diagonal.

    ``base`` (may be ``None``) and ``out`` are [batch, size, size] without gaps, and ``base`` is symmetric.
    """
    tiles = tl.cdiv(size, TILE)
    above, beside = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if above <= beside:
        matrix = tl.program_id(1).to(tl.int64)
        rows = (above * TILE + tl.arange(0, TILE)).to(tl.int64)
        columns = (beside * TILE + tl.arange(0, TILE)).to(tl.int64)
        within = tl.arange(0, INNER).to(tl.int64)
        x += matrix * batch_stride
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        for start in range(0, inner, INNER):
            at = start + within
            left = tl.load(
                x + rows[:, None] * row_stride + at[None, :] * column_stride,
                mask=(rows[:, None] < size) & (at[None, :] < inner),
                other=0.0,
            )
            right = tl.load(
                x + columns[None, :] * row_stride + at[:, None] * column_stride,
                mask=(columns[None, :] < size) & (at[:, None] < inner),
                other=0.0,
            )
            if WIDE:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, right, total)
        inside = (rows[:, None] < size) & (columns[None, :] < size)
        first = matrix * size * size
        at = rows[:, None] * size + columns[None, :]
        total = alpha * total
        if base is not None:
            total += beta * tl.load(base + first + at, mask=inside, other=0.0).to(tl.float32)
        tile = nearest(total, out.dtype.element_ty)
        tl.store(out + first + at, tile, mask=inside)
        if above < beside:
            mirrored = columns[:, None] * size + rows[None, :]
            inside = (columns[:, None] < size) & (rows[None, :] < size)
            tl.store(out + first + mirrored, tl.trans(tile), mask=inside)


def gram(x: Tensor, base: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """Return ``beta·base + alpha·x·xᵀ`` of each matrix, bfloat16 [batch, m, m], with sums in float32.

    Args:
        x: bfloat16 [batch, m, n] of any strides.
        base: bfloat16 [batch, m, m], symmetric and contiguous; None for 0.
        beta: The factor of ``base``.
        alpha: The factor of the product.
    """
    batch, size, inner = x.shape
    out = torch.empty((batch, size, size), dtype=x.dtype, device=x.device)
    # The interpreter takes a time for each tile, and multiplies the bits of bfloat16 as whole numbers.
    shape = {"TILE": 32, "INNER": 32, "WIDE": True} if interpreting() else {"TILE": TILE, "INNER": INNER, "WIDE": False}
    tiles = triton.cdiv(size, shape["TILE"])
    with torch.cuda.device_of(x):
        _gram[(tiles * tiles, batch)](
            x, base, out, size, inner, *x.stride(), beta, alpha, **shape, num_warps=WARPS, num_stages=STAGES
        )
    return out
