"""Sweep learning rates at the cost of one run: half of the steps for short plain runs, the rest with the best of them.

The three sweeps differ in the short runs. All of them look within a factor of 256 below and 64 above the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from .bayesian import propose
from .spec import Record, Spec
from .tasks import Task
from .train import train

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
