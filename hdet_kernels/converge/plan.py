"""What is averaged at a sync, decided by all replicas alike from what their control rows show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hdet_kernels.converge.handshake import Verdict

AverageState = Literal["auto"] | bool
Merge = Literal["mean", "best"]


def check_merge(merge: object, *, outer: object, compress: object) -> None:
    if merge not in get_args(Merge):
        raise ValueError(f"merge must be one of {', '.join(map(repr, get_args(Merge)))}, got {merge!r}")
    others = {name: value for name, value in (("outer", outer), ("compress", compress)) if value is not None}
    if merge == "best" and others:
        given = ", ".join(f"{name}={value!r}" for name, value in others.items())
        raise ValueError(f"merge='best' copies one replica as it is, got {given} with it: leave one of the two out")


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
    outer: take the outer step, where there is one.
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
    outer: bool = True

    def shared(self, verdict: Verdict) -> bool | None:
        return self.known_shared if verdict.shared is None else verdict.shared


@dataclass(frozen=True)
class Plan:
    """What all replicas have decided to average.

    healthy: which of them are sound. included: whose mean all receive; taken: the one, if it is copied for its loss.
    remembered: as what the next differences refer to. uneven_state: state is to be averaged that not all have.
    """

    healthy: NDArray[np.bool_]
    included: NDArray[np.bool_]
    taken: int | None
    shared: bool | None
    params: bool
    compressed: bool
    remembered: bool
    state: bool
    counts: bool
    integers: bool
    uneven_state: bool


def decide(verdict: Verdict, asked: Asked, *, merge: Merge, compresses: bool) -> Plan:
    """``compresses``: whether parameters travel as differences where they can."""
    taken = best(verdict) if merge == "best" else None
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
        verdict.healthy if taken is None else np.arange(len(verdict.healthy)) == taken,
        taken,
        shared,
        params=params,
        compressed=compressed,
        remembered=compresses and not compressed,
        state=state,
        counts=state and not verdict.same_counts,
        integers=not verdict.same_integers,
        uneven_state=wanted and verdict.has_state and not verdict.same_state,
    )


def compared(losses: NDArray[np.float64], probes: NDArray[np.float64]) -> NDArray[np.float64]:
    """By which replicas are compared: their losses on the probe, or where there is none those of the window."""
    return losses if np.isnan(probes).all() else probes


def best(verdict: Verdict) -> int | None:
    """The sound replica whose loss is lowest, on the probe where there is one; the first of several. None where no loss
    is known."""
    losses = compared(verdict.losses, verdict.probes)
    candidates = np.where(verdict.healthy & np.isfinite(losses), losses, np.inf)
    return int(np.argmin(candidates)) if np.isfinite(candidates).any() else None
