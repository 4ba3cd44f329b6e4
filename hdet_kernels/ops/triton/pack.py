"""Packing and unpacking in Triton: one program for every block of a chunk, over the tables of ``csrc/pack_cuda.cu``."""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

from struct import pack as to_bytes
from struct import unpack as from_bytes
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hdet_kernels.ops.chunks import CHUNK, GRADIENT_DTYPES
from hdet_kernels.ops.pack import MOST_ROWS, MatchedTensors, Pack
from hdet_kernels.ops.triton.rounding import nearest, widened

# Elements of one program, for one row and for several, and its warps. A thread has four 16-byte loads of one float32
# row in flight, or one of each of eight rows. These are the shapes of csrc/pack_cuda.cu; they were not measured here.
BLOCK = 2048
BLOCK_OF_ROWS = 512
WARPS = 4

_TOGETHER = tl.constexpr(8)  # rows whose loads do not wait for each other
_CHUNK = tl.constexpr(CHUNK)
_FLOAT32 = tl.constexpr(GRADIENT_DTYPES.index(torch.float32))
_BFLOAT16 = tl.constexpr(GRADIENT_DTYPES.index(torch.bfloat16))


@triton.jit(do_not_specialize=["first", "others", "divisor"])
def _pack_chunk(
    chunks,
    places,
    strides,
    staging,
    first,
    others,
    divisor,
    MANY: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pack the sum of row ``first`` and, with ``MANY``, of rows ``first + 1 + k`` for each bit ``k`` of ``others``."""
    offset, start, count, address, number, stride = _work_of(chunks, places, strides, BLOCK)
    others = tl.cast(others, tl.int64)
    divisor = _number(divisor, staging.dtype.element_ty)
    start += tl.cast(first, tl.int64) * stride
    work = (staging, offset, address, start, stride, count)
    if count > 0:
        if staging.dtype.element_ty == tl.float64:
            _pack_as(tl.float64, work, others, divisor, MANY, DIVIDE, BLOCK)
        elif number == _FLOAT32:
            _pack_as(tl.float32, work, others, divisor, MANY, DIVIDE, BLOCK)
        elif number == _BFLOAT16:
            _pack_as(tl.bfloat16, work, others, divisor, MANY, DIVIDE, BLOCK)
        else:
            _pack_as(tl.float16, work, others, divisor, MANY, DIVIDE, BLOCK)


@triton.jit
def _pack_as(TYPE: tl.constexpr, work, others, divisor, MANY: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr):
    staging, offset, address, start, stride, count = work
    VECTOR: tl.constexpr = 128 // staging.dtype.element_ty.primitive_bitwidth
    lanes = tl.arange(0, BLOCK)
    begin = address.to(tl.pointer_type(TYPE)) + start
    if _vectors(work, TYPE, MANY, VECTOR, BLOCK):
        # Tell the compiler what was just tested, so that VECTOR elements become one access.
        row = tl.multiple_of(begin + lanes, VECTOR * TYPE.primitive_bitwidth // 8)
        at = offset // VECTOR * VECTOR + lanes
        inside = tl.full([BLOCK], True, tl.int1)
        total = _sum(row, stride // VECTOR * VECTOR, inside, others, staging.dtype.element_ty, MANY)
        tl.store(staging + at, _quotient(total, divisor, DIVIDE))
    else:
        inside = lanes < count
        total = _sum(begin + lanes, stride, inside, others, staging.dtype.element_ty, MANY)
        tl.store(staging + offset + lanes, _quotient(total, divisor, DIVIDE), mask=inside)


@triton.jit
def _sum(row, stride, inside, others, wide: tl.constexpr, MANY: tl.constexpr):
    total = widened(tl.load(row, mask=inside, other=0.0), wide)
    if MANY:
        # The row is a scalar, because pointers that the loop advances would get another layout.
        index = tl.cast(1, tl.int64)
        while others != 0:
            for k in tl.static_range(0, _TOGETHER):
                taken = ((others >> k) & 1) != 0
                mask = tl.where(taken, inside, False)  # the interpreter gives & a wrong type
                value = widened(tl.load(row + (index + k) * stride, mask=mask, other=0.0), wide)
                total = tl.where(taken, total + value, total)  # −0 + 0 is not −0
            others = others >> _TOGETHER
            index += _TOGETHER
    return total


@triton.jit(do_not_specialize=["rows", "divisor"])
def _unpack_chunk(chunks, places, strides, staging, rows, divisor, DIVIDE: tl.constexpr, BLOCK: tl.constexpr):
    offset, start, count, address, number, stride = _work_of(chunks, places, strides, BLOCK)
    divisor = _number(divisor, staging.dtype.element_ty)
    work = (staging, offset, address, start, stride, count)
    if count > 0:
        if staging.dtype.element_ty == tl.float64:
            _unpack_as(tl.float64, work, rows, divisor, DIVIDE, BLOCK)
        elif number == _FLOAT32:
            _unpack_as(tl.float32, work, rows, divisor, DIVIDE, BLOCK)
        elif number == _BFLOAT16:
            _unpack_as(tl.bfloat16, work, rows, divisor, DIVIDE, BLOCK)
        else:
            _unpack_as(tl.float16, work, rows, divisor, DIVIDE, BLOCK)


@triton.jit
def _unpack_as(TYPE: tl.constexpr, work, rows, divisor, DIVIDE: tl.constexpr, BLOCK: tl.constexpr):
    staging, offset, address, start, stride, count = work
    VECTOR: tl.constexpr = 128 // staging.dtype.element_ty.primitive_bitwidth
    lanes = tl.arange(0, BLOCK)
    begin = address.to(tl.pointer_type(TYPE)) + start
    if _vectors(work, TYPE, True, VECTOR, BLOCK):
        row = tl.multiple_of(begin + lanes, VECTOR * TYPE.primitive_bitwidth // 8)
        at = offset // VECTOR * VECTOR + lanes
        value = nearest(_quotient(tl.load(staging + at), divisor, DIVIDE), TYPE)
        _to_rows(row, stride // VECTOR * VECTOR, rows, value, tl.full([BLOCK], True, tl.int1))
    else:
        inside = lanes < count
        value = nearest(_quotient(tl.load(staging + offset + lanes, mask=inside, other=0.0), divisor, DIVIDE), TYPE)
        _to_rows(begin + lanes, stride, rows, value, inside)


@triton.jit
def _to_rows(row, stride, rows, value, inside):
    index = tl.cast(0, tl.int64)
    while index < rows:
        tl.store(row + index * stride, value, mask=inside)
        index += 1


@triton.jit
def _work_of(chunks, places, strides, BLOCK: tl.constexpr):
    """Return this program's offset in the staging buffer, start in a row, count, address, dtype and row stride.

    A count of zero or less means that there is nothing to do.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk = chunks + program // (_CHUNK // BLOCK) * 4
    begin = program % (_CHUNK // BLOCK) * BLOCK
    slot = tl.load(chunk + 3)
    place = places + slot * 2
    return (
        tl.load(chunk) + begin,
        tl.load(chunk + 1) + begin,
        tl.load(chunk + 2) - begin,
        tl.load(place),
        tl.load(place + 1),
        tl.load(strides + slot),
    )


@triton.jit
def _vectors(work, TYPE: tl.constexpr, MANY: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Return whether this is a whole block that can be moved ``VECTOR`` elements at a time, on both sides."""
    _, offset, address, start, stride, count = work
    size: tl.constexpr = TYPE.primitive_bitwidth // 8
    whole = (count >= BLOCK) & ((address + start * size) % (VECTOR * size) == 0) & (offset % VECTOR == 0)
    if MANY:
        whole = whole & (stride % VECTOR == 0)
    return whole


@triton.jit
def _number(bits, dtype: tl.constexpr):
    return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True).to(dtype)


@triton.jit
def _quotient(value, divisor, DIVIDE: tl.constexpr):
    if DIVIDE:
        # div_rn is correctly rounded; / is not in float32.
        value = tl.div_rn(value, divisor) if value.dtype == tl.float32 else value / divisor
    return value


def pack(table: Pack, matched: MatchedTensors, included: int, divisor: float, staging: Tensor) -> None:
    """Sum the rows whose bit in ``included`` is set, divide, and write the pieces to ``staging``."""
    first, *others = [row for row in range(MOST_ROWS) if included >> row & 1]
    constants = {"MANY": bool(others), "BLOCK": BLOCK_OF_ROWS if others else BLOCK}
    rest = sum(1 << (row - first - 1) for row in others)
    _launch(_pack_chunk, table, matched, staging, first, rest, divisor=divisor, **constants)


def unpack(table: Pack, matched: MatchedTensors, divisor: float, staging: Tensor) -> None:
    """Divide ``staging`` and write its pieces to every row of the tensors."""
    _launch(_unpack_chunk, table, matched, staging, table.rows, divisor=divisor, BLOCK=BLOCK)


def _launch(
    kernel: Any,
    table: Pack,
    matched: MatchedTensors,
    staging: Tensor,
    *numbers: int,
    divisor: float,
    **constants: int,
) -> None:
    programs = len(table.chunks) * (CHUNK // constants["BLOCK"])
    if not programs:
        return
    constants |= {"DIVIDE": divisor != 1}
    with torch.cuda.device_of(staging):
        kernel[(programs,)](
            table.chunks,
            table.point_at(matched),
            table.strides,
            staging,
            *numbers,
            _bits(divisor),
            num_warps=WARPS,
            **constants,
        )


def _bits(number: float) -> int:
    """Return the bits of a float64 as a whole number, because Triton would take a Python float for a float32."""
    bits: int = from_bytes("<q", to_bytes("<d", number))[0]
    return bits
