"""Row-wise Adagrad in plain torch. ``rowwise.py`` has the equations."""

from __future__ import annotations

import torch
from torch import Tensor

from hdet_kernels.ops.rowwise import RowWiseArguments, arithmetic
from hdet_kernels.ops.table import COLUMNS
from hdet_kernels.ops.torch.rounding import random_bits_at, round_stochastically, rounding_key


def rowwise_adagrad(given: RowWiseArguments) -> None:
    """Update the rows that have a gradient."""
    wide = arithmetic(given.param.dtype)
    h = dict(zip(COLUMNS, given.table[given.table_row].unbind(), strict=True))
    t = given.steps.to(given.table.dtype).squeeze() + 1
    rate = h["lr"] / (1 + (t - 1) * h["lr_decay"])
    factor = (1 - 2 * h["maximize"]) / (1 if given.grad_scale is None else given.grad_scale.to(h["lr"].dtype).squeeze())

    rows, g = (None, given.values.to(wide)) if given.rows is None else _summed(given, wide)
    stored = given.param if rows is None else given.param[rows]
    before = given.sums if rows is None else given.sums[rows]
    w = stored.to(wide)
    g = g * factor.to(wide)
    if not given.decoupled:
        g = g + h["weight_decay"].to(wide) * w
    after = before + (g * g).mean(dim=1)
    if given.decoupled:
        w = w * (1 - rate * h["weight_decay"]).to(wide)
    w = w - (rate.to(wide) / (after.sqrt() + h["eps"].to(wide)))[:, None] * g
    new = w.to(stored.dtype)
    if given.stochastic_rounding and new.dtype == torch.bfloat16:
        new = round_stochastically(w, _random_bits(given, rounding_key(h["seed"], t), rows))
    if given.found_inf is not None:
        skip = given.found_inf.squeeze() > 0
        new, after = torch.where(skip, stored, new), torch.where(skip, before, after)
    if rows is None:
        given.param.copy_(new)
        given.sums.copy_(after)
    else:
        given.param.index_copy_(0, rows, new)
        given.sums.index_copy_(0, rows, after)


def _summed(given: RowWiseArguments, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the rows and their summed gradients, without waiting for a device: as many as there are entries.

    Behind the different rows the last one is repeated, with the same gradient: it is written several times, each time
    with the same value.
    """
    assert given.rows is not None
    values = (given.values if given.order is None else given.values[given.order]).to(wide)
    count = len(given.rows)
    ones = torch.ones(1, dtype=torch.int64, device=given.rows.device)
    number = torch.cat([ones, (given.rows[1:] != given.rows[:-1]).long()]).cumsum(0) - 1  # of the run of equal rows
    summed = torch.zeros_like(values)
    if values.device.type == "cpu":
        summed.index_add_(0, number, values)
    else:  # index_add_ uses atomics there; this is deterministic
        summed.index_put_((number,), values, accumulate=True)
    run = torch.arange(count, device=number.device).minimum(number[-1])
    return given.rows[torch.searchsorted(number, run)], summed[run]


def _random_bits(given: RowWiseArguments, key: Tensor, rows: Tensor | None) -> Tensor:
    """Return 16 random bits for each element, by its position in the embedding table, as in ``rounding.py``."""
    height, width = given.param.shape
    row = torch.arange(height, device=given.param.device) if rows is None else rows
    position = row[:, None] * width + torch.arange(width, device=given.param.device)
    return random_bits_at(key, 0, position)
