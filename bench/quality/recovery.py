"""Compute how much of the loss gap between a wrong and the best learning rate a method recovers.

Runs are compared seed by seed: a seed that is hard for one method is hard for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .results import Report
from .selection import select
from .spec import Record


@dataclass(frozen=True)
class Recovery:
    """For each seed, ``gained``: how much lower a run ended than plain training from the same start; and ``gaps``: how
    much lower plain training at the best learning rate ended."""

    gained: NDArray[np.float64]
    gaps: NDArray[np.float64]

    @property
    def gap(self) -> float:
        return float(self.gaps.mean()) if len(self.gaps) else 0.0

    @property
    def share(self) -> float | None:
        """Return the recovered share of the gap, or None where there is no gap."""
        return float(self.gained.mean()) / self.gap if self.gap > 0 else None

    @property
    def recovered(self) -> str:
        """Format the share with its standard error over seeds."""
        if self.share is None or len(self.gaps) < 2:
            return percent(self.share)
        left = self.gained - self.share * self.gaps
        return f"{self.share:.0%} ± {deviation(left.tolist()) / math.sqrt(len(left)) / self.gap:.0%}"


def recovery(plain: Sequence[Record], found: Sequence[Record], best: Sequence[Record]) -> Recovery:
    """Compare ``found`` with plain runs from the same start and with the best ones, by the seeds that all have."""
    here, there, goal = _by_seed(plain), _by_seed(found), _by_seed(best)
    seeds = sorted(here.keys() & there.keys() & goal.keys())
    start = np.array([here[seed] for seed in seeds])
    return Recovery(start - [there[seed] for seed in seeds], start - [goal[seed] for seed in seeds])


def recovery_from(report: Report, task: str, start: float, runs: Sequence[Record]) -> Recovery:
    """Compare ``runs`` from a start with plain runs from there and at the best learning rate."""
    plain = select(report.records, kind="start", task=task, method="plain", factor=start)
    return recovery(plain, runs, best_runs(report, task))


def best_runs(report: Report, task: str) -> list[Record]:
    """Return the plain runs at the best learning rate of the grid."""
    runs = select(report.records, task=task, method="plain", lr=report.best[task])
    return [run for run in runs if run["kind"] in ("grid", "start")]


def best_losses(report: Report, task: str) -> list[float]:
    """Return the validation losses of plain runs at the best learning rate, one for each seed."""
    return list(_by_seed(best_runs(report, task)).values())


def losses(runs: Sequence[Record]) -> list[float]:
    """Return the validation losses of runs."""
    return [run["val"] for run in runs]


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation over seeds; 0 for a single one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def percent(share: float | None) -> str:
    """Format a share of the gap."""
    return "no gap" if share is None else f"{share:.0%}"


def _by_seed(runs: Sequence[Record]) -> dict[int, float]:
    return {run["seed"]: run["val"] for run in runs}
