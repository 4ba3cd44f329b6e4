"""Judge from the course of the losses whether training is sound, and whether the learning rate is certainly too high.

Two signs are nearly never seen at a good learning rate, and nearly always at one that is ten times too high
(``docs/controller.md`` has the shares over all tasks of the quality suite):

- **An edge**: an e-fold larger learning rate would cost a good part of all that was gained so far, cycle after cycle.
- **A break**: a good part of all that was gained is lost, for two syncs on end and by far more than levels change.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hdet_kernels.controller.protocol import Judgement
from hdet_kernels.controller.settings import RegressionSettings

#: Changes of the level from which the usual one is taken.
CHANGES = 8


@dataclass(frozen=True)
class Soundness:
    """The course of the losses so far.

    Args:
        initial: level (mean loss of the replicas) at the first sync.
        lowest: lowest level so far.
        last: level at the last sync.
        changes: sizes of the last changes of the level, from sync to sync.
        costs: the last costs of an e-fold larger learning rate, over the gain since the first sync.
    """

    initial: float
    lowest: float
    last: float
    changes: tuple[float, ...] = ()
    costs: tuple[float, ...] = ()

    @staticmethod
    def at(level: float) -> Soundness:
        """Return the course that begins with ``level``."""
        return Soundness(level, level, level)

    @property
    def gain(self) -> float:
        """The gain since the first sync, at the lowest level."""
        return self.initial - self.lowest

    def judge(self, level: float | None, settings: RegressionSettings) -> Judgement:
        """Judge a sync with this level, before it is added. None: no replica is finite."""
        if level is None:
            return "broken"
        above = min(level, self.last) - self.lowest
        if above > settings.break_share * self.gain and above > settings.break_noise * self.usual_change:
            return "broken"
        return "sound" if level <= self.lowest + self.usual_change and not self.near_edge(settings) else "unclear"

    @property
    def usual_change(self) -> float:
        """The usual change of the level from sync to sync."""
        return median(self.changes) if self.changes else math.inf

    def near_edge(self, settings: RegressionSettings) -> bool:
        """Return whether the last cycles were near the edge of stability.

        A gain that may be noise tells nothing: on a plateau the lowest of many levels is below the first one too.
        """
        if len(self.costs) < settings.edge_cycles or self.gain <= settings.break_noise * self.usual_change:
            return False
        return median(self.costs) > settings.edge_cost

    def after(self, level: float, slope: float | None, settings: RegressionSettings) -> Soundness:
        """Return the course after one more sync.

        Args:
            level: mean loss of the replicas.
            slope: of the loss in the logarithm of all learning rates together; None if it is not known.
            settings: the controller's constants.
        """
        lowest = min(self.lowest, level)
        changes = (*self.changes, abs(level - self.last))[-CHANGES:]
        gain, costs = self.initial - lowest, self.costs
        if slope is not None and gain > 0:
            costs = (*costs, slope / gain)[-settings.edge_cycles :]
        return Soundness(self.initial, lowest, level, changes, costs)

    def begun_anew(self) -> Soundness:
        """Return the course after the learning rates were lowered: costs of the higher ones no longer count."""
        return Soundness(self.initial, self.lowest, self.lowest, self.changes)

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**asdict(self), "changes": list(self.changes), "costs": list(self.costs)}

    @staticmethod
    def of(state: dict[str, Any]) -> Soundness:
        """Return the course that :meth:`state_dict` saved."""
        return Soundness(**{**state, "changes": tuple(state["changes"]), "costs": tuple(state["costs"])})
