"""Judge whether the learning rate is near instability, has passed it, or sits on a plateau of the loss.

After the turning point a smaller learning rate always looks better, so the signs of slopes say nothing more. Their size
does:

- Where an e-fold larger learning rate would cost a good part of the total gain, cycle after cycle, training breaks
  not far above. The peak is held near where that was first seen (the edge).
- Where much is lost within one cycle, training is diverging. The peak is lowered.
- Where a larger one costs little and nothing is gained, the loss is on a plateau: the task has learned what is learned
  fast and has not begun with the rest. The turning point that was seen belonged to the fast part.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from hdet_kernels.controller.settings import RegressionSettings


@dataclass(frozen=True)
class Cycle:
    """The measurements of one cycle.

    Args:
        level: mean loss of the replicas at its end.
        slope: slope of the losses in the logarithm of the learning rate.
        evidence: that of the slope, see :func:`.peak_posterior.evidence`.
        rate: learning rate over the given peak.
        noise: standard deviation of a loss.
    """

    level: float
    slope: float
    evidence: float
    rate: float
    noise: float = 0.0


@dataclass(frozen=True)
class Stability:
    """The judgement after all cycles so far.

    Args:
        initial_level: level of the losses when it was first known.
        costs: cost of an e-fold larger learning rate in the last cycles, over the total gain.
        edge: learning rate at which the edge of stability was first seen; None if it was not.
        diverged_at: lowest learning rate at which training diverged; None if it did not.
        levels: levels of the last cycles, as many as a plateau lasts.
        lowest_before: lowest level before those; None if there is none.
        plateau: whether the last cycle was on a plateau. Known at the sync that sees it only, and not saved.
    """

    initial_level: float
    costs: tuple[float, ...] = ()
    edge: float | None = None
    diverged_at: float | None = None
    levels: tuple[float, ...] = ()
    lowest_before: float | None = None
    plateau: bool = field(default=False, compare=False)

    def after(self, cycle: Cycle, *, early: bool, span: int, settings: RegressionSettings) -> Stability:
        """Return the judgement after one more cycle.

        Args:
            cycle: its measurements.
            early: whether it is too early to judge, because little was gained so far.
            span: number of cycles that a plateau lasts.
            settings: the controller's constants.
        """
        gained = self.initial_level - cycle.level
        costs = (*self.costs, cycle.slope / gained if gained > 0 else 0.0)[-settings.cost_cycles :]
        levels, lowest = (*self.levels, cycle.level), self.lowest_before
        for left in levels[:-span]:
            lowest = left if lowest is None else min(lowest, left)
        edge, diverged_at, plateau = self.edge, self.diverged_at, False
        if cycle.evidence > settings.stability_evidence and not early and len(costs) == settings.cost_cycles:
            if edge is None and median(costs) > settings.edge_cost:
                edge = cycle.rate
            best_gain = self.initial_level - self._lowest
            if best_gain > settings.real_gain * cycle.noise:
                if cycle.level - self._lowest > settings.divergence_loss * best_gain:
                    diverged_at = cycle.rate if diverged_at is None else min(diverged_at, cycle.rate)
                cheap = sum(costs) < settings.cost_cycles * settings.plateau_cost
                plateau = lowest is not None and cheap and self._stands_still(levels[-span:], lowest, settings)
        if cycle.evidence < settings.edge_release:
            edge = None
        return Stability(self.initial_level, costs, edge, diverged_at, levels[-span:], lowest, plateau)

    @property
    def _lowest(self) -> float:
        """The lowest level so far."""
        before = self.initial_level if self.lowest_before is None else self.lowest_before
        return min(*self.levels, self.initial_level, before)

    def _stands_still(self, levels: tuple[float, ...], lowest: float, settings: RegressionSettings) -> bool:
        came_down, gained = lowest - min(levels), self.initial_level - min(lowest, *levels)
        return -settings.plateau_loss * gained < came_down < settings.plateau_gain * gained

    def highest_rate(self, settings: RegressionSettings) -> float:
        """Return the highest peak that is allowed, over the given one."""
        edge = math.inf if self.edge is None else settings.edge_margin * self.edge
        return edge if self.diverged_at is None else min(edge, settings.divergence_cut * self.diverged_at)

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, without ``plateau``."""
        kept = {name: value for name, value in asdict(self).items() if name != "plateau"}
        return kept | {"costs": list(self.costs), "levels": list(self.levels)}

    @staticmethod
    def of(state: dict[str, Any]) -> Stability:
        """Return the judgement that :meth:`state_dict` saved."""
        return Stability(**{**state, "costs": tuple(state["costs"]), "levels": tuple(state["levels"])})
