"""Optimizer state in 8 bits in Triton kernels. ``companding.py`` has the equations.

A program works on whole blocks of codes, one in each row of its elements, whose scales follow each other from
``scales`` on. A GPU converts whole numbers, and takes roots, at an eighth of the rate of sums and products. So whole
numbers become floats by their bits: with the upper byte 0x4B a float is 2²³ plus the lower bytes, and with the upper
bits 0x428 it is 64 plus the lower ones over 2¹⁷.
"""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

import triton
import triton.language as tl

from hdet_kernels.ops.companding import BLOCK, SMALLEST_SCALE, TOP
from hdet_kernels.ops.triton_rounding import INTERPRETED, random_bits, short_ratio

_BLOCK = tl.constexpr(BLOCK)
_TOP_SIGNED, _TOP = tl.constexpr(TOP[True]), tl.constexpr(TOP[False])
_SMALLEST_SIGNED, _SMALLEST = tl.constexpr(SMALLEST_SCALE[True]), tl.constexpr(SMALLEST_SCALE[False])

# Added to a small number, this rounds it to a whole number, whose lowest byte is then that of the sum's bits.
_ROUNDING = tl.constexpr(1.5 * 2**23)


@triton.jit
def tile(BLOCK: tl.constexpr):
    """Return the numbers of ``BLOCK`` elements, one block of codes in each row."""
    return tl.arange(0, BLOCK // _BLOCK)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]


@triton.jit
def read_codes(codes, scales, at, mask, SIGNED: tl.constexpr):
    """Return the values of elements ``at``; 0 outside of the mask."""
    above = (tl.load(codes + at, mask=mask, other=0).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    # A chunk has scales for all of its blocks, so no mask is needed.
    scale = tl.load(scales + tl.arange(0, at.shape[0])[:, None])
    if SIGNED:
        steps = above - (2**23 + 128)
        level = steps * tl.abs(steps)
    else:
        odd = 2 * above - (2**24 - 1)
        level = (odd * odd) * (odd * odd)
    return tl.where(mask, level * (scale * (1 / _TOP_SIGNED if SIGNED else 1 / _TOP)), 0.0)


@triton.jit
def write_codes(codes, scales, at, value, mask, random, SIGNED: tl.constexpr):
    """Store codes of ``value``, rounded stochastically, and the scales of their blocks.

    Roots and quotients that are wrong in their last bits do no harm: see ``csrc/companding.h``.
    """
    # As whole numbers, the bits of magnitudes have their order, and those of infinities and NaNs are the largest. A sum
    # of squares is its magnitude, but for NaNs of a CPU.
    magnitude = tl.abs(value) if SIGNED or INTERPRETED else value
    bits = tl.where(mask, magnitude.to(tl.int32, bitcast=True), -1)
    largest = tl.max(bits, axis=1, keep_dims=True)
    scale = tl.maximum(largest.to(tl.float32, bitcast=True), _SMALLEST_SIGNED if SIGNED else _SMALLEST)
    scale = tl.where(largest >= 0x7F800000, float("nan"), scale)
    tl.store(scales + tl.arange(0, at.shape[0])[:, None], scale, mask=largest >= 0)

    x = tl.abs(value) * short_ratio(_TOP_SIGNED if SIGNED else _TOP, scale)
    # Of the hash that four neighbours share, a parameter and its states use different parts.
    bits = random_bits(random, at, 0, 1)
    z = (bits << 1 | 0x42800000).to(tl.float32, bitcast=True) - (64.5 - 2**-17)
    if SIGNED:
        steps = tl.sqrt(tl.maximum((x - 0.25) + z * z, 0.0)) - z
        sign = value.to(tl.int32, bitcast=True) & -0x80000000
        steps = (steps.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
        code = (steps + (_ROUNDING + 128)).to(tl.int32, bitcast=True)
    else:
        y = x + 4
        # The even number e is twice the upper code. Here ties go to odd ones; either is right.
        lower = 0.5 * tl.sqrt(tl.sqrt(y)) + (_ROUNDING - 1)
        upper = lower - (_ROUNDING - 1)
        square = upper * upper
        missing = (4 * square + 1) * ((4 * square + 5) + 16 * (z * upper)) - y
        # One more if it is negative.
        code = lower.to(tl.int32, bitcast=True) + (missing.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
    tl.store(codes + at, code.to(tl.uint8), mask=mask)
