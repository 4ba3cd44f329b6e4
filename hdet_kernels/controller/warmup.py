"""What a learning rate may be while it climbs, where the schedule does not climb by itself: it tells by where it turns
from too low to too high."""

from __future__ import annotations

import math

from hdet_kernels.controller.protocol import Observation, Run

#: How OneCycleLR climbs: from this share of its peak to all of it, in this share of the run.
CLIMBS_FROM, CLIMBS_FOR = 1 / 25, 0.3

#: The best constant learning rate was a quarter of the best peak of a schedule that anneals: 1 + this.
STAYING = 3.0


def annealed(peak: float, run: Run) -> float:
    """The peak that a schedule which anneals would have in its place."""
    return peak * (1 + STAYING * run.end)


def over_peak(run: Run, seen: Observation, index: int) -> float:
    """A learning rate over the peak that was given."""
    return float(seen.base[index]) / annealed(run.peaks[index] or 1.0, run)


def ceilings_at(run: Run, share: float) -> list[float | None]:
    """What the learning rates may be at this share of the run where the schedule does not climb itself."""
    if run.peak >= 0.5 * CLIMBS_FOR:
        return []
    climbed = 0.5 - 0.5 * math.cos(math.pi * min(share / CLIMBS_FOR, 1.0))
    part = CLIMBS_FROM + (1 - CLIMBS_FROM) * climbed
    return [None if peak is None else annealed(peak, run) * part for peak in run.peaks]
