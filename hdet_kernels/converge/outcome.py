"""The result of an average, as the scheduler records it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hdet_kernels.converge.agreement import Agreement
from hdet_kernels.converge.plan import Plan, compared
from hdet_kernels.converge.transport import Cost


@dataclass(frozen=True)
class Outcome:
    """The result of an average. Arrays have one entry per replica.

    Attributes:
        losses, probes: mean training loss and loss on the probe; NaN where there is none.
        healthy: which replicas had finite values and losses.
        shared: whether all replicas have the same gradients; None if unknown.
        bytes: bytes that this process passed to collectives, handshake included. The two collectives of a compressed
            bucket count as the all-reduce that they replace.
        collectives: number of collectives.
        seconds: time that the training waited.
        taken: the replica that all became a copy of, with ``merge="best"``.
        state: whether optimizer state was averaged, so that it is equal on all replicas.
        kept: step of the earlier state that all replicas can return to; None if there is none.
        distance: root mean square of the replicas' distances from their mean, over its norm; None if it is not known.
    """

    losses: NDArray[np.float64]
    probes: NDArray[np.float64]
    healthy: NDArray[np.bool_]
    shared: bool | None
    bytes: int
    collectives: int
    seconds: float
    taken: int | None = None
    state: bool = False
    kept: int | None = None
    distance: float | None = None

    @property
    def compared(self) -> NDArray[np.float64]:
        """The losses that a controller compares: on the probe, or without one in training; NaN for a bad replica."""
        return np.where(self.healthy, compared(self.losses, self.probes), np.nan)

    @staticmethod
    def of(agreement: Agreement, plan: Plan, cost: Cost, seconds: float, distance: float | None = None) -> Outcome:
        """Return the outcome of an average that was agreed on and planned, at this cost."""
        return Outcome(
            losses=agreement.losses,
            probes=agreement.probes,
            healthy=plan.healthy,
            shared=plan.shared,
            bytes=cost.bytes,
            collectives=cost.collectives,
            seconds=seconds,
            taken=plan.taken,
            state=plan.state,
            kept=agreement.kept,
            distance=distance,
        )

    @staticmethod
    def of_none(agreement: Agreement, cost: Cost, seconds: float) -> Outcome:
        """Return the outcome of an average that did not take place, because no replica is healthy."""
        return Outcome(
            losses=agreement.losses,
            probes=agreement.probes,
            healthy=agreement.healthy,
            shared=agreement.shared,
            bytes=cost.bytes,
            collectives=cost.collectives,
            seconds=seconds,
            kept=agreement.kept,
        )
