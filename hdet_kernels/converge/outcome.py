"""The result of an average, as the scheduler records it, and the distance of the replicas from their mean.

The distance is found from norms: Σ_r ‖θ_r − θ̄‖² = Σ_r ‖θ_r‖² − N·‖θ̄‖², and the handshake has gathered the norm of every
replica. Every process measures a part of the mean, and these travel with the confirmation at the end of the average.
Norms are sums in fp64. The mean is rounded to the parameters' dtype, so that a relative distance below about 1e-5 (of
fp32 parameters) is rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.converge.agreement import Agreement
from hdet_kernels.converge.plan import Plan, compared
from hdet_kernels.converge.transport import Cost
from hdet_kernels.ensemble import Ensemble
from hdet_kernels.tensors import devices_of, wide_dtype


@dataclass(frozen=True)
class Outcome:
    """The result of an average. Arrays have one entry per replica.

    Attributes:
        losses, probes: mean training loss and loss on the probe; NaN where there is none.
        healthy: which replicas had finite values and losses.
        shared: whether all replicas have the same gradients; None if unknown.
        bytes: bytes that this process passed to collectives, handshake included. The two collectives of a compressed
            bucket count as the all-reduce that they replace, the 8 bytes of the confirmation are left out.
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
    def of(
        agreement: Agreement, plan: Plan | None, cost: Cost, seconds: float, distance: float | None = None
    ) -> Outcome:
        """Return the outcome of an average that was agreed on and planned, at this cost.

        ``plan``: None where it did not take place, because no replica is healthy.
        """
        return Outcome(
            losses=agreement.losses,
            probes=agreement.probes,
            healthy=agreement.healthy,
            shared=agreement.shared if plan is None else plan.shared,
            bytes=cost.bytes,
            collectives=cost.collectives,
            seconds=seconds,
            taken=None if plan is None else plan.taken,
            state=plan is not None and plan.state,
            kept=agreement.kept,
            distance=distance,
        )


def distance_of(
    ensemble: Ensemble, agreement: Agreement, plan: Plan, params: Sequence[Tensor], norm: float
) -> float | None:
    """Return how far the replicas that were averaged lay apart: see :func:`relative_distance`.

    Of sharded replicas it is the distance in the shard that this process holds.

    Args:
        ensemble: the replicas.
        agreement: the conclusions from the handshake, with the norms before the average.
        plan: of the average.
        params: tensors with the dtypes and devices of the parameters.
        norm: of the averaged parameters.

    Returns:
        None where it is not known: of a single replica, where all became a copy of one, and where the checksum is no
        plain norm because parameters are of several devices, or of fp64 and others.
    """
    if ensemble.size == 1 or plan.taken is not None or not plan.params:
        return 0.0 if ensemble.size > 1 and not plan.params else None
    present = [tensor for tensor in params if tensor.numel()]
    devices, wide = devices_of(present), {tensor.dtype == torch.float64 for tensor in present}
    if len(devices) != 1 or len(wide) != 1 or wide_dtype(present[0].device) != torch.float64:
        return None
    return relative_distance(agreement.norms[plan.included, ensemble.part], norm)


def relative_distance(norms: NDArray[np.float64], mean: float) -> float | None:
    """Return √(mean_r ‖θ_r − θ̄‖²) / ‖θ̄‖ from the norms of the θ_r and that of θ̄; None unless all are positive."""
    if not (mean > 0 and math.isfinite(mean) and np.isfinite(norms).all()):
        return None
    ratios = norms / mean
    return math.sqrt(max(float(((ratios - 1) * (ratios + 1)).mean()), 0.0))
