"""The findings of a controller at a sync, for records, loggers and reports. Nothing depends on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hdet_kernels.controller.protocol import Array, Observation, Run, State


@dataclass(frozen=True)
class Findings:
    """The findings of a controller at one sync. Arrays are [J], NaN where something is not known.

    Args:
        slopes: slope of the loss in the logarithm of each hyperparameter.
        errors: standard errors of the slopes.
        posterior: by hyperparameter, mean and standard deviation of the posterior of log θ: the right peak over the
            given one. Only those that have one.
    """

    slopes: Array
    errors: Array
    posterior: dict[int, tuple[float, float]] = field(default_factory=dict)

    @staticmethod
    def measured(seen: Observation) -> Findings:
        """Return the slopes that were measured from gradients, and nothing else."""
        unknown = np.full(len(seen.base), np.nan)
        if seen.slopes is None or seen.errors is None:
            return Findings(unknown, unknown)
        # Of scalars other than learning rates none is measured: their error is infinite.
        known = ~np.isinf(seen.errors)
        return Findings(np.where(known, seen.slopes, np.nan), np.where(known, seen.errors, np.nan))

    def by_name(self, names: Sequence[str]) -> dict[str, Any]:
        """Return slopes, errors and posterior as dicts of those that are known; no posterior at all is None."""

        def known(numbers: Array) -> dict[str, float]:
            return {name: number for name, number in zip(names, numbers.tolist(), strict=True) if math.isfinite(number)}

        posterior = {names[index]: list(moments) for index, moments in self.posterior.items()}
        return {"slopes": known(self.slopes), "errors": known(self.errors), "posterior": posterior or None}


@runtime_checkable
class ExplainingController(Protocol):
    """A controller that tells its findings. Others leave the records of their syncs without slopes."""

    def findings(self, run: Run, state: State, seen: Observation) -> Findings:
        """Return the findings at the sync that ``seen`` describes and that led to ``state``."""
