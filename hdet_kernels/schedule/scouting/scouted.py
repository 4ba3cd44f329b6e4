"""The facts of a run with ``max_lr=None`` that outlast its scouting phase: the plan, and the learning rate it found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from hdet_kernels.scout import Plan, ScoutSettings


class Scouted:
    """The plan of a scouting phase, and the learning rate that it found.

    Args:
        plan: the rounds.
        settings: the constants.
        ratios: the learning rate of every parameter group over the largest.

    Attributes:
        found: the peak learning rate of the group with the largest; None before the end of the phase.
    """

    def __init__(self, plan: Plan, settings: ScoutSettings, ratios: Sequence[float]) -> None:
        self.plan, self.settings, self.ratios = plan, settings, list(ratios)
        self.found: float | None = None

    def rates(self, largest: float) -> list[float]:
        """Return the peak learning rates of all parameter groups, where the largest is ``largest``."""
        return [largest * ratio for ratio in self.ratios]

    @property
    def config(self) -> dict[str, Any]:
        """The settings that must be equal on all replicas, and in a checkpoint that is loaded."""
        return {
            "scout": self.settings.to_dict(),
            "total_steps": self.plan.total_steps,
            "rounds": list(self.plan.rounds),
        }


def ratios_of(optimizer: Optimizer) -> list[float]:
    """Return the learning rate of every parameter group over the largest.

    Raises:
        ValueError: there is no largest one.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if not rates or not all(map(math.isfinite, rates)) or max(rates) <= 0:
        raise ValueError(
            f"max_lr=None keeps the ratios of the optimizer's learning rates, got {rates}: build the optimizer with "
            "positive ones, as lr=1.0 for all groups"
        )
    return [rate / max(rates) for rate in rates]
