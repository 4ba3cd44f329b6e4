"""The two sums of squares of amsgrad in 8 bits in Triton kernels. ``amsgrad_codes.py`` has the equations.

A program works on one block of codes, so its scales are scalars.
"""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

import triton
import triton.language as tl

from hdet_kernels.ops.amsgrad_codes import (
    ALL_MISSING,
    DROPPED_BITS,
    HIGHEST,
    INFINITY_BITS,
    LOWEST_BITS,
    PER_SQUARE,
    SMALLEST_EXPONENT,
    SQUARES,
)
from hdet_kernels.ops.triton_companding import read_codes

_DROPPED_BITS = tl.constexpr(DROPPED_BITS)
_HALF = tl.constexpr(1 << (DROPPED_BITS - 1))
_LOWEST_BITS = tl.constexpr(LOWEST_BITS)
_SMALLEST_EXPONENT = tl.constexpr(SMALLEST_EXPONENT)
_HIGHEST = tl.constexpr(HIGHEST)
_INFINITY_BITS = tl.constexpr(INFINITY_BITS)
_SQUARES = tl.constexpr(SQUARES)
_PER_SQUARE = tl.constexpr(PER_SQUARE)
_ALL_MISSING = tl.constexpr(ALL_MISSING)

# Added to a small number, this rounds it to a whole number, which the bits of the sum then have more than its own.
_ROUNDING = tl.constexpr(1.5 * 2**23)
_ROUNDING_BITS = tl.constexpr(0x4B400000)


@triton.jit
def read_amsgrad(current, largest, current_scale, largest_scale, at, mask):
    """Return the current and the largest sums of elements ``at``, whose scales are at the given places; 0 outside."""
    peak = _decoded(tl.load(largest + at, mask=mask, other=0).to(tl.int32), tl.load(largest_scale))
    peak = tl.where(mask, peak, 0.0)
    steps = 255 - tl.load(current + at, mask=mask, other=0).to(tl.float32)
    share = (_SQUARES - steps * steps) * (peak * _PER_SQUARE)
    own = read_codes(current, current_scale, at, mask, False)
    return tl.where(tl.load(current_scale) < 0, share, own), peak


@triton.jit
def write_amsgrad(current, largest, current_scale, largest_scale, at, value, peak, mask, z):
    """Store codes of both sums, the current ones ``value`` as shares, rounded with the centred noise ``z``."""
    bits = tl.minimum(tl.abs(peak).to(tl.int32, bitcast=True), _INFINITY_BITS)
    most = tl.max(tl.where(mask, bits, -1), axis=0)
    exponent = tl.maximum(_rounded(tl.maximum(most, 0)) >> 3, _SMALLEST_EXPONENT)
    scale = tl.where(most >= _INFINITY_BITS, float("nan"), (exponent << 23).to(tl.float32, bitcast=True))
    tl.store(current_scale, -scale, mask=most >= 0)
    tl.store(largest_scale, scale, mask=most >= 0)

    code = tl.maximum(_rounded(bits) - ((exponent - 31) << 3), 0)
    tl.store(largest + at, code.to(tl.uint8), mask=mask)
    missing = _ALL_MISSING - value / (_decoded(code, scale) * _PER_SQUARE)
    missing = tl.where(missing > 0, missing, 0.0)  # also where it is NaN
    steps = tl.minimum(tl.sqrt(tl.maximum((missing - 0.25) + z * z, 0.0)) + z, 255.0)
    # The difference of bits is no result of a float instruction: see write_codes.
    steps = (steps + _ROUNDING).to(tl.int32, bitcast=True) - _ROUNDING_BITS
    tl.store(current + at, (255 - steps).to(tl.uint8), mask=mask)


@triton.jit
def _rounded(bits):
    return tl.minimum((bits + _HALF) >> _DROPPED_BITS, _HIGHEST)


@triton.jit
def _decoded(code, scale):
    return ((code << _DROPPED_BITS) + _LOWEST_BITS).to(tl.float32, bitcast=True) * scale
