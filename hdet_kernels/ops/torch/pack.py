"""Packing and unpacking in plain torch, which runs anywhere and is the reference for other backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_kernels.ops.operators import fake_in_place, register
from hdet_kernels.ops.pack import MOST_ROWS, MatchedTensors, PieceTable


def pack(table: PieceTable, matched: MatchedTensors, included: int, divisor: float, staging: Tensor) -> None:
    """Sum the rows whose bit in ``included`` is set, divide, and write the pieces to ``staging``."""
    PACK(_rows(table, matched), *table.spans, included, divisor, staging)


def unpack(table: PieceTable, matched: MatchedTensors, divisor: float, staging: Tensor) -> None:
    """Divide ``staging`` and write its pieces to every row of the tensors."""
    UNPACK(_rows(table, matched), *table.spans, divisor, staging)


def _rows(table: PieceTable, matched: MatchedTensors) -> list[Tensor]:
    return [tensor.view(table.rows, -1) for tensor in matched.tensors]


def _pack(
    tensors: Sequence[Tensor],
    slots: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    included: int,
    divisor: float,
    staging: Tensor,
) -> None:
    taken = [row for row in range(MOST_ROWS) if included >> row & 1]
    offset = 0
    for slot, start, stop in zip(slots, starts, stops, strict=True):
        span = staging[offset : offset + stop - start]
        offset += stop - start
        if not taken:
            span.zero_()
        for row in taken:
            values = tensors[slot][row, start:stop]
            if row == taken[0]:
                span.copy_(values)
            else:
                span.add_(values.to(staging.dtype))
        span.copy_(_quotient(span, divisor))


def _unpack(
    tensors: Sequence[Tensor],
    slots: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    divisor: float,
    staging: Tensor,
) -> None:
    offset = 0
    for slot, start, stop in zip(slots, starts, stops, strict=True):
        values = _quotient(staging[offset : offset + stop - start], divisor)
        tensors[slot][:, start:stop].copy_(values)
        offset += stop - start


def _quotient(values: Tensor, divisor: float) -> Tensor:
    if divisor == 1:
        return values
    # Divide by a tensor on the device: torch's CUDA kernel multiplies by the reciprocal of a Python number.
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


# The tensors are arguments, each of shape [rows, numel].
_SPANS = "int[] slots, int[] starts, int[] stops"
PACK = register(
    "torch_pack",
    f"Tensor[] tensors, {_SPANS}, int included, float divisor, Tensor(a!) staging",
    "()",
    _pack,
    fake_in_place,
)
UNPACK = register(
    "torch_unpack", f"Tensor(a!)[] tensors, {_SPANS}, float divisor, Tensor staging", "()", _unpack, fake_in_place
)
