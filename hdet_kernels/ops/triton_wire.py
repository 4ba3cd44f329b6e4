"""The compressed average in Triton: a program has a grain of elements, a block of them in each row of its tile.

:mod:`~hdet_kernels.ops.wire` has the equations. Products and sums are rounded each (no fusion) and quotients correctly
(``div_rn``), so that the bits are those of plain torch.
"""
# mypy: disable-error-code="no-untyped-def"
# What is decorated with triton.jit is not Python but a program that Triton compiles: it has no types to check.

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hdet_kernels.ops import operators
from hdet_kernels.ops.triton_rounding import nearest
from hdet_kernels.ops.wire import BLOCK, FORMATS, GRAIN, row_bytes

#: A program has a grain, so that a warp has one block and a thread 8 elements of it, two 16-byte loads of each buffer,
#: as in the compiled kernels. Not measured yet: bench/test_wire.py does.
WARPS = GRAIN // BLOCK

_BLOCK = tl.constexpr(BLOCK)
_BLOCKS = tl.constexpr(GRAIN // BLOCK)
_GRAIN = tl.constexpr(GRAIN)
_BYTES = tl.constexpr(row_bytes("int8", GRAIN))
_MOST = tl.constexpr(127.0)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
#: Added to a small number it leaves no bits after the point, so that the sum is rounded, ties to even.
_WHOLE = tl.constexpr(1.5 * 2**23)

#: Elements of a vector access of float32.
_VECTOR = tl.constexpr(4)


@triton.jit(do_not_specialize=["grains", "numel"])
def _encode(x, consensus, error, codes, scales, grains, numel):
    row, grain = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    first = (row * grains + grain) * _GRAIN
    numbers = _load(x, first, numel) - _load(consensus, first, numel)
    if error is not None:
        numbers += _load(error, first, numel)
    lost = _keep(numbers, codes, scales, row, grain, grains)
    if error is not None:
        _store(error, first, numel, lost)


@triton.jit(do_not_specialize=["grains", "rows", "divisor"])
def _merge(codes, scales, error, to_codes, to_scales, grains, rows, divisor):
    grain = tl.program_id(0).to(tl.int64)
    numbers = _values(codes, scales, tl.cast(0, tl.int64), grain, grains)
    row = tl.cast(1, tl.int64)
    while row < rows:  # not a range: the interpreter of Triton 3.6 cannot run over one with a recent numpy
        numbers += _values(codes, scales, row, grain, grains)
        row += 1
    numbers = tl.div_rn(numbers, tl.full([_BLOCKS, _BLOCK], divisor, tl.float32))
    if error is not None:
        numbers += _load(error, grain * _GRAIN, grains * _GRAIN)
    lost = _keep(numbers, to_codes, to_scales, tl.cast(0, tl.int64), grain, grains)
    if error is not None:
        _store(error, grain * _GRAIN, grains * _GRAIN, lost)


@triton.jit(do_not_specialize=["grains", "numel"])
def _decode(codes, scales, consensus, target, grains, numel):
    row, grain = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    first = (row * grains + grain) * _GRAIN
    agreed = _load(consensus, first, numel) + _values(codes, scales, row, grain, grains)
    _store(consensus, first, numel, agreed)
    if target is not None:
        _store(target, first, numel, agreed)


@triton.jit
def _tile():
    """The places of a grain's elements, a block in each row."""
    return tl.arange(0, _BLOCKS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]


@triton.jit
def _load(flat, first, numel):
    """A grain from ``first`` on; zeros beyond the end."""
    tile = _tile()
    if first + _GRAIN <= numel:  # without a mask, which would keep the compiler from vectors
        values = tl.load(flat + first + tile)
    else:
        values = tl.load(flat + first + tile, mask=first + tile < numel, other=0.0)
    return values


@triton.jit
def _store(flat, first, numel, values):
    tile = _tile()
    if first + _GRAIN <= numel:
        tl.store(flat + first + tile, values)
    else:
        tl.store(flat + first + tile, values, mask=first + tile < numel)


@triton.jit
def _codes_at(codes, row, grain, grains):
    """The codes of a grain of a row. A row has the scales of its blocks behind its codes, where there are any."""
    if codes.dtype.element_ty == tl.int8:
        first = row * grains * _BYTES + grain * _GRAIN
    else:
        first = (row * grains + grain) * _GRAIN
    # No longer vectors than of the floats: those would give threads other elements, which would have to move.
    return codes + first + tl.max_contiguous(_tile(), [1, _VECTOR])


@triton.jit
def _scales_at(scales, row, grain, grains):
    first = (row * grains * _BYTES + grains * _GRAIN) // 4 + grain * _BLOCKS
    return scales + first + tl.arange(0, _BLOCKS)[:, None]


@triton.jit
def _keep(numbers, codes, scales, row, grain, grains):
    """Writes a grain as it travels; returns what it loses on the way."""
    at = _codes_at(codes, row, grain, grains)
    if codes.dtype.element_ty == tl.int8:
        # The bits of magnitudes are in the order of the numbers, with every NaN above infinity.
        largest = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1, keep_dims=True)
        scale = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full([_BLOCKS, 1], _MOST, tl.float32))
        steps = tl.div_rn(numbers, tl.broadcast_to(scale, numbers.shape))
        steps = tl.minimum(tl.maximum(steps, -_MOST), _MOST)
        steps = tl.where((scale > 0) & (scale <= _LARGEST), steps, 0.0)
        steps = (steps + _WHOLE) - _WHOLE
        tl.store(at, steps.to(tl.int32).to(tl.int8))
        tl.store(_scales_at(scales, row, grain, grains), scale)
        values = steps * scale
    else:
        kept = nearest(numbers, tl.bfloat16)
        tl.store(at, kept)
        values = kept.to(tl.float32)
    return numbers - values


