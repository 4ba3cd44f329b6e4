"""Find the best learning rate of plain training on a grid, and the loss that other runs are measured by.

The lowest of several means is lower than the mean of what was chosen, because noise helps to choose. So the learning
rate is chosen by the even seeds and its loss is taken from the odd ones, and the other way round: every seed has a loss
at a learning rate that it had no part in choosing, and the yardstick is the mean of these losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from .spec import Record

# Losses by learning rate and seed.
Grid = dict[float, dict[int, float]]


@dataclass(frozen=True)
class Yardstick:
    """Plain training at the best learning rate of a task.

    Args:
        best: The learning rate with the lowest mean loss over all seeds.
        losses: By seed, the loss at the learning rate that the seeds of the other parity choose.
        claimed: The lowest mean of the grid, by the seeds that chose it.
        at_the_end: Whether the best learning rate is the lowest or the highest of the grid.
    """

    best: float
    losses: dict[int, float]
    claimed: float
    at_the_end: bool

    @cached_property
    def mean(self) -> float:
        return fmean(self.losses.values())

    @cached_property
    def deviation(self) -> float:
        """Return the standard deviation over seeds; 0 for a single one."""
        return float(np.std(list(self.losses.values()), ddof=1)) if len(self.losses) > 1 else 0.0

    @property
    def relative_deviation(self) -> float:
        """Return the standard deviation in percent of the mean."""
        return 100 * self.deviation / self.mean

    @property
    def error(self) -> float:
        """Return the standard error of the mean."""
        return self.deviation / math.sqrt(len(self.losses))

    @property
    def flattery(self) -> float:
        """Return by how many percent the lowest mean of the grid is below the yardstick."""
        return 100 * (self.mean - self.claimed) / self.mean


def yardsticks(records: Iterable[Record]) -> dict[str, Yardstick]:
    """Return the yardstick of every task that has plain runs on a grid; the finer grid is used where there is one.

    A task that diverges with some seed at every learning rate of its grid has none.
    """
    coarse, near = dict[str, Grid](), dict[str, Grid]()
    for record in records:
        if record["kind"] in ("grid", "near") and "val" in record:
            grid = (coarse if record["kind"] == "grid" else near).setdefault(record["task"], {})
            grid.setdefault(_digits(record["lr"]), {})[record["seed"]] = record["val"]
    finest = coarse | near
    return {task: measured(grid, coarse.get(task, grid)) for task, grid in finest.items() if _usable(grid)}


def best_rates(records: Iterable[Record]) -> dict[str, float]:
    """Return the learning rate with the lowest mean validation loss, by task."""
    return {task: found.best for task, found in yardsticks(records).items()}


def measured(grid: Grid, coarse: Grid) -> Yardstick:
    """Return the yardstick by ``grid``; ``coarse`` is the grid that was made first."""
    grid = _usable(grid)
    best = _best(grid)
    losses: dict[int, float] = {}
    for parity in (0, 1):
        judges = {lr: _of_parity(found, parity) for lr, found in grid.items()}
        chosen = _best(judges) if all(judges.values()) else best
        losses |= _of_parity(grid[chosen], 1 - parity)
    claimed = fmean(coarse[_best(coarse)].values())
    every = grid.keys() | coarse.keys()
    return Yardstick(best, losses, claimed, len(every) > 1 and best in (min(every), max(every)))


def _usable(grid: Grid) -> Grid:
    """Return the learning rates at which no seed diverges, and of which a time limit did not leave out half the seeds.

    Where a seed diverges is not the best, however well the others end.
    """
    most = max(len(losses) for losses in grid.values())
    return {
        lr: losses for lr, losses in grid.items() if 2 * len(losses) > most and np.isfinite(list(losses.values())).all()
    }


def _best(grid: Mapping[float, Mapping[int, float]]) -> float:
    return min(grid, key=lambda lr: fmean(grid[lr].values()))


def _of_parity(losses: Mapping[int, float], parity: int) -> dict[int, float]:
    return {seed: loss for seed, loss in losses.items() if seed % 2 == parity}


def _digits(lr: float) -> float:
    """Round to the five digits of results files, so that runs of this process and recorded ones are at one rate."""
    return float(f"{lr:.5g}")
