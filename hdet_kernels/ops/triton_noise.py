"""Normal noise in Triton: one program for every block of a chunk, over the same tables as ``csrc/noise_cuda.cu``.

The numbers are those of ``reference_noise.py``, computed in 32-bit arithmetic.
"""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hdet_kernels.ops.chunks import CHUNK, EMPTY_GRADIENT, GRADIENT_DTYPES, ChunkTable, MatchedGradients
from hdet_kernels.ops.operators import fake_in_place, register
from hdet_kernels.ops.triton_rounding import GOLDEN, mix, nearest, widened

# Elements of one program: 8 for each thread. The shape was not measured, because this runs once. Products and sums are
# not fused, so that the bits are those of plain torch.
BLOCK = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

_CHUNK = tl.constexpr(CHUNK)
_EMPTY_GRADIENT = tl.constexpr(EMPTY_GRADIENT)
_FLOAT32 = tl.constexpr(GRADIENT_DTYPES.index(torch.float32))
_BFLOAT16 = tl.constexpr(GRADIENT_DTYPES.index(torch.bfloat16))


@triton.jit
def _noise_chunk(chunks, tensors, keys, scales, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Add noise to one block. With ``WIDE`` all tensors are float64, otherwise none is."""
    program = tl.program_id(0).to(tl.int64)
    chunk = chunks + program // (_CHUNK // BLOCK) * 4
    begin = program % (_CHUNK // BLOCK) * BLOCK
    start = tl.load(chunk + 1) + begin
    count = tl.load(chunk + 2) - begin
    slot = tl.load(chunk + 3)
    address = tl.load(tensors + slot * 2)
    number = tl.load(tensors + slot * 2 + 1)
    if (count > 0) & (address > _EMPTY_GRADIENT):
        key = tl.load(keys + slot)
        scale = tl.load(scales + slot)
        if WIDE:
            _add_as(tl.float64, tl.float64, address, start, count, key, scale, BLOCK)
        elif number == _FLOAT32:
            _add_as(tl.float32, tl.float32, address, start, count, key, scale, BLOCK)
        elif number == _BFLOAT16:
            _add_as(tl.bfloat16, tl.float32, address, start, count, key, scale, BLOCK)
        else:
            _add_as(tl.float16, tl.float32, address, start, count, key, scale, BLOCK)


@triton.jit
def _add_as(TYPE: tl.constexpr, wide: tl.constexpr, address, start, count, key, scale, BLOCK: tl.constexpr):
    # The vectors of 16-bit tensors have as many elements: longer ones would give threads other elements.
    VECTOR: tl.constexpr = 128 // wide.primitive_bitwidth
    size: tl.constexpr = TYPE.primitive_bitwidth // 8
    lanes = tl.arange(0, BLOCK)
    at = address.to(tl.pointer_type(TYPE)) + start + lanes
    noise = scale.to(wide) * _normals(key, start + lanes).to(wide)
    if (count >= BLOCK) & ((address + start * size) % (VECTOR * size) == 0):
        # Tell the compiler what was just tested, so that VECTOR elements become one access.
        at = tl.multiple_of(at, VECTOR * size)
        tl.store(at, nearest(widened(tl.load(at), wide) + noise, TYPE))
    else:
        inside = lanes < count
        value = widened(tl.load(at, mask=inside, other=0.0), wide) + noise
        tl.store(at, nearest(value, TYPE), mask=inside)


@triton.jit
def _normals(key, position):
    """Return standard normal numbers, float32, for positions (int64) in the slot of ``key``."""
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    high = high ^ mix(low + GOLDEN)
    low = low ^ mix(high + (2 * GOLDEN & 0xFFFFFFFF))
    high = high ^ mix(low + (3 * GOLDEN & 0xFFFFFFFF))
    low = low ^ mix(high + (4 * GOLDEN & 0xFFFFFFFF))
    word = _word(low, high, position)
    high = high ^ mix(low + (5 * GOLDEN & 0xFFFFFFFF))
    low = low ^ mix(high + (6 * GOLDEN & 0xFFFFFFFF))
    u = (word.to(tl.float32) + 1.0) * (2.0**-32)
    # sqrt_rn is correctly rounded; tl.sqrt is not.
    return tl.sqrt_rn(-2.0 * _log_of(u)) * _cos_of_turn(_word(low, high, position))


@triton.jit
def _word(low, high, position):
    return mix(mix(position.to(tl.uint32) ^ low) + (position >> 32).to(tl.uint32) + high)


@triton.jit
def _log_of(u):
    bits = u.to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23
    f = (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0
    power = k.to(tl.float32)
    square = f * f
    p = 7.0376836292e-2 * f - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    p = p * f * square - 2.12194440e-4 * power - 0.5 * square
    return f + p + 0.693359375 * power


@triton.jit
def _cos_of_turn(word):
    quarter = (word + (1 << 29)) >> 30
    x = (word - (quarter << 30)).to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-9
    square = x * x
    c = 2.443315711809948e-5 * square - 1.388731625493765e-3
    c = (c * square + 4.166664568298827e-2) * square * square - 0.5 * square + 1.0
    s = -1.9515295891e-4 * square + 8.3321608736e-3
    s = (s * square - 1.6666654611e-1) * square * x + x
    value = tl.where((quarter & 1) != 0, s, c)
    return tl.where((((quarter + 1) >> 1) & 1) != 0, -value, value)


def add_noise_(table: ChunkTable, tensors: MatchedGradients, keys: Tensor, scales: Tensor) -> None:
    """Add normal noise to every tensor."""
    _operator()(table.chunks, table.point_at(tensors), keys, scales, table.dtype == torch.float64)


@cache
def _operator() -> Any:
    """Register the operator, once, and return it.

    Its schema is that of ``csrc/library.cpp``, except for ``wide``: the host knows whether the tensors are float64 and
    launches another kernel for them.
    """
    return register(
        "triton_add_noise_",
        "Tensor chunks, Tensor(a!) tensors, Tensor keys, Tensor scales, bool wide",
        "()",
        _add_noise,
        fake_in_place,
    )


def _add_noise(chunks: Tensor, tensors: Tensor, keys: Tensor, scales: Tensor, wide: bool) -> None:
    if not len(chunks):
        return
    grid = (len(chunks) * (CHUNK // BLOCK),)
    with torch.cuda.device_of(chunks):
        _noise_chunk[grid](chunks, tensors, keys, scales, WIDE=wide, BLOCK=BLOCK, **OPTIONS)