@triton.jit
def _values(codes, scales, row, grain, grains):
    """What the codes of a grain of a row stand for."""
    values = tl.load(_codes_at(codes, row, grain, grains)).to(tl.float32)
    if codes.dtype.element_ty == tl.int8:
        values *= tl.load(_scales_at(scales, row, grain, grains))
    return values


@cache
def wire_operators() -> tuple[Any, Any, Any]:
    return (
        operators.register("triton_encode", operators.ENCODE, "()", encode, operators.fake_step),
        operators.register("triton_merge", operators.MERGE, "()", merge, operators.fake_step),
        operators.register("triton_decode", operators.DECODE, "()", decode, operators.fake_step),
    )


def encode(format: int, x: Tensor, consensus: Tensor, error: Tensor | None, wire: Tensor) -> None:
    grains = _grains(format, wire)
    _launch(_encode, wire, (grains, len(wire)), x, consensus, error, *_parts(format, wire), grains, x.numel())


def merge(format: int, wires: Tensor, divisor: float, error: Tensor | None, wire: Tensor) -> None:
    grains, parts = _grains(format, wire), (*_parts(format, wires), error, *_parts(format, wire))
    _launch(_merge, wire, (grains, 1), *parts, grains, len(wires), divisor)


def decode(format: int, wire: Tensor, consensus: Tensor, target: Tensor | None) -> None:
    grains = _grains(format, wire)
    _launch(_decode, wire, (grains, len(wire)), *_parts(format, wire), consensus, target, grains, consensus.numel())


def _launch(kernel: Any, wire: Tensor, grid: tuple[int, int], *arguments: object) -> None:
    if wire.numel() == 0:
        return
    with torch.cuda.device_of(wire):
        kernel[grid](*arguments, num_warps=WARPS, enable_fp_fusion=False)


def _grains(format: int, wire: Tensor) -> int:
    """The grains of a row."""
    return wire.shape[-1] // row_bytes(FORMATS[format], GRAIN)


def _parts(format: int, wire: Tensor) -> tuple[Tensor, Tensor | None]:
    """The memory of ``wire`` as codes and as scales."""
    if FORMATS[format] == "bf16":
        return wire.view(torch.bfloat16), None
    return wire.view(torch.int8), wire.view(torch.float32)
