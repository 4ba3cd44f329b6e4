"""Bayesian optimisation of one number: a Gaussian process over what was tried, and the expected improvement."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Lengths over which losses are alike, in the unit of the number; the likeliest one is taken.
LENGTHS = (1.0, 2.0, 4.0, 8.0)

# Variance of the noise of a loss, relative to the variance of the losses.
NOISE = 0.01


def propose(tried: Sequence[float], losses: Sequence[float], candidates: Floats) -> float:
    """Return the candidate with the largest expected improvement over the lowest loss.

    Args:
        tried: The numbers so far, at least two.
        losses: Their losses; those that are not finite count as the worst.
        candidates: Numbers to choose from; those tried already are left out.

    Returns:
        One of the candidates.
    """
    points, values = np.array(tried), _scaled(np.array(losses))
    fresh = candidates[~np.isclose(candidates[:, None], points).any(1)]
    length = max(LENGTHS, key=lambda length: _log_likelihood(points, values, length))
    mean, deviation = _posterior(points, values, fresh, length)
    return float(fresh[np.argmax(_expected_improvement(mean, deviation, values.min()))])


def _scaled(losses: Floats) -> Floats:
    """Return losses with mean 0 and deviation 1. High ones are cut, so that divergence does not hide the valley."""
    finite = losses[np.isfinite(losses)]
    if not len(finite):
        return np.zeros_like(losses)
    best, middle = finite.min(), np.median(np.where(np.isfinite(losses), losses, finite.max()))
    cut = np.minimum(np.where(np.isfinite(losses), losses, np.inf), middle + (middle - best))
    spread = cut.std()
    return (cut - cut.mean()) / spread if spread > 0 else np.zeros_like(losses)


def _covariance(first: Floats, second: Floats, length: float) -> Floats:
    """Return the Matérn covariance of smoothness 5/2."""
    distance = math.sqrt(5) * np.abs(first[:, None] - second) / length
    covariance: Floats = (1 + distance + distance**2 / 3) * np.exp(-distance)
    return covariance


def _log_likelihood(points: Floats, values: Floats, length: float) -> float:
    root = np.linalg.cholesky(_covariance(points, points, length) + NOISE * np.eye(len(points)))
    return float(-0.5 * (np.linalg.solve(root, values) ** 2).sum() - np.log(np.diag(root)).sum())


def _posterior(points: Floats, values: Floats, at: Floats, length: float) -> tuple[Floats, Floats]:
    """Return mean and standard deviation of the process at other points."""
    root = np.linalg.cholesky(_covariance(points, points, length) + NOISE * np.eye(len(points)))
    across = np.linalg.solve(root, _covariance(points, at, length))
    mean = across.T @ np.linalg.solve(root, values)
    return mean, np.sqrt(np.maximum(1 - (across**2).sum(0), 1e-12))


def _expected_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    below = (best - mean) / deviation
    share = np.array([0.5 * (1 + math.erf(z / math.sqrt(2))) for z in below])
    density = np.exp(-0.5 * below**2) / math.sqrt(2 * math.pi)
    improvement: Floats = deviation * (below * share + density)
    return improvement
