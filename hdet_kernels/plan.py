"""What is averaged at a sync, decided by all replicas alike from what their control rows show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .control import Verdict

AverageState = Literal["auto"] | bool


@dataclass(frozen=True)
class Asked:
    """What is asked of an average.

    call: by which name; all replicas must mean the same.
    average_state: True, False, or ``"auto"``: unless the gradients are shared. State is also averaged when a replica
        is left out, so that the healed one gets sound moments; never with ``include_state=False``.
    known_shared: whether gradients are shared, if the replicas do not all show theirs this time. Where nothing is
        known the state is averaged, which is right in both cases and merely costs more.
    needs_shared: local gradients are an error.
    needs_loss: a replica without any recorded loss is an error.
    skip_if_equal: leave parameters alone that are equal on all replicas with shared gradients (plain data parallel
        stays bit for bit).
    in_full: do not compress.
    heals: state is averaged for the sake of a replica that was left out.
    """

    call: str = "sync"
    average_state: AverageState = "auto"
    include_state: bool = True
    known_shared: bool | None = None
    needs_shared: bool = False
    needs_loss: bool = False
    skip_if_equal: bool = False
    in_full: bool = False
    heals: bool = False

    def shared(self, verdict: Verdict) -> bool | None:
        return self.known_shared if verdict.shared is None else verdict.shared


@dataclass(frozen=True)
class Plan:
    """What all replicas have decided to average.

    remembered: as what the next differences refer to. uneven_state: state is to be averaged that not all have.
    """

    healthy: NDArray[np.bool_]
    shared: bool | None
    params: bool
    compressed: bool
    remembered: bool
    state: bool
    counts: bool
    integers: bool
    uneven_state: bool


def decide(verdict: Verdict, asked: Asked, *, compresses: bool) -> Plan:
    """``compresses``: whether parameters travel as differences where they can."""
    shared = asked.shared(verdict)
    excluded = not verdict.healthy.all()
    wanted = bool(not shared if asked.average_state == "auto" else asked.average_state)
    # A replica that is left out leaves the others their own where it has none to be replaced.
    state = (wanted or excluded or asked.heals) and verdict.has_state and verdict.same_state
    params = excluded or not (asked.skip_if_equal and verdict.equal and shared is True)
    compresses = compresses and params and not asked.in_full
    compressed = compresses and verdict.same_consensus and not excluded
    return Plan(
        verdict.healthy,
        shared,
        params=params,
        compressed=compressed,
        remembered=compresses and not compressed,
        state=state,
        counts=state and not verdict.same_counts,
        integers=not verdict.same_integers,
        uneven_state=wanted and verdict.has_state and not verdict.same_state,
    )
