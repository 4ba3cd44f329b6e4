"""The distance of the replicas from their mean, found from norms.

Σ_r ‖θ_r − θ̄‖² = Σ_r ‖θ_r‖² − N·‖θ̄‖², and the handshake has gathered the norm of every replica. So the distance costs
one more norm at a sync, of the averaged parameters, and no collective. Norms are sums in fp64. The mean is rounded to
the parameters' dtype, so that a relative distance below about 1e-5 (of fp32 parameters) is rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.converge.agreement import Agreement
from hdet_kernels.converge.plan import Plan
from hdet_kernels.converge.transport import Transport
from hdet_kernels.tensors import devices_of, wide_dtype

_dtype_of = attrgetter("dtype")


def distance_of(
    transport: Transport, agreement: Agreement, plan: Plan, averaged: Sequence[Tensor], norm: float | None = None
) -> float | None:
    """Return how far the replicas that were averaged lay apart: see :func:`relative_distance`.

    Of sharded replicas it is the distance in the shard that this process holds.

    Args:
        transport: of the average; it has the replicas, and takes the norm.
        agreement: the conclusions from the handshake, with the norms before the average.
        plan: of the average.
        averaged: the parameters, after the average and before an outer step.
        norm: their norm, if it is known.

    Returns:
        None where it cannot be told: of a single replica, where all became a copy of one, and where the checksum is no
        plain norm because parameters are of several devices, or of fp64 and others.
    """
    ensemble = transport.ensemble
    if ensemble.size == 1 or plan.taken is not None or not plan.params:
        return 0.0 if ensemble.size > 1 and not plan.params else None
    present = list(filter(Tensor.numel, averaged))
    devices, wide = devices_of(present), {dtype == torch.float64 for dtype in set(map(_dtype_of, present))}
    if len(devices) != 1 or len(wide) != 1 or wide_dtype(present[0].device) != torch.float64:
        return None
    if norm is None:
        # Where a process holds several replicas, all rows are the mean now.
        one = [tensor[0] for tensor in present] if ensemble.rows > 1 else present
        norm = float(transport.checksum_of_one(one, present[0].device))
    return relative_distance(agreement.norms[plan.included, ensemble.part], norm)


def relative_distance(norms: NDArray[np.float64], mean: float) -> float | None:
    """Return √(mean_r ‖θ_r − θ̄‖²) / ‖θ̄‖ from the norms of the θ_r and that of θ̄; None unless all are positive."""
    if not (mean > 0 and math.isfinite(mean) and np.isfinite(norms).all()):
        return None
    ratios = norms / mean
    return math.sqrt(max(float(((ratios - 1) * (ratios + 1)).mean()), 0.0))


def norm_of_mean(norms: NDArray[np.float64], distance: float) -> float:
    """Return the norm of the mean of two vectors from their norms and their distance from each other.

    ‖(a + b) / 2‖² = (‖a‖² + ‖b‖²) / 2 − ‖a − b‖² / 4
    """
    largest = float(norms.max())  # by which all are divided, so that no square overflows
    if not 0 < largest < math.inf:
        return largest
    square = float(np.square(norms / largest).mean()) - (distance / largest / 2) ** 2
    return largest * math.sqrt(max(square, 0.0))
