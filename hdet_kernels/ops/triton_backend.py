"""The ``triton`` backend: operators whose kernels Triton compiles for the GPU at hand.

Step and norm are registered here, and the other operations handed on from the files of their names. All of them walk
the tables that the compiled backends walk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from torch import Tensor

from hdet_kernels.ops.chunks import EMPTY_GRADIENT, ChunkTable, MatchedGradients
from hdet_kernels.ops.operators import FLATS, SCALARS, fake_in_place, fake_norm, register
from hdet_kernels.ops.step import Scalars, StepArguments
from hdet_kernels.ops.triton_pack import pack as pack
from hdet_kernels.ops.triton_pack import unpack as unpack
from hdet_kernels.ops.triton_reduce import read_norm
from hdet_kernels.ops.triton_rowwise import rowwise_adagrad as rowwise_adagrad
from hdet_kernels.ops.triton_step import step
from hdet_kernels.ops.triton_wire import wire_operators as wire_operators


def bind_step(arguments: StepArguments) -> Callable[[MatchedGradients, Scalars], None]:
    """Return a function that runs the step on given gradients and scalars."""
    chunks, rounding, rows = arguments.chunks, arguments.stochastic_rounding, arguments.rows
    operator = partial(_operators()[0], *arguments.flats, chunks.slots, chunks.chunks)
    known: tuple[object, list[int]] = (None, [])  # the gradient table of the last step, and the dtypes in it

    def run(grads: MatchedGradients, scalars: Scalars) -> None:
        nonlocal known
        if grads.table is not known[0]:
            known = grads.table, dtypes_of(grads)
        operator(chunks.point_at(grads), known[1], *scalars, rounding, rows)

    return run


def dtypes_of(grads: MatchedGradients) -> list[int]:
    """Return the numbers of the dtypes that occur. The step is launched once for each."""
    to_read = grads.table[grads.table[:, 0] > EMPTY_GRADIENT, 1]
    return np.flatnonzero(np.bincount(to_read)).tolist()


def grad_norm(chunks: ChunkTable, grads: MatchedGradients, rows: int) -> Tensor:
    """Return the norm of the gradients of each of ``rows`` replicas, float64 [rows]."""
    norms: Tensor = _operators()[1](chunks.chunks, chunks.point_at(grads), rows)
    return norms


@cache
def _operators() -> tuple[Any, Any]:
    """Register the operators of step and norm, once, and return them.

    Their schemas are those of ``csrc/library.cpp``, except for ``dtypes``: the host knows the dtypes of the gradients
    and launches a kernel for each.
    """
    tables = "Tensor slots, Tensor chunks, Tensor gradients, int[] dtypes"
    return (
        register("triton_step_", f"{FLATS}, {tables}, {SCALARS}", "()", step, fake_in_place),
        register("triton_grad_norm", "Tensor chunks, Tensor gradients, int rows", "Tensor", read_norm, fake_norm),
    )
