"""Scripted runs: slopes and losses whose best learning rate is known, without a model.

The slope of learning rate j is L'(z_j). z_j is the logarithm of its path length over its turning length, so the best
peak is 1: a start of 30 is 30 times too high. L(z) is z²/2 above 0 and z²/6 below it, linear below −3. With shared
gradients slopes are measured, with local ones replica r's loss is Σ_j L(z_j + log ρ_r). The level falls by 1 in every
cycle, less in each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hdet_kernels import RegressionController, multipliers, permutation
from hdet_kernels.controller.protocol import Observation, Run, State
from hdet_kernels.controller.settings import RegressionSettings
from hdet_kernels.fanout.multipliers import pairs
from tests.controller.cases import SETTINGS

Array = NDArray[np.float64]
Schedule = Callable[[float], float]
Change = Callable[[Observation, int], Observation]

TOTAL, T, N = 2000, 25, 8
REGRESSION = RegressionController()
NEVER = 2 * SETTINGS.largest_significance
#: Slopes of these runs are certain, also where a good learning rate's have just turned: the first ones are not judged.
PATIENT = RegressionSettings(turned_mean=NEVER, doubt_mean=NEVER)
DISTRUSTING = RegressionController(trust=None, settings=PATIENT)

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


def fan(count: int, cycle: int, seed: int = 0, n: int = N) -> Array:
    orders = [permutation(n, seed=seed, cycle=cycle, hyperparameter=f"lr/{j}") for j in range(count)]
    return np.stack([multipliers(n, 0.3)[order] for order in orders])


class Aside(NamedTuple):
    """What a trial is compared with."""

    run: Run
    state: State
    length: Array
    step: int
    share: float


@dataclasses.dataclass
class Scripted:
    """A run whose learning rates start at ``starts`` times the best ones."""

    starts: list[float]
    shape: str = "onecycle"
    noise: float = 0.001  # standard deviation of losses and slopes, over the gain of a cycle
    steepness: float = 1.0  # of the slopes
    sync_every: int = T
    seed: int = 0
    controller: RegressionController = REGRESSION
    probed: bool = True
    gradients: Literal["shared", "local"] = "shared"

    def __post_init__(self) -> None:
        self.schedule, peak, end = SHAPES[self.shape]
        nowhere = (None,) * len(self.starts)
        run = Run(TOTAL, self.sync_every, peak, nowhere, tuple(self.starts), end, self.probed, self.gradients)
        self.run = self.controller.prepare(run)
        self.random = np.random.default_rng(self.seed)
        self.state: State = self.controller.start(len(self.starts), self.run)
        self.length = np.zeros(len(self.starts))
        self.origin, self.anchor = 0, (0, 0.0)  # the steps made before the present run; a step, and its share
        self.returns, self.backs = list[int](), list[int]()  # the steps of all returns, and where trials were no better
        self.aside: Aside | None = None

    @property
    def left(self) -> int:
        """The steps of the present run."""
        assert self.run.total_steps is not None
        return self.run.total_steps

    def share(self, step: float) -> float:
        """Return the share of the schedule at a step of the present run."""
        at, share = self.anchor
        return share + (step - at) * (1 - share) / (self.left - at)

    def base(self, step: float) -> Array:
        scheduled = self.schedule(self.share(step))
        return np.array([self.controller.base(self.state, j, s * scheduled) for j, s in enumerate(self.starts)])

    def past(self, base: Array, step: int) -> Array:
        """Return the logarithm of each path length over its turning length, for the cycle that ends with ``step``."""
        cycle = self.run.steps_since_sync(step)
        self.length = np.minimum(self.length, base * (step - cycle)) + base * cycle
        turn = SETTINGS.turning_length * math.sqrt(self.left) * (1 + SETTINGS.constant_factor * self.run.end)
        found: Array = np.log(self.length / turn)
        return found

    def observe(self, step: int) -> Observation:
        # The scheduler reports the values of the cycle's last step.
        base, count, syncs = self.base(step - 1), len(self.starts), self.run.syncs_before(step - 1)
        rho = fan(count, step // self.sync_every, self.seed)
        if self.run.in_pairs:
            rho = pairs(N, [(0.3, "linear")] * count, seed=self.seed, sync=syncs)
        past, scale = self.past(base, step), SLOWER**syncs
        losses = -(1 - scale) / (1 - SLOWER) + scale * self.random.normal(0, self.noise, N)
        slopes = errors = None
        if self.run.slopes and syncs >= 2:
            slopes = scale * (self.steepness * slope_of(past) + self.random.normal(0, self.noise, count))
            errors = np.full(count, scale * self.noise)
        elif not self.run.slopes:
            losses = losses + scale * self.steepness * bowl(past[:, None] + np.log(rho)).sum(axis=0)
        return Observation(losses, rho, base, step, slopes, errors)

    def sync(self, made: int, change: Change = lambda seen, made: seen) -> None:
        """Let the controller act on the sync after ``made`` steps, as the scheduler does, if it acts there."""
        if not self.controller.active(self.run, made - self.origin):
            return
        seen = change(self.observe(made - self.origin), made)
        before, can_return = (self.run, self.state, seen), len(self.returns) < self.controller.undo
        if can_return and self.controller.broke(*before):
            self.begin_anew(self.controller.begun_anew(*before), seen, made)
            self.aside = None
        elif self.aside is not None and self.controller.worse(*before):
            aside, self.aside = self.aside, None
            self.run, self.state, self.length = self.controller.prepare(aside.run.rest(seen.step)), *aside[1:3]
            self.origin, self.anchor = made - aside.step, (aside.step, aside.share)
            self.backs.append(made)
        else:
            self.state = self.controller.update(*before)
            self.aside = self.aside if self.state["trial"] else None
            if can_return and self.controller.doubts(*before):
                self.aside = Aside(self.run, self.state, self.length, seen.step, self.share(seen.step))
                self.begin_anew(self.controller.tried(*before), seen, made)

    def begin_anew(self, state: State, seen: Observation, made: int) -> None:
        self.state, self.run = state, self.controller.prepare(self.run.rest(seen.step))
        self.length, self.origin, self.anchor = np.zeros(len(self.starts)), made, (0, 0.0)
        self.returns.append(made)

    @property
    def syncs(self) -> range:
        """The steps after which there is a sync."""
        return range(self.sync_every, TOTAL + 1, self.sync_every)

    def finish(self, change: Change = lambda seen, made: seen) -> Scripted:
        """Make all syncs; ``change`` changes what is observed after so many steps."""
        for made in self.syncs:
            self.sync(made, change)
        return self

    @property
    def mu(self) -> list[float]:
        return list(self.state["mu"])

    @property
    def over_best(self) -> Array:
        """The final peaks over the best ones."""
        return np.array(self.starts) * np.exp(self.mu)


def bowl(z: Array) -> Array:
    below = np.maximum(-z, 0.0)
    found: Array = np.maximum(z, 0.0) ** 2 / 2 + np.where(below < 3, below**2 / 6, below - 1.5)
    return found


def slope_of(z: Array) -> Array:
    found: Array = np.where(z > 0, z, np.maximum(z, -3.0) / 3)
    return found
