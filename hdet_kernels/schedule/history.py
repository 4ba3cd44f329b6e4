"""The record of a sync, as ``scheduler.history`` has it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["sync", "early", "last", "manual"]


@dataclass(frozen=True)
class SyncRecord:
    """One sync. Lists have one entry for each replica.

    Args:
        step: finished steps.
        cycle: number of the cycle that ended.
        kind: ``"sync"`` at a multiple of ``sync_every``, ``"early"`` before the first, ``"last"`` at the end of the
            run, ``"manual"`` for ``scheduler.converge()``.
        losses: mean training loss since the last sync; NaN if none was recorded.
        probes: losses on the probe, where it ran.
        base: base value of every hyperparameter, by name.
        values: value that each replica trained with, by name.
        excluded: replicas that were not finite; they were left out of the mean and received it.
        gradients: ``"shared"``, ``"local"``, or ``"unknown"``.
        bytes: payload that this process handed to collectives.
        collectives: number of them.
        seconds: how long training stood still in this process: waiting for slower replicas included, the probe not.
        landed: the step after which the average was applied: ``step``, or up to ``overlap_steps`` later.
        taken: the replica that all others became a copy of (``merge="best"``); None for a mean.
    """

    step: int
    cycle: int
    kind: Kind
    losses: list[float]
    probes: list[float] | None
    base: dict[str, float]
    values: dict[str, list[float]]
    excluded: list[int]
    gradients: Literal["shared", "local", "unknown"]
    bytes: int
    collectives: int
    seconds: float
    landed: int | None = None
    taken: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)
