"""Recorded runs whose constants are known, for the tests of the fit and of the replay."""

from __future__ import annotations

import math

import numpy as np

from bench.quality.observations import Observed

STEPS, EVERY = 800, 10


def scripted(
    *,
    turning_length: float = 0.5,
    best: float = 0.01,
    noise: float = 0.1,
    edge_cost: float = 0.05,
    breaks_from: float = 8.0,
    too_low: float = 1.0,
    too_high: float = 3.0,
) -> Observed:
    """Return runs at 2⁻⁶ … 2⁶ times the best learning rate, with one seed.

    Args:
        turning_length: Path length at which slopes turn, over the right peak and √steps.
        best: The best learning rate.
        noise: Standard error of slopes over their size.
        edge_cost: Cost of an e-fold larger learning rate over the gain, at all syncs after the turn.
        breaks_from: Factor of the best learning rate from which on half of the gain is lost in the middle of the climb.
        too_low, too_high: Excess in percent for each octave below and above the best.
    """
    lrs = best * 2.0 ** np.arange(-6.0, 7.0)
    octaves = np.log2(lrs / best)
    step = np.arange(EVERY, round(0.3 * STEPS) + 1, EVERY)
    rates = 0.04 + 0.48 * (1 - np.cos(np.pi * step / step[-1]))  # as OneCycleLR climbs
    rate = np.tile(rates[:, None], (1, len(lrs)))
    length = np.cumsum(rates * EVERY)[:, None] * (lrs / best)
    turned = length > turning_length * math.sqrt(STEPS)
    level = np.tile(3.0 - 2.0 * np.linspace(0, 1, len(step))[:, None], (1, len(lrs)))
    half = len(step) // 2
    lost = level.copy()
    lost[half:] = level[half] + 0.5 * (3.0 - level[half])
    level = np.where(lrs >= breaks_from * best * 0.99, lost, level)
    gain = np.maximum(3.0 - np.minimum.accumulate(level), 1e-3)
    slope = np.where(turned, edge_cost, -edge_cost) * gain
    return Observed(
        steps=STEPS,
        lrs=lrs,
        seeds=np.zeros(len(lrs)),
        val=2.0 * (1 + 0.01 * np.where(octaves > 0, too_high, too_low) * np.abs(octaves)),
        step=step.astype(np.float64),
        level=level,
        probe=level,
        slope=slope,
        error=noise * np.abs(slope),
        probe_slope=slope,
        rate=rate,
    )
