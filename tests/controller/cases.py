"""Observations and equations that the tests of the controllers share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import settings
from numpy.typing import NDArray

from hdet_kernels import HypergradientController, RegressionController, multipliers, permutation
from hdet_kernels.controller.protocol import Observation, Run
from hdet_kernels.controller.settings import RegressionSettings

NAN, INF = math.nan, math.inf
PROPERTY = settings(deadline=None, max_examples=80)
SETTINGS = RegressionSettings()
RUN = Run(total_steps=1000, sync_every=25, peak=0.3, floors=(1e-6,), others=True)
WITH_SLOPES = [RegressionController, HypergradientController]


def fan(n: int, count: int, cycle: int = 0, spread: float = 0.3) -> NDArray[np.float64]:
    """Return the multipliers [count, n] of a cycle, as the scheduler makes them."""
    orders = [permutation(n, seed=0, cycle=cycle, hyperparameter=f"lr/{j}") for j in range(count)]
    return np.stack([multipliers(n, spread)[order] for order in orders])


def observe(losses: Any, rho: Any, base: Any = None, slopes: Any = None, step: int = 300) -> Observation:
    """Return an observation of losses [N] and multipliers [J, N]; the base values are 1 unless they are given."""
    rho = np.asarray(rho, dtype=np.float64)
    base = np.ones(len(rho)) if base is None else np.asarray(base, dtype=np.float64)
    slopes = None if slopes is None else np.asarray(slopes, dtype=np.float64)
    return Observation(np.asarray(losses, dtype=np.float64), rho, base, step, slopes)


def slopes_seen(slopes: list[float]) -> Observation:
    """Return an observation of a single replica with these hypergradient slopes."""
    return observe([0.0], [[1.0]] * len(slopes), slopes=slopes)


def losses_with_slopes(slopes: list[float], cycle: int) -> Observation:
    """Return losses of eight replicas that have exactly these slopes."""
    rho = fan(8, len(slopes), cycle)
    return observe(4 + np.array(slopes) @ np.log(rho), rho)


#: For each controller, the observation from which it finds given slopes.
OBSERVERS: dict[Any, Callable[[list[float], int], Observation]] = {
    RegressionController: losses_with_slopes,
    HypergradientController: lambda slopes, cycle: slopes_seen(slopes),
}


def significance(kind: Any, count: int) -> float:
    """Return the significance of slopes without residuals of eight replicas, or the hypergradient's fixed one."""
    freedom = 7 - count
    exact = math.sqrt(2 * freedom) * (1 - 0.25 / freedom)
    return exact if kind is RegressionController else SETTINGS.largest_significance


def gate(kind: Any, count: int) -> float:
    """Return the noise gate at that significance."""
    return 1 - 1 / significance(kind, count) ** 2


def signals(kind: Any, slopes: list[float]) -> list[float]:
    """Return x of the μ update: signed significances where errors are known, else the slopes themselves."""
    if kind is RegressionController:
        return [math.copysign(significance(kind, len(slopes)), b) for b in slopes]
    return slopes
