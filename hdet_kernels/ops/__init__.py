"""Fused operations on flat buffers, each with several backends.

The flow through this folder, for one optimizer step::

    table         hyperparameters, one row for each parameter group (and replica), on the device
    chunks        where the parameters (of R replicas) lie in a flat buffer and where their gradients are
        │
    step          Step: checks its arguments once, then updates parameters and states in place; grad_norm
    rowwise       rowwise_adagrad_: row-wise Adagrad on an embedding table, for the rows that a gradient touches
    newton_schulz  orthogonalise_: Muon's orthogonalisation of many matrices
    pack          Pack: pieces of tensors to and from one staging buffer
    halves        read_halves, write_halves: split masters from their halves to float32 and back
    wire          Wire: the parts of a compressed average
        │
    backends      decides which backend runs, and says why one cannot
        │
    torch/        plain torch: the readable text of every operation, and the reference for other backends
    triton/       the same in Triton
    compiled      the same in C++ and CUDA (``csrc/``)

A module of ``torch/`` and ``triton/`` has the name of its operation here. ``operators`` loads the compiled
operators. Every operation walks a table on the device, so the number of
launches does not depend on the number of tensors, and none of them waits for the device.

This module only re-exports the public names. The modules of this folder import from each other, never from here.
"""

from hdet_kernels.ops.step import (
    DTYPES,
    MASTERED,
    OPTIONAL_STATES,
    STATE_DTYPES,
    STATES,
    Scalars,
    Step,
    grad_norm,
)

__all__ = [
    "DTYPES",
    "MASTERED",
    "OPTIONAL_STATES",
    "STATES",
    "STATE_DTYPES",
    "Scalars",
    "Step",
    "grad_norm",
]
