"""Optimizer state in 8 bits in Triton kernels. ``companding.py`` has the equations.

A program works on one block of codes, so its scale is a scalar. A GPU converts whole numbers, and takes roots, at an
eighth of the rate of sums and products. So whole numbers become floats by their bits: with the upper byte 0x4B a float
is 2²³ plus the lower bytes, and with the upper bits 0x428 it is 64 plus the lower ones over 2¹⁷.
"""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

import triton
import triton.language as tl

from hdet_kernels.ops.torch.companding import SMALLEST_SCALE, TOP
from hdet_kernels.ops.triton.rounding import INTERPRETED, random_bits, short_ratio

_TOP_SIGNED, _TOP = tl.constexpr(TOP[True]), tl.constexpr(TOP[False])
_SMALLEST_SIGNED, _SMALLEST = tl.constexpr(SMALLEST_SCALE[True]), tl.constexpr(SMALLEST_SCALE[False])

# Added to a small number, this rounds it to a whole number, whose lowest byte is then that of the sum's bits.
_ROUNDING = tl.constexpr(1.5 * 2**23)


@triton.jit
def centred_noise(base, at):
    """Return for each of the elements ``at`` the random number between -½ and ½ with which its codes are rounded."""
    # Of the hash that four neighbours share, a parameter and its states use different parts.
    bits = random_bits(base, at, 0, 1)
    return (bits << 1 | 0x42800000).to(tl.float32, bitcast=True) - (64.5 - 2**-17)


@triton.jit
def read_codes(codes, scale, at, mask, SIGNED: tl.constexpr):
    """Return the values of elements ``at``, whose scale is at ``scale``; 0 outside of the mask."""
    above = _above(tl.load(codes + at, mask=mask, other=0))
    # A chunk has scales for all of its blocks, so no mask is needed.
    unit = tl.load(scale) * (1 / _TOP_SIGNED if SIGNED else 1 / _TOP)
    if SIGNED:
        steps = above - (2**23 + 128)
        level = steps * tl.abs(steps)
    else:
        odd = 2 * above - (2**24 - 1)
        level = (odd * odd) * (odd * odd)
    return tl.where(mask, level * unit, 0.0)


@triton.jit
def write_codes(codes, scale, at, value, mask, z, SIGNED: tl.constexpr):
    """Store codes of ``value``, rounded with the centred noise ``z``, and at ``scale`` the scale of their block.

    Roots and quotients that are wrong in their last bits do no harm: see ``csrc/companding.h``.
    """
    # As whole numbers, the bits of magnitudes have their order, and those of infinities and NaNs are the largest. A sum
    # of squares is its magnitude, but for NaNs of a CPU.
    magnitude = tl.abs(value) if SIGNED or INTERPRETED else value
    largest = tl.max(tl.where(mask, magnitude.to(tl.int32, bitcast=True), -1), axis=0)
    new_scale = tl.maximum(largest.to(tl.float32, bitcast=True), _SMALLEST_SIGNED if SIGNED else _SMALLEST)
    new_scale = tl.where(largest >= 0x7F800000, float("nan"), new_scale)
    tl.store(scale, new_scale, mask=largest >= 0)

    # A quarter of the scale has an inverse that is not flushed to 0.
    x = tl.abs(value) * short_ratio(0.25 * (_TOP_SIGNED if SIGNED else _TOP), 0.25 * new_scale)
    if SIGNED:
        steps = tl.sqrt(tl.maximum((x - 0.25) + z * z, 0.0)) - z
        sign = value.to(tl.int32, bitcast=True) & -0x80000000
        steps = (steps.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
        # 128 is added to the bits, not to the float: ptxas 12.8 (of Triton 3.6) compiles the store of the lowest byte
        # of a float instruction's result as a conversion of the float.
        code = (steps + _ROUNDING).to(tl.int32, bitcast=True) + 128
    else:
        y = x + 4
        # Half of the even number e is the upper code. Here ties go to odd ones; either is right.
        lower = 0.5 * tl.sqrt(tl.sqrt(y)) + (_ROUNDING - 1)
        even = 2 * lower - 2 * (_ROUNDING - 1)
        # With fused products, the second form is one instruction less. Only the first has plain torch's last bit.
        mean = (even * even + 5) + 8 * z * even if INTERPRETED else even * (8 * z + even) + 5
        missing = (even * even + 1) * mean - y
        # One more if it is negative.
        code = lower.to(tl.int32, bitcast=True) + (missing.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
    tl.store(codes + at, code.to(tl.uint8), mask=mask)


@triton.jit
def _above(codes):
    """Return codes plus 2²³, as floats."""
    if INTERPRETED:
        above = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    else:
        # One instruction for each code, where the compiler takes two.
        above = tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $4, 0x4B000000, 0x7550;
            prmt.b32 $1, $4, 0x4B000000, 0x7551;
            prmt.b32 $2, $4, 0x4B000000, 0x7552;
            prmt.b32 $3, $4, 0x4B000000, 0x7553;
            """,
            "=r,=r,=r,=r,r",
            [codes],
            tl.float32,
            True,
            4,
        )
    return above
