"""What happened at every sync."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["sync", "early", "last", "manual"]


@dataclass(frozen=True)
class SyncRecord:
    """One sync. Lists have one entry a replica.

    step: finished steps. cycle: the number of the cycle that ended. kind: ``"sync"`` at a multiple of ``sync_every``,
    ``"early"`` before the first, ``"last"`` at the end of the run, ``"manual"`` for ``scheduler.converge()``.
    losses: mean training loss since the last sync (NaN: none recorded). probes: losses on the probe, where one ran.
    base: the base value of every hyperparameter, by name. values: what each replica trained with, by name.
    excluded: replicas that were not finite; they were left out of the mean and received it.
    gradients: ``"shared"``, ``"local"``, or ``"unknown"``.
    bytes, collectives, seconds: what this sync cost this process; the seconds are those that training stood still,
        waiting for slower replicas included, and not the probe.
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
        return asdict(self)
