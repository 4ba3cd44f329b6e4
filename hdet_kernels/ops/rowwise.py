"""One step of row-wise Adagrad on one embedding table, which reads and writes only the rows that a gradient touches.

The state of a row is one number. With g the gradient of a row of the table, w the row and t the step::

    rate = lr/(1 + (t − 1)·lr_decay)
    g ← g + weight_decay·w                   unless weight decay is decoupled
    s ← s + mean(g²)
    w ← w·(1 − rate·weight_decay)            if it is
    w ← w − rate·g/(√s + eps)

A sparse gradient may name a row several times; its values are summed first, in their order. The rows are sorted for
that, and the kernels work on the first entry of every run of equal rows, so the number of different rows is needed
nowhere on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hdet_kernels.ops.backends import implementation, resolve
from hdet_kernels.ops.table import COLUMNS
from hdet_kernels.torch_internals import sparse_parts


class RowGradient(NamedTuple):
    """The gradient of an embedding table.

    Attributes:
        values: [entries, width], of the table's dtype or of that of the arithmetic.
        rows: int64 [entries], sorted: the row of each entry. None for a dense gradient, an entry for every row.
        order: int64 [entries], which of ``values`` each entry is. None if they are in order.
    """

    values: Tensor
    rows: Tensor | None = None
    order: Tensor | None = None


class RowWiseArguments(NamedTuple):
    """The arguments of every backend's operator, in order.

    Attributes:
        param: The embedding table, contiguous, [rows, width].
        sums: The state, [rows], of :func:`arithmetic`'s dtype.
        steps: The step count, one float32.
        table: The hyperparameters, [groups, columns].
        table_row: The row of ``table`` that holds for this embedding table.
        values, rows, order: Its gradient, a :class:`RowGradient`.
        grad_scale: Gradients are divided by it; one float32.
        found_inf: If it is above zero nothing changes; one float32.
        decoupled: Whether weight decay acts on the rows directly, not through the gradient.
        stochastic_rounding: Round bf16 tables up or down at random, so that small updates are kept on average.
    """

    param: Tensor
    sums: Tensor
    steps: Tensor
    table: Tensor
    table_row: int
    values: Tensor
    rows: Tensor | None = None
    order: Tensor | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    decoupled: bool = False
    stochastic_rounding: bool = False


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic on tables of ``dtype``, and of their state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_gradient(grad: Tensor, dtype: torch.dtype) -> RowGradient:
    """Return the gradient of a table of ``dtype``, sparse (COO with one sparse dimension) or dense."""
    if not grad.is_sparse:
        return RowGradient(_readable(grad.flatten(1), dtype))
    indices, entries = sparse_parts(grad)
    values, rows = _readable(entries.flatten(1), dtype), indices[0]
    if grad.is_coalesced():
        return RowGradient(values, rows.contiguous())
    # Equal rows keep their order, so that their sum is the same in every run.
    ordered = torch.sort(rows, stable=True)
    return RowGradient(values, ordered.values, ordered.indices)


@torch.no_grad()
def rowwise_adagrad_(given: RowWiseArguments, *, backend: str | None = None) -> None:
    """Update the rows of an embedding table that have a gradient, and their state, in place; count the step."""
    _check(given)
    if given.values.shape[0]:
        implementation(resolve(given.param.device, backend), "rowwise").rowwise_adagrad(given)
    given.steps.add_(1.0 if given.found_inf is None else (given.found_inf <= 0).view_as(given.steps))


def _readable(values: Tensor, dtype: torch.dtype) -> Tensor:
    return (values if values.dtype == dtype else values.to(arithmetic(dtype))).contiguous()


def _check(given: RowWiseArguments) -> None:
    param, sums, table, values, rows = given.param, given.sums, given.table, given.values, given.rows
    if param.dim() != 2 or not param.is_contiguous():
        raise ValueError(f"the embedding table must be a contiguous matrix, got shape {tuple(param.shape)}")
    if sums.shape != (len(param),) or sums.dtype != arithmetic(param.dtype) or not sums.is_contiguous():
        raise ValueError(
            f"the state must be {len(param)} contiguous numbers of {arithmetic(param.dtype)}, one a row, got "
            f"{sums.dtype} of shape {tuple(sums.shape)}"
        )
    if table.dim() != 2 or table.shape[1] != len(COLUMNS):
        raise ValueError(f"the hyperparameter table must have {len(COLUMNS)} columns, got {tuple(table.shape)}")
    entries = len(param) if rows is None else len(rows)
    if values.shape != (entries, param.shape[1]):
        raise ValueError(
            f"the gradient has values of shape {tuple(values.shape)}, expected {(entries, param.shape[1])}: one row of "
            "the embedding table for each entry"
        )
    if rows is None or param.device.type != "cpu" or not entries:
        return
    first, last = int(rows[0]), int(rows[-1])  # they are sorted
    if first < 0 or last >= len(param):
        raise ValueError(f"the gradient names rows {first} to {last} of an embedding table of {len(param)} rows")
