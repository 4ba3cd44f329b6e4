"""Optimizer state in 8 bits in Triton kernels. ``companding.py`` has the equations.

A program works on whole blocks of codes, one after the other from ``scales`` on.
"""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

import triton
import triton.language as tl

from hdet_kernels.ops.companding import BLOCK, SMALLEST_SCALE, TOP
from hdet_kernels.ops.triton_rounding import random_bits

_BLOCK = tl.constexpr(BLOCK)
_TOP_SIGNED, _TOP = tl.constexpr(TOP[True]), tl.constexpr(TOP[False])
_SMALLEST_SIGNED, _SMALLEST = tl.constexpr(SMALLEST_SCALE[True]), tl.constexpr(SMALLEST_SCALE[False])

# Added to a small number, this rounds it to a whole number, whose lowest byte is then that of the sum's bits.
_ROUNDING = tl.constexpr(1.5 * 2**23)


@triton.jit
def read_codes(codes, scales, at, mask, SIGNED: tl.constexpr):
    """Return the values of elements ``at``; 0 outside of the mask."""
    steps = tl.load(codes + at, mask=mask, other=0).to(tl.float32)
    blocks: tl.constexpr = at.shape[0] // _BLOCK
    any_inside = tl.max(tl.reshape(mask.to(tl.int32), [blocks, _BLOCK]), axis=1) > 0
    scale = tl.load(scales + tl.arange(0, blocks), mask=any_inside, other=0.0)
    unit = _spread(scale * (1 / _TOP_SIGNED if SIGNED else 1 / _TOP))
    if SIGNED:
        steps = steps - 128
        level = steps * tl.abs(steps)
    else:
        square = (2 * steps + 1) * (2 * steps + 1)
        level = square * square
    return tl.where(mask, level * unit, 0.0)


@triton.jit
def write_codes(codes, scales, at, value, mask, random, SIGNED: tl.constexpr):
    """Store codes of ``value``, rounded stochastically, and the scales of their blocks."""
    blocks: tl.constexpr = at.shape[0] // _BLOCK
    top: tl.constexpr = _TOP_SIGNED if SIGNED else _TOP
    # As whole numbers, the bits of magnitudes have their order, and those of infinities and NaNs are the largest.
    bits = tl.where(mask, tl.abs(value).to(tl.int32, bitcast=True), 0)
    largest = tl.max(tl.reshape(bits, [blocks, _BLOCK]), axis=1)
    scale = tl.maximum(largest.to(tl.float32, bitcast=True), _SMALLEST_SIGNED if SIGNED else _SMALLEST)
    scale = tl.where(largest >= 0x7F800000, float("nan"), scale)
    any_inside = tl.max(tl.reshape(mask.to(tl.int32), [blocks, _BLOCK]), axis=1) > 0
    tl.store(scales + tl.arange(0, blocks), scale, mask=any_inside)

    x = tl.abs(value) * _spread(tl.div_rn(tl.full([blocks], top, tl.float32), scale))
    x = tl.where(x < top, x, top)  # also where it is NaN
    # Of the hash that four neighbours share, a parameter and its states use different parts.
    bits = random_bits(random, (at & ~3) | ((at + 1) & 3), 0)
    z = (bits.to(tl.float32) - 32767.5) * 0.0000152587890625  # 2⁻¹⁶
    if SIGNED:
        root = tl.sqrt(tl.maximum((x - 0.25) + z * z, 0.0))
        steps = root - z
        code = (tl.where(value < 0, -steps, steps) + (_ROUNDING + 128)).to(tl.int32, bitcast=True)
    else:
        # A root that is wrong in its last bits does no harm: see csrc/companding.h.
        y = x + 4
        above = 0.5 * tl.sqrt(tl.sqrt(y)) + _ROUNDING
        even = 2 * (above - _ROUNDING)
        square = even * even
        taken = (square + 1) * ((square + 5) + 8 * z * even) < y
        code = above.to(tl.int32, bitcast=True) - tl.where(taken, 0, 1)
    tl.store(codes + at, code.to(tl.uint8), mask=mask)


@triton.jit
def _spread(of_blocks):
    """Return each block's number for each of its elements."""
    blocks: tl.constexpr = of_blocks.shape[0]
    return tl.reshape(tl.broadcast_to(of_blocks[:, None], [blocks, _BLOCK]), [blocks * _BLOCK])
