"""Packing and unpacking in plain torch, which runs anywhere and is the reference for other backends."""

from __future__ import annotations

import torch
from torch import Tensor

from hdet_kernels.ops.pack import MOST_ROWS, MatchedTensors, Pack


def pack(table: Pack, matched: MatchedTensors, included: int, divisor: float, staging: Tensor) -> None:
    """Sum the rows whose bit in ``included`` is set, divide, and write the pieces to ``staging``."""
    tensors = _rows(table, matched)
    first, *others = [row for row in range(MOST_ROWS) if included >> row & 1]
    offset = 0
    for slot, start, stop in table.spans:
        span = staging[offset : offset + stop - start]
        offset += stop - start
        span.copy_(tensors[slot][first, start:stop])
        for row in others:
            span.add_(tensors[slot][row, start:stop].to(staging.dtype))
        span.copy_(_quotient(span, divisor))


def unpack(table: Pack, matched: MatchedTensors, divisor: float, staging: Tensor) -> None:
    """Divide ``staging`` and write its pieces to every row of the tensors."""
    tensors = _rows(table, matched)
    offset = 0
    for slot, start, stop in table.spans:
        values = _quotient(staging[offset : offset + stop - start], divisor)
        tensors[slot][:, start:stop].copy_(values)
        offset += stop - start


def _rows(table: Pack, matched: MatchedTensors) -> list[Tensor]:
    return [tensor.view(table.rows, -1) for tensor in matched.tensors]


def _quotient(values: Tensor, divisor: float) -> Tensor:
    if divisor == 1:
        return values
    # Divide by a tensor on the device: torch's CUDA kernel multiplies by the reciprocal of a Python number.
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)
