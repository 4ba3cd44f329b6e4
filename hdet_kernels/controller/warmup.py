"""Cap learning rates early in the run under schedules that have no warm-up of their own.

The controller learns from where a rising learning rate turns from too low to too high. A schedule that starts at its
peak never shows that, so its learning rate is held under a cap that climbs as OneCycleLR does.
"""

from __future__ import annotations

import math

from hdet_kernels.controller.protocol import Observation, Run
from hdet_kernels.controller.settings import SlopeSettings


def annealed_peak(peak: float, run: Run, settings: SlopeSettings) -> float:
    """Return the peak that a schedule which anneals would need in place of one that ends at ``run.end`` of it."""
    return peak * (1 + settings.constant_factor * run.end)


def relative_rate(run: Run, seen: Observation, index: int, settings: SlopeSettings) -> float:
    """Return the learning rate at a sync over the peak that the user gave."""
    return float(seen.base[index]) / annealed_peak(run.peaks[index] or 1.0, run, settings)


def caps_at(run: Run, share: float, settings: SlopeSettings) -> list[float | None]:
    """Return the highest allowed learning rates at ``share`` of the run; empty where the schedule warms up itself."""
    if run.peak >= settings.early_peak:
        return []
    climbed = 0.5 - 0.5 * math.cos(math.pi * min(share / settings.warmup_share, 1.0))
    part = settings.warmup_from + (1 - settings.warmup_from) * climbed
    return [None if peak is None else annealed_peak(peak, run, settings) * part for peak in run.peaks]
