"""The compressed average in Triton: each program has a tile of elements, whose rows are the blocks of the format.

:mod:`~hdet_kernels.ops.wire` has the equations. Products and sums are not fused, and quotients are correctly rounded
(``div_rn``), so the bits are those of plain torch.
"""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hdet_kernels.ops.triton.rounding import nearest
from hdet_kernels.ops.wire import BLOCK, FORMATS, GRAIN, encoded_bytes

# Blocks of one program, and how it is launched. With one warp no operation on a block waits for another warp, however
# Triton assigns elements to threads (with 4 warps and 4 blocks, two warps share each block). A thread has 16 elements,
# four 16-byte loads of each buffer. bench/test_wire.py measures the shape.
BLOCKS = 2
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}

_BLOCK = tl.constexpr(BLOCK)
_BLOCKS = tl.constexpr(BLOCKS)
_TILE = tl.constexpr(BLOCKS * BLOCK)
_TILE_BYTES = tl.constexpr(encoded_bytes("int8", BLOCKS * BLOCK))
_MOST = tl.constexpr(127.0)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
# Adding and subtracting this rounds a small number to a whole one, ties to even.
_WHOLE = tl.constexpr(1.5 * 2**23)

# Elements of a vector access of float32.
_VECTOR = tl.constexpr(4)


@triton.jit(do_not_specialize=["tiles", "numel"])
def _encode(x, consensus, error, codes, scales, tiles, numel):
    row, tile = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    first = (row * tiles + tile) * _TILE
    numbers = _load(x, first, numel) - _load(consensus, first, numel)
    if error is not None:
        numbers += _load(error, first, numel)
    lost = _encode_tile(numbers, codes, scales, row, tile, tiles)
    if error is not None:
        _store(error, first, numel, lost)


@triton.jit(do_not_specialize=["tiles", "rows", "divisor"])
def _merge(codes, scales, error, to_codes, to_scales, tiles, rows, divisor):
    tile = tl.program_id(0).to(tl.int64)
    numbers = _decoded(codes, scales, tl.cast(0, tl.int64), tile, tiles)
    row = tl.cast(1, tl.int64)
    while row < rows:  # not a range: the interpreter of Triton 3.6 cannot run over one with a recent numpy
        numbers += _decoded(codes, scales, row, tile, tiles)
        row += 1
    numbers = tl.div_rn(numbers, tl.full([_BLOCKS, _BLOCK], divisor, tl.float32))
    end = tl.cast(tiles, tl.int64) * _TILE
    if error is not None:
        numbers += _load(error, tile * _TILE, end)
    lost = _encode_tile(numbers, to_codes, to_scales, tl.cast(0, tl.int64), tile, tiles)
    if error is not None:
        _store(error, tile * _TILE, end, lost)


@triton.jit(do_not_specialize=["tiles", "numel"])
def _decode(codes, scales, consensus, target, tiles, numel):
    row, tile = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    first = (row * tiles + tile) * _TILE
    agreed = _load(consensus, first, numel) + _decoded(codes, scales, row, tile, tiles)
    _store(consensus, first, numel, agreed)
    if target is not None:
        _store(target, first, numel, agreed)


@triton.jit
def _tile():
    """Return the offsets of a tile's elements, one block in each row."""
    return tl.arange(0, _BLOCKS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]


@triton.jit
def _load(flat, first, numel):
    """Load the tile that begins at ``first``, with zeros beyond the end."""
    places = _tile()
    if first + _TILE <= numel:  # without a mask, which would prevent vector loads
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
    """Return pointers to the codes of a tile of a row. In int8 the scales of a row's blocks follow its codes."""
    if codes.dtype.element_ty == tl.int8:
        first = row * tiles * _TILE_BYTES + tile * _TILE
    else:
        first = (row * tiles + tile) * _TILE
    # The vectors have as many elements as those of the floats: longer ones would give threads other elements.
    return tl.multiple_of(codes + first + _tile(), [1, _VECTOR * codes.dtype.element_ty.primitive_bitwidth // 8])


@triton.jit
def _scales_at(scales, row, tile, tiles):
    first = (row * _TILE_BYTES + _TILE) * tiles // 4 + tile * _BLOCKS
    return scales + first + tl.arange(0, _BLOCKS)[:, None]


@triton.jit
def _encode_tile(numbers, codes, scales, row, tile, tiles):
    """Encode and store a tile, and return what the encoding lost."""
    at = _codes_at(codes, row, tile, tiles)
    if codes.dtype.element_ty == tl.int8:
        # The bits of magnitudes are ordered like the numbers, with every NaN above infinity. NaN counts as infinity,
        # because the bits of a NaN depend on the processor.
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
def _decoded(codes, scales, row, tile, tiles):
    """Load and decode a tile of a row."""
    found = tl.load(_codes_at(codes, row, tile, tiles))
    if codes.dtype.element_ty == tl.int8:
        values = found.to(tl.float32) * tl.load(_scales_at(scales, row, tile, tiles))
    else:
        values = _wide(found)
    return values


@triton.jit
def _wide(kept):
    """Convert bf16 to float32 by its bits: the interpreter converts subnormal numbers wrongly."""
    return (kept.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


def encode(format: int, x: Tensor, consensus: Tensor, error: Tensor | None, wire: Tensor) -> None:
    """Encode x − consensus + error into ``wire``."""
    _launch(_encode, (x, consensus, error, *_parts(format, wire)), _tiles(format, wire), len(wire), x.numel())


def merge(format: int, wires: Tensor, divisor: float, error: Tensor | None, wire: Tensor) -> None:
    """Encode the mean of ``wires`` plus ``error`` into ``wire``."""
    parts = (*_parts(format, wires), error, *_parts(format, wire))
    _launch(_merge, parts, _tiles(format, wire), 1, len(wires), divisor)


def decode(format: int, wire: Tensor, consensus: Tensor, target: Tensor | None) -> None:
    """Add the decoded ``wire`` to the consensus."""
    parts = (*_parts(format, wire), consensus, target)
    _launch(_decode, parts, _tiles(format, wire), len(wire), consensus.numel())


def _launch(kernel: Any, tensors: tuple[Tensor | None, ...], tiles: int, rows: int, *sizes: float) -> None:
    """Launch one program for each tile of each row of the wire."""
    with torch.cuda.device_of(tensors[0]):
        kernel[(tiles, rows)](*tensors, tiles, *sizes, **OPTIONS)


def _tiles(format: int, wire: Tensor) -> int:
    """Return the number of tiles of a row of the wire."""
    return wire.shape[-1] // encoded_bytes(FORMATS[format], GRAIN) * (GRAIN // (BLOCKS * BLOCK))


def _parts(format: int, wire: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the memory of ``wire`` viewed as codes and as scales."""
    if FORMATS[format] == "bf16":
        return wire.view(torch.bfloat16), None
    return wire.view(torch.int8), wire.view(torch.float32)
