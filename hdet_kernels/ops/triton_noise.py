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
from hdet_kernels.ops.triton_rounding import GOLDEN, nearest, widened

# Elements of one program: 16 for each thread. The registers of a thread are limited, because blocks that are not whole
# would take 116. On an H200 this reached 93 % of the copy bandwidth in fp32 and 50 % in bf16; 8 elements for each of
# 128 threads reached 86 and 43 %. Products and sums are not fused, so that the bits are those of plain torch.
BLOCK = 1024
OPTIONS = {"num_warps": 2, "maxnreg": 64, "enable_fp_fusion": False}

_ROUNDS = tl.constexpr(7)
_ANGLE = tl.constexpr(1.9264959072451404e-10)
_BELOW = tl.constexpr(2.0**-32 - 2.0**-56)
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
    if (count >= BLOCK) & (start % 2 == 0) & ((address + start * size) % (VECTOR * size) == 0):
        # Tell the compiler what was just tested, so that VECTOR elements become one access.
        at = tl.multiple_of(at, VECTOR * size)
        value = widened(tl.load(at), wide)
        noise = scale.to(wide) * _normals_from(key, start, BLOCK).to(wide)
        tl.store(at, nearest(value + noise, TYPE))
    else:
        inside = lanes < count
        value = widened(tl.load(at, mask=inside, other=0.0), wide)
        noise = scale.to(wide) * _normals_at(key, start + lanes).to(wide)
        tl.store(at, nearest(value + noise, TYPE), mask=inside)


@triton.jit
def _normals_from(key, start, COUNT: tl.constexpr):
    """Return standard normal numbers, float32, of ``COUNT`` positions from ``start`` on, which is even."""
    even, odd = _two_normals(key, (start >> 1) + tl.arange(0, COUNT // 2))
    return tl.interleave(even, odd)


@triton.jit
def _normals_at(key, position):
    """Return the same of any positions (int64)."""
    even, odd = _two_normals(key, position >> 1)
    return tl.where((position & 1) == 0, even, odd)


@triton.jit
def _two_normals(key, pair):
    """Return standard normal numbers, float32, of positions ``2·pair`` and ``2·pair + 1`` in the slot of ``key``."""
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    first, second = pair.to(tl.uint32), (pair >> 32).to(tl.uint32)
    for turn in tl.static_range(_ROUNDS):
        product = first.to(tl.uint64) * 0xD256D193
        first = (
            (product >> 32).to(tl.uint32) ^ second ^ ((low if turn % 2 == 0 else high) + (turn * GOLDEN & 0xFFFFFFFF))
        )
        second = product.to(tl.uint32)
    # sqrt_rn is correctly rounded; tl.sqrt is not.
    radius = tl.sqrt_rn(_square_of_radius(first.to(tl.float32) * _BELOW + 2.0**-33))
    radius = tl.where((second >> 31) != 0, -radius, radius)
    x = (second << 1).to(tl.int32, bitcast=True).to(tl.float32) * _ANGLE
    y = x * x
    c = (((y - 4.150471210479736) * y + 8.658533096313477) * y - 7.207971096038818) * y + 0.9999999403953552
    s = (((-2.1030359268188477 * y + 6.558581352233887) * y - 9.121904373168945) * y + 3.796833038330078) * x
    return radius * c, radius * s


@triton.jit
def _square_of_radius(u):
    bits = u.to(tl.int32, bitcast=True)
    power = (bits - 0x3F3504F3) & -0x800000
    f = 1.0 - (bits - power).to(tl.float32, bitcast=True)
    p = 0.23792216181755066 * f + 0.3733570873737335
    p = p * f + 0.40992656350135803
    p = p * f + 0.4981948733329773
    p = p * f + 0.6662901639938354
    p = p * f + 1.000022292137146
    p = p * f + 2.000001907348633
    return p * f - power.to(tl.float32) * (1.3862943611198906 * 2.0**-23)


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
