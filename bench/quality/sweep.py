"""Sweeps over learning rates at the cost of one run: a grid, successive halving, and a Bayesian one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from bench.quality.results import Record, Spec
from bench.quality.tasks import Task
from bench.quality.train import train

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


# Factors of the start: eight learning rates, a factor of 4 apart, from 1/256 to 64.
FACTORS = tuple(4.0**k for k in range(-4, 4))
# The first factors of the Bayesian sweep; it chooses the others among half octaves.
FIRST_FACTORS = (1.0, 1 / 16, 16.0)
OCTAVES = np.arange(-8.0, 6.5, 0.5)
# A trial: a plain run with a factor of the start and a number of steps; returns its validation loss.
Trial = Callable[[float, int], float]


def train_sweep(task: Task, spec: Spec, device: torch.device) -> Record:
    """Run the sweep that ``spec.method`` names, and return the record of its last run with all seconds."""
    steps = spec.steps or task.steps
    plain = replace(spec, method="plain")
    tried: list[Record] = []

    def trial(factor: float, count: int) -> float:
        tried.append(train(task, replace(plain, lr=spec.lr * factor, steps=max(count, 2)), device))
        return float(tried[-1]["val"])

    chosen = spec.lr * SWEEPS[spec.method](trial, steps // 2)
    left = steps - sum(record["steps"] for record in tried)
    final = train(task, replace(plain, lr=chosen, steps=left), device)
    seconds = sum(record["seconds"] for record in (*tried, final))
    return {**final, **spec.record(), "chosen": chosen, "seconds": seconds}


def _grid(trial: Trial, steps: int) -> float:
    """Try every factor for the same number of steps."""
    losses = [trial(factor, steps // len(FACTORS)) for factor in FACTORS]
    return FACTORS[int(np.argmin(losses))]


def _halving(trial: Trial, steps: int) -> float:
    """Try every factor, then the better half for twice as long, until two are left. Every round costs the same.

    A round starts anew: a run that is continued has another schedule than a longer one.
    """
    rounds = len(FACTORS).bit_length() - 1
    left = FACTORS
    while len(left) > 1:
        losses = [trial(factor, steps // (rounds * len(left))) for factor in left]
        left = tuple(left[index] for index in np.argsort(losses, kind="stable")[: len(left) // 2])
    return left[0]


def _bayesian(trial: Trial, steps: int) -> float:
    """Try as many factors as the grid has, each where a Gaussian process expects the largest improvement."""
    octaves = [float(np.log2(factor)) for factor in FIRST_FACTORS]
    losses = [trial(factor, steps // len(FACTORS)) for factor in FIRST_FACTORS]
    while len(losses) < len(FACTORS):
        octaves.append(propose(octaves, losses, OCTAVES))
        losses.append(trial(2.0 ** octaves[-1], steps // len(FACTORS)))
    return 2.0 ** octaves[int(np.argmin(losses))]


# Functions that return the best factor of the start, by method.
SWEEPS: dict[str, Callable[[Trial, int], float]] = {
    "sweep": _grid,
    "successive halving": _halving,
    "Bayesian sweep": _bayesian,
}
