"""Reading and writing of flat buffers in Triton kernels: widening, rounding, and stochastic rounding.

The random bits are those of ``rounding.py``, computed in 32-bit arithmetic.
"""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

import triton
import triton.language as tl

from hdet_kernels.ops.backends import interpreting

GOLDEN = tl.constexpr(0x9E3779B9)
INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def key_of(seed, t):
    """Return the key of a slot's random bits at step ``t``."""
    return mix((seed.to(tl.int64) + t.to(tl.int64) * GOLDEN).to(tl.uint32))


@triton.jit
def random_base(quad, key):
    """Return the base of the random bits of all streams. Flat positions ``4·quad`` .. ``4·quad + 3`` share a hash."""
    return mix(quad.to(tl.uint32) ^ key) + (quad >> 32).to(tl.uint32)


@triton.jit
def random_bits(base, at, STREAM: tl.constexpr, FURTHER: tl.constexpr = 0):
    """Return the 16 random bits of flat positions ``at``, as uint32.

    ``base`` has a number for each position, or one for each four. ``FURTHER`` gives a position the bits of another one
    of its four: of the one that lies so much further, or in front of it.
    """
    once = (base + (STREAM * GOLDEN & 0xFFFFFFFF)).to(tl.uint64) * 0xD2511F53
    high = (once >> 32).to(tl.uint32)
    twice = (high ^ once.to(tl.uint32)).to(tl.uint64) * 0xCD9E8D57
    low = twice.to(tl.uint32)
    if base.shape[0] == at.shape[0]:
        part = at + FURTHER
        word = tl.where((part & 2) != 0, (twice >> 32).to(tl.uint32) ^ ((low << 16) | (low >> 16)), low ^ high)
        bits = (word >> ((part & 1) * 16).to(tl.uint32)) & 0xFFFF
    else:
        first, second = low ^ high, (twice >> 32).to(tl.uint32) ^ ((low << 16) | (low >> 16))
        parts = (first & 0xFFFF, first >> 16, second & 0xFFFF, second >> 16)
        even = tl.join(parts[FURTHER % 4], parts[(FURTHER + 2) % 4])
        odd = tl.join(parts[(FURTHER + 1) % 4], parts[(FURTHER + 3) % 4])
        bits = tl.reshape(tl.join(even, odd), at.shape)
    return bits


@triton.jit
def fours(BLOCK: tl.constexpr, CODED: tl.constexpr):
    """Return the numbers of the fours in ``BLOCK`` elements, for :func:`random_base`: so that they share a hash.

    With states in 8 bits there is one number for each four. Otherwise every element has the number of its four, written
    so that the compiler sees the same one; for states in 8 bits, all of which use one hash, it would not.
    """
    number = tl.arange(0, BLOCK // 4)
    if not CODED:
        number = tl.reshape(tl.broadcast_to(number[:, None], [BLOCK // 4, 4]), [BLOCK])
    return number


@triton.jit
def read(flat, at, mask, dtype: tl.constexpr):
    """Load elements ``at`` of a flat buffer as ``dtype``."""
    return tl.load(flat + at, mask=mask, other=0.0).to(dtype)


@triton.jit
def write(flat, at, value, mask, random, STREAM: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Store ``value``, rounded to the buffer's dtype. ``STREAM`` is 0 for parameters, 2 and up for their states."""
    dtype: tl.constexpr = flat.dtype.element_ty
    if dtype == tl.bfloat16 and STOCHASTIC:
        value = _to_bfloat16(value, random_bits(random, at, STREAM))
    tl.store(flat + at, nearest(value, dtype), mask=mask)


@triton.jit
def nearest(value, dtype: tl.constexpr):
    """Round to the nearest number of ``dtype``, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16 and value.dtype == tl.float32:
        # The GPU has an instruction for this; the interpreter truncates.
        value = _to_bfloat16(value, ((value.to(tl.uint32, bitcast=True) >> 16) & 1) + 0x7FFF)
    return value.to(dtype)


@triton.jit
def widened(value, dtype: tl.constexpr):
    """Convert to a wider ``dtype``, exactly."""
    if INTERPRETED and dtype == tl.float32 and value.dtype == tl.bfloat16:
        # The interpreter converts numbers below 2⁻¹²⁶ wrongly.
        value = (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit
def short_ratio(x, y):
    """Return x/y, wrong in the last bits, in fewer instructions than a division. It is 0 for |y| above 2¹²⁶."""
    if INTERPRETED:
        quotient = x / y
    else:
        quotient = x * tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, True, 1)
    return quotient


@triton.jit
def split_master(master):
    """Return the bits of the bf16 parameter and of the lower half, uint16, of a float32 master.

    The parameter is the master rounded to nearest, ties away from zero. Every NaN becomes one NaN.
    """
    bits = tl.where(master == master, master.to(tl.uint32, bitcast=True), 0x7FC00000)
    return ((bits + 0x8000) >> 16).to(tl.uint16), bits.to(tl.uint16)


@triton.jit
def joined_master(param, low):
    """Return the float32 master of a bf16 parameter and its lower half, int16.

    The lower half may belong to a parameter that other code has replaced by zero or infinity: a sum below zero or
    above infinity ends there.
    """
    bits = param.to(tl.uint16, bitcast=True).to(tl.uint32)
    rounded = ((bits & 0x7FFF) << 16).to(tl.int32)
    magnitude = tl.minimum(tl.maximum(rounded + low.to(tl.int32), 0), tl.maximum(rounded, 0x7F800000))
    return (magnitude.to(tl.uint32) | ((bits & 0x8000) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def _to_bfloat16(value, addend):
    """Add to the low 16 bits and cut them off; a carry rounds up. NaN stays NaN, and infinity never carries."""
    if INTERPRETED:
        bits = tl.where(value == value, value.to(tl.uint32, bitcast=True) + addend, 0x7FC00000)
    else:
        # The arithmetic of a GPU has one NaN, 0x7FFFFFFF, to which nothing can be added. As whole numbers, all other
        # floats are less than 0x7FC00000.
        least = tl.minimum(value.to(tl.int32, bitcast=True), 0x7FC00000)
        bits = least.to(tl.uint32, bitcast=True) + addend
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def mix(x):
    """Return MurmurHash3's finaliser of uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
