"""The ``cpp`` and ``cuda`` backends: typed calls of the operators that ``csrc/library.cpp`` declares.

:func:`~hdet_kernels.ops.backends.implementation` hands this module out only after
:mod:`~hdet_kernels.ops.operators` has loaded the library.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients
from hdet_kernels.ops.pack import MatchedTensors, Pack
from hdet_kernels.ops.rowwise import RowWiseArguments
from hdet_kernels.ops.step import Scalars, Step

# kScratchBytes of csrc/step.h.
SCRATCH_BYTES = 128


def bind_step(step: Step) -> Callable[[MatchedGradients, Scalars], None]:
    """Return a function that runs ``step`` on given gradients and scalars."""
    chunks, rounding, rows = step.chunks, step.stochastic_rounding, step.rows
    # Zeros, because a kernel that loads a whole row of the scratch also loads the gaps between its numbers.
    scratch = torch.zeros(SCRATCH_BYTES * rows * len(chunks.entries), dtype=torch.uint8, device=step.param.device)
    rule, *flats = step.flats
    operator = partial(torch.ops.hdet_kernels.step_.default, rule, *flats, chunks.slots, chunks.chunks)

    def run(grads: MatchedGradients, scalars: Scalars) -> None:
        operator(chunks.point_at(grads), scratch, *scalars, rounding, rows)

    return run


def grad_norm(chunks: ChunkTable, grads: MatchedGradients, rows: int) -> Tensor:
    """Return the norm of the gradients of each of ``rows`` replicas, float64 [rows]."""
    return torch.ops.hdet_kernels.grad_norm(chunks.chunks, chunks.point_at(grads), rows)


def pack(table: Pack, matched: MatchedTensors, included: int, divisor: float, staging: Tensor) -> None:
    """Sum the rows whose bit in ``included`` is set, divide, and write the pieces to ``staging``."""
    torch.ops.hdet_kernels.pack(table.chunks, table.point_at(matched), table.strides, included, divisor, staging)


def unpack(table: Pack, matched: MatchedTensors, divisor: float, staging: Tensor) -> None:
    """Divide ``staging`` and write its pieces to every row of the tensors."""
    torch.ops.hdet_kernels.unpack(table.chunks, table.point_at(matched), table.strides, table.rows, divisor, staging)


def encode(*given: Any) -> None:
    """Encode x − consensus + error."""
    torch.ops.hdet_kernels.encode(*given)


def merge(*given: Any) -> None:
    """Encode the mean of what was received, plus the error."""
    torch.ops.hdet_kernels.merge(*given)


def decode(*given: Any) -> None:
    """Add what was decoded to the consensus."""
    torch.ops.hdet_kernels.decode(*given)


def rowwise_adagrad(given: RowWiseArguments) -> None:
    """Update the rows of an embedding table that have a gradient."""
    torch.ops.hdet_kernels.rowwise_adagrad_(*given)
