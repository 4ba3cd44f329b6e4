"""The compressed average in Triton: a program has a tile of elements, a block in each row of it.

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

#: Blocks of one program, and how it is launched. With one warp nothing that is done to a block has to wait for another,
#: however Triton gives elements to threads (of 4 warps and 4 blocks, two warps share each block); a thread has 16
#: elements, four 16-byte loads of each buffer. Not measured yet: bench/test_wire.py does.
BLOCKS = 2
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}

_BLOCK = tl.constexpr(BLOCK)
_BLOCKS = tl.constexpr(BLOCKS)
_TILE = tl.constexpr(BLOCKS * BLOCK)
_TILE_BYTES = tl.constexpr(row_bytes("int8", BLOCKS * BLOCK))
_MOST = tl.constexpr(127.0)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
#: Added to a small number it leaves no bits after the point, so that the sum is rounded, ties to even.
_WHOLE = tl.constexpr(1.5 * 2**23)

#: Elements of a vector access of float32.
_VECTOR = tl.constexpr(4)


@triton.jit(do_not_specialize=["tiles", "numel"])
def _encode(x, consensus, error, codes, scales, tiles, numel):
    row, tile = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    first = (row * tiles + tile) * _TILE
    numbers = _load(x, first, numel) - _load(consensus, first, numel)
    if error is not None:
        numbers += _load(error, first, numel)
    lost = _keep(numbers, codes, scales, row, tile, tiles)
    if error is not None:
        _store(error, first, numel, lost)


@triton.jit(do_not_specialize=["tiles", "rows", "divisor"])
def _merge(codes, scales, error, to_codes, to_scales, tiles, rows, divisor):
    tile = tl.program_id(0).to(tl.int64)
    numbers = _values(codes, scales, tl.cast(0, tl.int64), tile, tiles)
    row = tl.cast(1, tl.int64)
    while row < rows:  # not a range: the interpreter of Triton 3.6 cannot run over one with a recent numpy
        numbers += _values(codes, scales, row, tile, tiles)
        row += 1
    numbers = tl.div_rn(numbers, tl.full([_BLOCKS, _BLOCK], divisor, tl.float32))
    end = tl.cast(tiles, tl.int64) * _TILE
    if error is not None:
        numbers += _load(error, tile * _TILE, end)
    lost = _keep(numbers, to_codes, to_scales, tl.cast(0, tl.int64), tile, tiles)
    if error is not None:
        _store(error, tile * _TILE, end, lost)


@triton.jit(do_not_specialize=["tiles", "numel"])
def _decode(codes, scales, consensus, target, tiles, numel):
    row, tile = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    first = (row * tiles + tile) * _TILE
    agreed = _load(consensus, first, numel) + _values(codes, scales, row, tile, tiles)
    _store(consensus, first, numel, agreed)
    if target is not None:
        _store(target, first, numel, agreed)


@triton.jit
def _tile():
    """The places of a tile's elements, a block in each row."""
    return tl.arange(0, _BLOCKS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]


@triton.jit
def _load(flat, first, numel):
    """A tile from ``first`` on; zeros beyond the end."""
    places = _tile()
    if first + _TILE <= numel:  # without a mask, which would keep the compiler from vectors
        values = tl.load(flat + first + places)
    else:
        values = tl.load(flat + first + places, mask=first + places < numel, other=0.0)
    return values


@triton.jit
def _store(flat, first, numel, values):
    places = _tile()
    if first + _TILE <= numel:
        tl.store(flat + first + places, values)
    else:
        tl.store(flat + first + places, values, mask=first + places < numel)


