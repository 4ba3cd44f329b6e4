"""The posterior over the right peak learning rate, from the slopes of the losses while the learning rate climbs.

The learning rate that looks best over the next T steps falls as training goes on. In runs of S steps with cycles of
1.25 % of the run, a larger one looked better until the path length (the sum of the learning rates of all steps, and of
one cycle more) was about 0.18·√S times the right peak, and a smaller one from then on. That held for every schedule and
start that was measured (``docs/controller.md``). So the sign of the slope at a sync is evidence that the right peak is
higher or lower than the one for which this path length would be the turning point.

θ is the right peak over the given one. Likelihoods are tabulated as logarithms over a grid of log θ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from hdet_kernels.controller.protocol import Array
from hdet_kernels.controller.settings import RegressionSettings


@cache
def grid(settings: RegressionSettings) -> Array:
    """Return the tabulated values of log θ."""
    points: Array = np.linspace(-settings.grid_reach, settings.grid_reach, settings.grid_points)
    return points


@cache
def prior(settings: RegressionSettings) -> Array:
    """Return the prior over the grid, made so that the chosen quantile of it is the given learning rate, log θ = 0."""
    points = grid(settings)
    lower = np.exp(points / settings.prior_below) * (points < 0)
    higher = np.exp(-points / settings.prior_above) * (points > 0)
    weights: Array = settings.quantile * lower / lower.sum() + (1 - settings.quantile) * higher / higher.sum()
    return weights


def path_length(before: float | None, rate: float, step: int, cycle: int) -> float:
    """Return the path length after ``step`` steps, the last ``cycle`` of them with learning rate ``rate``.

    Args:
        before: path length at the sync before; None at the first one.
        rate: learning rate of the last cycle. Earlier steps with a higher one count as made with this one: such steps
            oscillate and do not add up.
        step: steps so far.
        cycle: steps since the sync before.
    """
    steps = rate * (step - cycle)
    return (steps if before is None else min(before, steps)) + rate * cycle


def turning_length(cycle: int, total_steps: int, settings: RegressionSettings) -> float:
    """Return the path length, over the right peak, at which a smaller learning rate begins to look better."""
    longer = max(total_steps / settings.long_run, 1.0) ** settings.long_run_exponent
    relative_cycle = cycle / (settings.reference_cycle * total_steps)
    return settings.path_coefficient * math.sqrt(total_steps) * longer * relative_cycle**settings.cycle_exponent


def turning_point(length: float, rate: float, cycle: int, total_steps: int, settings: RegressionSettings) -> float:
    """Return the log θ for which the favoured direction turns at this sync.

    Args:
        length: path length so far, over the peak of the schedule.
        rate: learning rate of the last cycle, over that peak.
        cycle: steps of the last cycle.
        total_steps: steps of the run.
        settings: the controller's constants.
    """
    return math.log(max((length + rate * cycle) / turning_length(cycle, total_steps, settings), 1e-300))


def evidence(slope: float, significance: float, gate: float, settings: RegressionSettings) -> float:
    """Return the evidence of a slope, from −1 (a larger value is certainly better) to 1 (a smaller one is)."""
    certainty = (1 - 2 * settings.sign_error) * gate * math.erf(significance / math.sqrt(2))
    return math.copysign(certainty, slope)


def updated(
    log_likelihood: Sequence[float],
    turn: float,
    found: float,
    cycle: float,
    elasticity: float | None,
    settings: RegressionSettings,
) -> list[float]:
    """Return the log-likelihood over the grid after one more observation.

    Args:
        log_likelihood: before it; empty before the first one.
        turn: turning point at this sync, see :func:`turning_point`.
        found: the evidence, see :func:`evidence`.
        cycle: share of the run that the cycle lasted.
        elasticity: relative gain in what the cycle gained for each e-fold of the learning rate, if it is known. It
            tells how far away the turning point is.
        settings: the controller's constants.
    """
    if elasticity is not None and elasticity > settings.uninformative_elasticity:
        return list(log_likelihood)
    points = grid(settings)
    before = np.asarray(log_likelihood) if len(log_likelihood) else np.zeros(len(points))
    if elasticity is None:
        too_high = 1 / (1 + np.exp(np.clip((points - turn) / settings.sign_scale, -50, 50)))
        likelihood = 0.5 + found * (too_high - 0.5)
    else:
        likelihood = 0.5 * (1 - abs(found)) + abs(found) * _elasticity_likelihood(turn, elasticity, settings)
    after = before + min(cycle / settings.reference_cycle, 1.0) * np.log(likelihood)
    return list((after - after.max()).tolist())


def shifted(log_likelihood: Sequence[float], by: float, settings: RegressionSettings) -> list[float]:
    """Return the log-likelihood moved by so much of log θ: every observation so far came that much too early."""
    points = grid(settings)
    return list(np.interp(points - by, points, log_likelihood).tolist()) if len(log_likelihood) else []


def _elasticity_likelihood(turn: float, elasticity: float, settings: RegressionSettings) -> Array:
    """Return the likelihood of an elasticity over the grid, relative to its maximum."""
    points = grid(settings)
    if elasticity >= settings.far_elasticity:
        off = np.minimum(points - turn - settings.far_distance, 0.0)
    elif elasticity <= settings.past_elasticity:
        off = np.maximum(points - turn - settings.distance_behind * settings.past_elasticity, 0.0)
    else:
        distance = settings.distance_ahead if elasticity > 0 else settings.distance_behind
        off = points - turn - distance * elasticity
    found: Array = np.exp(-0.5 * (np.clip(off, -50, 50) / settings.distance_deviation) ** 2)
    return found


def chosen(log_likelihood: Sequence[float], settings: RegressionSettings) -> float:
    """Return the chosen quantile of the posterior of log θ; 0 before the first observation.

    Tasks differ in where they turn: the likelihood is blurred by ``task_deviation`` first.
    """
    if not len(log_likelihood):
        return 0.0
    weights = prior(settings) * (_blur(settings) @ np.exp(np.asarray(log_likelihood)))
    below = np.cumsum(weights) - 0.5 * weights
    return float(np.interp(settings.quantile * weights.sum(), below, grid(settings)))


@cache
def _blur(settings: RegressionSettings) -> Array:
    """Return, for each grid point, the weights of a normal distribution around it over all grid points."""
    points = grid(settings)
    found: Array = np.exp(-0.5 * ((points[:, None] - points) / settings.task_deviation) ** 2)
    return found / found.sum(axis=1, keepdims=True)
