"""The norm of all gradients of each replica in Triton: one launch reads them, a second, small one sums the partials.

There are no atomics. Every program writes a partial sum of its own, and they are summed in a fixed order.
"""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hdet_kernels.ops.chunks import CHUNK, EMPTY_GRADIENT, GRADIENT_DTYPES, ChunkTable, MatchedGradients

# The most programs that share the chunks. It is a constant, so that the order of the sum, and with it the last bit of
# the norm, does not depend on the GPU: 15 for each of the 132 processors of an H200. With 4 warps a thread has 16
# elements of a chunk, in fp32 four 16-byte loads.
PROGRAMS = 2048
WARPS = 4

_CHUNK = tl.constexpr(CHUNK)
_EMPTY_GRADIENT = tl.constexpr(EMPTY_GRADIENT)
_FLOAT32 = tl.constexpr(GRADIENT_DTYPES.index(torch.float32))
_FLOAT64 = tl.constexpr(GRADIENT_DTYPES.index(torch.float64))
_BFLOAT16 = tl.constexpr(GRADIENT_DTYPES.index(torch.bfloat16))

# The bytes of a vector access.
_ALIGNED = tl.constexpr(16)


@triton.jit(do_not_specialize=["count", "each", "programs"])
def _reduce(chunks, gradients, partials, count, each, programs):
    """Store Σ g² over ``each`` chunks. A replica has ``count`` chunks, which ``programs`` programs share."""
    total = tl.cast(0.0, tl.float64)
    row = tl.program_id(0) // programs
    index = row * count + tl.program_id(0) % programs * each
    end = tl.minimum(index + each, (row + 1) * count)
    while index < end:  # not a range: the interpreter of Triton 3.6 cannot run over one with a recent numpy
        chunk = chunks + tl.cast(index, tl.int64) * 4
        start = tl.load(chunk + 1)
        length = tl.load(chunk + 2)
        gradient = gradients + tl.load(chunk + 3) * 2
        address = tl.load(gradient)
        number = tl.load(gradient + 1)
        if address > _EMPTY_GRADIENT:
            if number == _FLOAT32:
                total += _reduce_chunk(address, start, length, tl.float32)
            elif number == _FLOAT64:
                total += _reduce_chunk(address, start, length, tl.float64)
            elif number == _BFLOAT16:
                total += _reduce_chunk(address, start, length, tl.bfloat16)
            else:
                total += _reduce_chunk(address, start, length, tl.float16)
        index += 1
    tl.store(partials + tl.program_id(0), total)


@triton.jit
def _reduce_chunk(address, start, length, TYPE: tl.constexpr):
    lanes = tl.arange(0, _CHUNK)
    grad = address.to(tl.pointer_type(TYPE)) + start
    if (length == _CHUNK) & (address % _ALIGNED == 0):
        # Tell the compiler what was just tested, so that it loads vectors.
        part = _reduce_block(tl.load(tl.multiple_of(grad + lanes, _ALIGNED)))
    else:
        part = _reduce_block(tl.load(grad + lanes, mask=lanes < length, other=0.0))
    return part


@triton.jit
def _reduce_block(g):
    if g.dtype != tl.float64:
        g = g.to(tl.float32)
    # Squared in float64, so that the norm of a gradient of 1e25 does not overflow.
    g = g.to(tl.float64)
    return tl.sum(g * g)


@triton.jit(do_not_specialize=["count"])
def _finish(partials, result, count, PROGRAMS: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, PROGRAMS)
    total = tl.sum(tl.load(partials + row * count + lanes, mask=lanes < count, other=0.0))
    tl.store(result + row, tl.sqrt(total))


def grad_norm(chunks: ChunkTable, grads: MatchedGradients, rows: int) -> Tensor:
    """Return the norm of the gradients of each of ``rows`` replicas, float64 [rows]."""
    result = torch.empty(rows, dtype=torch.float64, device=chunks.device)
    count = len(chunks.chunks) // rows
    each = max(triton.cdiv(count, max(PROGRAMS // rows, 1)), 1)
    programs = max(triton.cdiv(count, each), 1)
    partials = torch.empty(rows * programs, dtype=torch.float64, device=chunks.device)
    with torch.cuda.device_of(result):
        _reduce[(rows * programs,)](
            chunks.chunks, chunks.point_at(grads), partials, count, each, programs, num_warps=WARPS
        )
        _finish[(rows,)](partials, result, programs, PROGRAMS=PROGRAMS)
    return result
