"""Scripted runs: losses whose best learning rate is known, without a model.

Replica r's loss is Σ_j L(z_j + log ρ_r). z_j is the logarithm of the path length of learning rate j over its turning
length, so the best peak is 1: a start of 30 is 30 times too high. L(z) is z²/2 above 0 and z²/6 below it, linear below
−3. All losses fall by 1 in every cycle, so −L' is the elasticity of a cycle's gain. With a probe losses are exact,
without one they have noise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hdet_kernels import RegressionController, multipliers, permutation
from hdet_kernels.controller.peak_posterior import turning_length
from hdet_kernels.controller.protocol import Observation, Run, State
from hdet_kernels.fanout.multipliers import pairs
from tests.controller.cases import SETTINGS

Array = NDArray[np.float64]
Schedule = Callable[[float], float]

TOTAL, T, N = 2000, 25, 8
REGRESSION = RegressionController()

#: Gain of a cycle over that of the cycle before: training slows down, and losses differ less.
SLOWER = 0.93


def one_cycle(share: float) -> float:
    """Return OneCycleLR's learning rate over its peak, at a share of the run."""
    if share < 0.3:
        return 1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * share / 0.3)) / 2
    return (1 + math.cos(math.pi * (share - 0.3) / 0.7)) / 2


#: The schedule over its peak, the share of the run at which it peaks, and its end over its peak.
SHAPES: dict[str, tuple[Schedule, float, float]] = {
    "onecycle": (one_cycle, 0.3, 0.0),
    "cosine": (lambda share: (1 + math.cos(math.pi * share)) / 2, 0.0, 0.0),
    "constant": (lambda share: 1.0, 0.0, 1.0),
    "half": (lambda share: 1 - share / 2, 0.0, 0.5),
}

STARTS = {"30x low": 1 / 30, "10x low": 1 / 10, "3x low": 1 / 3, "best": 1.0, "3x high": 3.0, "10x high": 10.0,
          "30x high": 30.0}  # fmt: skip


def fan(count: int, cycle: int, seed: int = 0, n: int = N) -> Array:
    orders = [permutation(n, seed=seed, cycle=cycle, hyperparameter=f"lr/{j}") for j in range(count)]
    return np.stack([multipliers(n, 0.3)[order] for order in orders])


@dataclasses.dataclass
class Scripted:
    """A run whose learning rates start at ``starts`` times the best ones."""

    starts: list[float]
    shape: str = "onecycle"
    noise: float | None = None  # default: 0.01 without a probe, none with one
    sync_every: int = T
    seed: int = 0
    controller: RegressionController = REGRESSION
    off: float = 1.0  # turning length of the task over that of the controller's settings
    probed: bool = True

    def __post_init__(self) -> None:
        self.schedule, peak, end = SHAPES[self.shape]
        self.error = (0.0 if self.probed else 0.01) if self.noise is None else self.noise
        nowhere = (None,) * len(self.starts)
        self.run = Run(TOTAL, self.sync_every, peak, nowhere, tuple(self.starts), end, self.probed)
        self.run = self.controller.prepare(self.run)
        self.random = np.random.default_rng(self.seed)
        self.state: State = self.controller.start(len(self.starts), self.run)
        self.length = np.zeros(len(self.starts))

    def base(self, step: float) -> Array:
        scheduled = self.schedule(step / TOTAL)
        return np.array([self.controller.base(self.state, j, s * scheduled) for j, s in enumerate(self.starts)])

    def past(self, base: Array, step: int) -> Array:
        """Return the logarithm of each path length over its turning length, for the cycle that ends with ``step``."""
        cycle = self.run.steps_since_sync(step)
        self.length = np.minimum(self.length, base * (step - cycle)) + base * cycle
        turn = self.off * turning_length(cycle, TOTAL, SETTINGS) * (1 + SETTINGS.constant_factor * self.run.end)
        found: Array = np.log((self.length + base * cycle) / turn)
        return found

    def losses(self, past: Array) -> Array:
        """Return the losses [N] of replicas whose distances past the turning point are [J, N]."""
        found: Array = bowl(past).sum(axis=0) + self.random.normal(0, self.error, past.shape[1])
        return found

    def sync(self, step: int, change: Callable[[Array, Array], Array] = lambda losses, rho: losses) -> None:
        # The scheduler reports the values of the cycle's last step.
        base, count, syncs = self.base(step - 1), len(self.starts), self.run.syncs_before(step - 1)
        rho = fan(count, step // self.sync_every, self.seed)
        if self.run.in_pairs:
            rho = pairs(N, [(0.3, "linear")] * count, seed=self.seed, sync=syncs)
        losses = self.losses(self.past(base, step)[:, None] + np.log(rho))
        losses = change(later(losses, syncs), rho)
        self.state = self.controller.update(self.run, self.state, Observation(losses, rho, base, step))

    @property
    def syncs(self) -> list[int]:
        steps = [*self.run.early, *range(self.sync_every, TOTAL + 1, self.sync_every)]
        return [step for step in steps if self.controller.active(self.run, step)]

    def finish(self) -> Scripted:
        for step in self.syncs:
            self.sync(step)
        return self

    @property
    def mu(self) -> list[float]:
        return list(self.state["mu"])

    @property
    def over_best(self) -> Array:
        """The final peaks over the best ones."""
        return np.array(self.starts) * np.exp(self.mu)


def later(losses: Array, syncs: int) -> Array:
    """Return the losses as they are after so many syncs: lower, and closer to each other."""
    return SLOWER**syncs * losses - (1 - SLOWER**syncs) / (1 - SLOWER)


class Steep(Scripted):
    """A run whose slopes grow with e^z past the turning point."""

    def losses(self, past: Array) -> Array:
        found: Array = np.where(past > 0, np.expm1(past) - past, bowl(past)).sum(axis=0)
        return found + self.random.normal(0, self.error, past.shape[1])


def bowl(z: Array) -> Array:
    below = np.maximum(-z, 0.0)
    found: Array = np.maximum(z, 0.0) ** 2 / 2 + np.where(below < 3, below**2 / 6, below - 1.5)
    return found
