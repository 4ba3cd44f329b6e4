"""The posterior over the right peak learning rate, from the signs of slopes while the learning rate climbs.

The learning rate that looks best over the next T steps falls as training goes on: at first a larger one looks better,
later a smaller one. The favoured direction turns where the path length (the sum of the learning rates so far) is about
0.5·√S times the right peak, in runs of S steps. From task to task that is off by a factor of e^1.2, from start to
start of one task by little (``docs/controller.md``). So the sign of a slope is evidence that the right peak is higher
or lower than the one for which this path length would be the turning point. It is weak evidence, and counts only where
the user trusts the given learning rate less than that.

θ is the right peak over the given one. Likelihoods are tabulated as logarithms over a grid of log θ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from hdet_kernels.controller.protocol import Array
from hdet_kernels.controller.settings import RegressionSettings

#: Largest |log θ| of the grid, and its number of points: far beyond what any evidence moves.
GRID_REACH, GRID_POINTS = 6.0, 121


@cache
def grid() -> Array:
    """Return the tabulated values of log θ."""
    points: Array = np.linspace(-GRID_REACH, GRID_REACH, GRID_POINTS)
    return points


@cache
def prior(trust: float | None, settings: RegressionSettings) -> Array | None:
    """Return the prior over the grid; None where the given learning rate is trusted more than slopes could tell.

    It is normal around the given learning rate, its standard deviation log(trust / least_distrust), and flat for no
    trust at all. Both sides have such weights that the chosen quantile of it is log θ = 0.
    """
    if trust is not None and trust <= settings.least_distrust:
        return None
    points = grid()
    deviation = math.inf if trust is None else math.log(trust / settings.least_distrust)
    density = np.exp(-0.5 * (points / deviation) ** 2)
    lower, higher = density * (points < 0), density * (points > 0)
    weights: Array = settings.quantile * lower / lower.sum() + (1 - settings.quantile) * higher / higher.sum()
    return weights


def path_length(before: float, rate: float, step: int, cycle: int) -> float:
    """Return the path length after ``step`` steps, the last ``cycle`` of them with learning rate ``rate``.

    Args:
        before: path length at the sync before.
        rate: learning rate of the last cycle. Earlier steps with a higher one count as made with this one: such steps
            oscillate and do not add up.
        step: steps so far.
        cycle: steps since the sync before.
    """
    return min(before, rate * (step - cycle)) + rate * cycle


def turning_point(length: float, total_steps: int, settings: RegressionSettings) -> float:
    """Return the log θ for which the favoured direction turns at this path length, over the peak of the schedule."""
    return math.log(max(length / (settings.turning_length * math.sqrt(total_steps)), 1e-300))


def evidence(slope: float, significance: float, settings: RegressionSettings) -> float:
    """Return the evidence of a slope, from −1 (a larger value is certainly better) to 1 (a smaller one is)."""
    beyond_noise = 1 - 1 / significance**2 if significance > 1 else 0.0
    return math.copysign((1 - 2 * settings.sign_error) * beyond_noise, slope)


def updated(log_likelihood: Sequence[float], turn: float, found: float) -> list[float]:
    """Return the log-likelihood over the grid after one more observation.

    Args:
        log_likelihood: before it; empty before the first one.
        turn: turning point at this sync, see :func:`turning_point`.
        found: the evidence, see :func:`evidence`.
    """
    points = grid()
    before = np.asarray(log_likelihood) if len(log_likelihood) else np.zeros(len(points))
    after = before + np.log(0.5 + 0.5 * found * np.where(points < turn, 1.0, -1.0))
    return list((after - after.max()).tolist())


def chosen(log_likelihood: Sequence[float], trust: float | None, settings: RegressionSettings) -> float:
    """Return the chosen quantile of the posterior of log θ; 0 without evidence, or where none counts.

    Tasks differ in where they turn: the likelihood is blurred by ``task_deviation`` first.
    """
    weights = _posterior(log_likelihood, trust, settings)
    if weights is None:
        return 0.0
    below = np.cumsum(weights) - 0.5 * weights
    return float(np.interp(settings.quantile * weights.sum(), below, grid()))


def moments(
    log_likelihood: Sequence[float], trust: float | None, settings: RegressionSettings
) -> tuple[float, float] | None:
    """Return mean and standard deviation of the posterior of log θ; None without evidence, or where none counts."""
    weights = _posterior(log_likelihood, trust, settings)
    if weights is None:
        return None
    share, points = weights / weights.sum(), grid()
    mean = float(share @ points)
    return mean, math.sqrt(float(share @ (points - mean) ** 2))


def _posterior(log_likelihood: Sequence[float], trust: float | None, settings: RegressionSettings) -> Array | None:
    """Return the posterior over the grid, not normalised; None without evidence, or where none counts."""
    weights = prior(trust, settings)
    if weights is None or not len(log_likelihood):
        return None
    return weights * (_blur(settings) @ np.exp(np.asarray(log_likelihood)))


@cache
def _blur(settings: RegressionSettings) -> Array:
    """Return, for each grid point, the weights of a normal distribution around it over all grid points."""
    points = grid()
    found: Array = np.exp(-0.5 * ((points[:, None] - points) / settings.task_deviation) ** 2)
    return found / found.sum(axis=1, keepdims=True)