@triton.jit
def _codes_at(codes, row, tile, tiles):
    """The codes of a tile of a row. A row has the scales of its blocks behind its codes, where there are any."""
    if codes.dtype.element_ty == tl.int8:
        first = row * tiles * _TILE_BYTES + tile * _TILE
    else:
        first = (row * tiles + tile) * _TILE
    # No longer vectors than of the floats: those would give threads other elements, which would have to move.
    return tl.multiple_of(codes + first + _tile(), [1, _VECTOR * codes.dtype.element_ty.primitive_bitwidth // 8])


@triton.jit
def _scales_at(scales, row, tile, tiles):
    first = (row * _TILE_BYTES + _TILE) * tiles // 4 + tile * _BLOCKS
    return scales + first + tl.arange(0, _BLOCKS)[:, None]


@triton.jit
def _keep(numbers, codes, scales, row, tile, tiles):
    """Writes a tile as it travels; returns what it loses on the way."""
    at = _codes_at(codes, row, tile, tiles)
    if codes.dtype.element_ty == tl.int8:
        # The bits of magnitudes are in the order of the numbers, with every NaN above infinity, which it counts as: the
        # bits of a NaN would be the processor's choice.
        magnitudes = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.minimum(tl.max(magnitudes, axis=1, keep_dims=True), 0x7F800000)
        scale = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full([_BLOCKS, 1], _MOST, tl.float32))
        steps = tl.div_rn(numbers, tl.broadcast_to(scale, numbers.shape))
        steps = tl.minimum(tl.maximum(steps, -_MOST), _MOST)
        steps = tl.where((scale > 0) & (scale <= _LARGEST), steps, 0.0)
        steps = (steps + _WHOLE) - _WHOLE
        tl.store(at, steps.to(tl.int32).to(tl.int8))
        tl.store(_scales_at(scales, row, tile, tiles), scale)
        values = steps * scale
    else:
        kept = nearest(numbers, tl.bfloat16)
        tl.store(at, kept)
        values = _wide(kept)
    return numbers - values


@triton.jit
def _values(codes, scales, row, tile, tiles):
    """What the codes of a tile of a row stand for."""
    found = tl.load(_codes_at(codes, row, tile, tiles))
    if codes.dtype.element_ty == tl.int8:
        values = found.to(tl.float32) * tl.load(_scales_at(scales, row, tile, tiles))
    else:
        values = _wide(found)
    return values


@triton.jit
def _wide(kept):
    """bf16 as float32, by its bits: the interpreter does not know subnormal ones."""
    return (kept.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@cache
def wire_operators() -> tuple[Any, Any, Any]:
    return (
        operators.register("triton_encode", operators.ENCODE, "()", encode, operators.fake_step),
        operators.register("triton_merge", operators.MERGE, "()", merge, operators.fake_step),
        operators.register("triton_decode", operators.DECODE, "()", decode, operators.fake_step),
    )


def encode(format: int, x: Tensor, consensus: Tensor, error: Tensor | None, wire: Tensor) -> None:
    if wire.numel():
        _launch(_encode, (x, consensus, error, *_parts(format, wire)), _tiles(format, wire), len(wire), x.numel())


def merge(format: int, wires: Tensor, divisor: float, error: Tensor | None, wire: Tensor) -> None:
    if wire.numel():
        parts = (*_parts(format, wires), error, *_parts(format, wire))
        _launch(_merge, parts, _tiles(format, wire), 1, len(wires), divisor)


def decode(format: int, wire: Tensor, consensus: Tensor, target: Tensor | None) -> None:
    if wire.numel():
        parts = (*_parts(format, wire), consensus, target)
        _launch(_decode, parts, _tiles(format, wire), len(wire), consensus.numel())


def _launch(kernel: Any, tensors: tuple[Tensor | None, ...], tiles: int, rows: int, *sizes: float) -> None:
    """A program for each tile of each row that is written or read."""
    with torch.cuda.device_of(tensors[0]):
        kernel[(tiles, rows)](*tensors, tiles, *sizes, **OPTIONS)


def _tiles(format: int, wire: Tensor) -> int:
    """The tiles of a row."""
    return wire.shape[-1] // row_bytes(FORMATS[format], GRAIN) * (GRAIN // (BLOCKS * BLOCK))


def _parts(format: int, wire: Tensor) -> tuple[Tensor, Tensor | None]:
    """The memory of ``wire`` as codes and as scales."""
    if FORMATS[format] == "bf16":
        return wire.view(torch.bfloat16), None
    return wire.view(torch.int8), wire.view(torch.float32)
