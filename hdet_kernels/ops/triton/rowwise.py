"""Row-wise Adagrad in Triton: one program for each entry of the gradient; the first entry of a row does its work."""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hdet_kernels.ops.rowwise import RowWiseArguments
from hdet_kernels.ops.triton.rounding import key_of, random_base, widened, write
from hdet_kernels.ops.triton.rules import EPS, LR, LR_DECAY, MAXIMIZE, SEED, WEIGHT_DECAY

# The most columns of a row that a program has at a time. Wider rows are summed a second time for the update.
MOST_COLUMNS = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["count"])
def _update_row(
    param,
    sums,
    steps,
    numbers,
    values,
    rows,
    order,
    grad_scale,
    found_inf,
    count,
    width,
    DECOUPLED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    row = entry
    works = entry >= 0
    if rows is not None:
        row = tl.load(rows + entry)
        works = (entry == 0) | (tl.load(rows + tl.maximum(entry - 1, 0)) != row)
    if found_inf is not None:
        works = works & (tl.load(found_inf) <= 0)
    if works:
        wide: tl.constexpr = sums.dtype.element_ty
        t = tl.load(steps).to(tl.float64) + 1
        rate = tl.load(numbers + LR) / (1 + (t - 1) * tl.load(numbers + LR_DECAY))
        decay = tl.load(numbers + WEIGHT_DECAY)
        factor = 1 - 2 * tl.load(numbers + MAXIMIZE)
        if grad_scale is not None:
            factor = factor / tl.load(grad_scale).to(tl.float64)
        key = key_of(tl.load(numbers + SEED), t)
        work = (param, values, rows, order, factor.to(wide), decay.to(wide), entry, row, count, width)
        total = tl.zeros((BLOCK,), wide)
        for first in range(0, width, BLOCK):
            g = _gradient(work, first, DECOUPLED, BLOCK, wide)
            total += g * g
        after = tl.load(sums + row) + tl.sum(total) / width
        tl.store(sums + row, after)
        root = tl.sqrt_rn(after) if wide == tl.float32 else tl.sqrt(after)
        rate_of_row = rate.to(wide) / (root + tl.load(numbers + EPS).to(wide))
        kept = (1 - rate * decay).to(wide)
        for first in range(0, width, BLOCK):
            g = _gradient(work, first, DECOUPLED, BLOCK, wide)
            column = first + tl.arange(0, BLOCK)
            at = row * width + column
            w = widened(tl.load(param + at, mask=column < width, other=0.0), wide)
            if DECOUPLED:
                w = w * kept
            write(param, at, w - rate_of_row * g, column < width, random_base(at >> 2, key), 0, STOCHASTIC)


@triton.jit
def _gradient(work, first, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr, wide: tl.constexpr):
    """Return the summed gradient of a row in the columns from ``first`` on."""
    param, values, rows, order, factor, decay, entry, row, count, width = work
    column = first + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.zeros((BLOCK,), wide)
    at = entry
    more = entry < count
    while more:
        source = at
        if order is not None:
            source = tl.load(order + at)
        g += widened(tl.load(values + source * width + column, mask=inside, other=0.0), wide)
        at += 1
        more = False
        if rows is not None:
            more = (at < count) & (tl.load(rows + tl.minimum(at, count - 1)) == row)
    g = g * factor
    if not DECOUPLED:
        g = g + decay * widened(tl.load(param + row * width + column, mask=inside, other=0.0), wide)
    return g


def rowwise_adagrad(given: RowWiseArguments) -> None:
    """Update the rows that have a gradient."""
    count, width = given.values.shape
    if not width:
        return
    block = min(triton.next_power_of_2(width), MOST_COLUMNS)
    with torch.cuda.device_of(given.param):
        _update_row[(count,)](
            given.param,
            given.sums,
            given.steps,
            given.table[given.table_row],
            given.values,
            given.rows,
            given.order,
            given.grad_scale,
            given.found_inf,
            count,
            width,
            DECOUPLED=given.decoupled,
            STOCHASTIC=given.stochastic_rounding,
            BLOCK=block,
            **OPTIONS,
        )
