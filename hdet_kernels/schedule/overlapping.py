"""An average that runs beside the training, with all that the cycle needs when its result is applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hdet_kernels.converge import Correction, Outcome, OverlappedAverage
from hdet_kernels.fanout.spread import Placement

_ARRAYS = ("losses", "probes", "healthy")
_PLAIN = ("shared", "bytes", "collectives", "seconds", "kept", "distance")


@dataclass(frozen=True)
class Overlapping:
    """An average under way.

    Args:
        step: the step that its sync followed.
        due: the step after which it is applied.
        placed: what the replicas had trained with.
        acting: whether the controller acts on it.
        average: the average itself.
    """

    step: int
    due: int
    placed: Placement
    acting: bool
    average: OverlappedAverage[Outcome]

    def state_dict(self, *, in_consensus: bool) -> dict[str, Any] | None:
        """Wait for the average and return it with its result; None if it failed.

        Args:
            in_consensus: whether the parameters that are saved with it are the average of all replicas.
        """
        if self.average.failed:
            return None
        correction, outcome = self.average.wait()
        if in_consensus:
            correction = correction.of_the_consensus()
        plain = {name: getattr(outcome, name) for name in _PLAIN}
        arrays = {name: getattr(outcome, name).tolist() for name in _ARRAYS}
        return {
            "step": self.step,
            "due": self.due,
            "placed": self.placed.state_dict(),
            "acting": self.acting,
            "correction": correction.state_dict(),
            "outcome": {**plain, **arrays},
        }

    @staticmethod
    def of(state: dict[str, Any]) -> Overlapping:
        """Return the average that :meth:`state_dict` saved; it has arrived already."""
        arrays = {name: np.array(state["outcome"][name]) for name in _ARRAYS}
        average = OverlappedAverage.landed(
            Correction.of(state["correction"]), Outcome(**{**state["outcome"], **arrays})
        )
        return Overlapping(state["step"], state["due"], Placement.of(state["placed"]), state["acting"], average)
