"""Controllers that move against the slopes of the loss in the logarithms of the hyperparameters, and ride on the
schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from hdet_kernels.checks import check_positive, check_share
from hdet_kernels.controller.protocol import EDGE, Array, Observation, Run, State
from hdet_kernels.controller.warmup import CLIMBS_FOR, ceilings_at

Flags = NDArray[np.bool_]

#: What one sync moves μ by, at most.
LARGEST_MOVE = 0.75

#: How many errors a slope counts as being from 0 at most where scalars follow it, and that of the hypergradient always,
#: where nothing tells.
TRUSTED = 4.0

#: Slopes count up to here: their squares must not overflow.
HUGE = 1e150


@dataclass(frozen=True)
class SlopeController:
    """Moves μ_j against the slope b_j of the loss in log η_j; η_j(t) = schedule_j(t)·exp(μ_j).

    m ← β·m + (1−β)·x;  q ← 0.9·q + 0.1·x²;  s ← 0.9·s + 0.1·(b/error)², all bias-corrected;
    μ ← clip(μ − λ·max(1 − 1/s, 0)·clip(m/(√q + 1e-12), −1, 1), −limit, limit).

    x is b, or where its error is known b/error, no larger than 4: slopes are large where the loss falls fast, which
    makes them no surer. max(1 − 1/s, 0) is the noise gate: slopes that are no larger than their errors move nothing.
    Syncs before the first one at which it acts count for q and s alone. Bounds hold for μ, too.

    Args:
        beta: β, the momentum of the slope.
        rate: the most that one sync moves μ. Default: λ = 3 over the number of active syncs, at most 0.75, so that the
            controller can travel a factor of e³ ≈ 20 in all.
        start_at: share of the run at which it becomes active. Default for learning rates: 5 %, or the first sync where
            losses are compared.
        stop_at: share of the run after which μ is frozen. Default for learning rates: the peak of the schedule, or 30 %
            if that is later. Near the end of a run a smaller step always looks better at once (short-horizon bias).
        limit: bound of |μ|.
    """

    begins: ClassVar[float] = 0.05  #: the default of start_at, for learning rates

    beta: float = 0.9
    rate: float | None = None
    start_at: float | None = None
    stop_at: float | None = None
    limit: float = 4.0

    def __post_init__(self) -> None:
        check_share("beta", self.beta, below_one=True)
        if self.start_at is not None:
            check_share("start_at", self.start_at)
        if self.stop_at is not None:
            check_share("stop_at", self.stop_at)
            if self.stop_at <= self._start_at:
                raise ValueError(f"stop_at={self.stop_at} must be greater than start_at={self._start_at}")
        if self.rate is not None:
            check_positive("rate", self.rate)
        check_positive("limit", self.limit)

    def check(self, run: Run) -> None:
        if run.total_steps is None:
            raise ValueError(
                f"{type(self).__name__} acts in a part of the run and needs its length: pass total_steps= to the "
                "scheduler, or auto_lr=False"
            )

    @property
    def _start_at(self) -> float:
        return self.begins if self.start_at is None else self.start_at

    def rates_window(self, run: Run) -> tuple[float, float]:
        """First and last step at which it may move learning rates."""
        total = run.total_steps or 0
        return self._start_at * total, (max(run.peak, CLIMBS_FOR) if self.stop_at is None else self.stop_at) * total

    def window(self, run: Run) -> tuple[float, float]:
        """The same of all that follows slopes."""
        return self.rates_window(run)

    def active(self, run: Run, step: int) -> bool:
        first, last = self.rates_window(run)
        return first - run.sync_every - EDGE <= step <= last + EDGE

    def start(self, count: int, run: Run | None = None) -> State:
        ceilings: list[float | None] = []
        if run is not None and run.total_steps is not None and run.syncs(*self.rates_window(run)) > 0:
            ceilings = ceilings_at(run, run.sync_every / run.total_steps)
        per_scalar: State = {name: [0.0] * count for name in ("mu", "m", "q", "s")}
        return {**per_scalar, "looks": [0] * count, "updates": [0] * count, "ceilings": ceilings}

    def base(self, state: State, index: int, scheduled: Any) -> Any:
        ceiling = state["ceilings"][index] if index < len(state["ceilings"]) else None
        if ceiling is not None:
            scheduled = min(scheduled, ceiling) if isinstance(scheduled, float) else scheduled.clamp(max=ceiling)
        return scheduled * math.exp(state["mu"][index])

    def _moved(self, run: Run, state: State, said: Array, sure: Array, explored: Flags, seen: Observation) -> State:
        """By what is ``said`` of each hyperparameter: x above. ``sure``: how many errors each slope is from 0. What was
        not ``explored`` stays."""
        was = {name: np.asarray(state[name]) for name in ("mu", "m", "q", "s", "looks", "updates")}
        now = {
            "looks": was["looks"] + 1,
            "q": 0.9 * was["q"] + 0.1 * said**2,
            "s": 0.9 * was["s"] + 0.1 * sure**2,
        }
        if seen.step >= self.window(run)[0] - EDGE:
            now["updates"] = was["updates"] + 1
            now["m"] = self.beta * was["m"] + (1 - self.beta) * said
            mean, square = now["m"] / (1 - self.beta ** now["updates"]), now["q"] / _fresh(now["looks"])
            direction = np.clip(mean / (np.sqrt(square) + 1e-12), -1, 1)
            move = self._rate(run) * noise_gate(now["s"], now["looks"]) * direction
            low, high = np.transpose(run.reach or [(-math.inf, math.inf)] * len(said))
            now["mu"] = np.clip(was["mu"] - move, np.maximum(low, -self.limit), np.minimum(high, self.limit))
        known = {name: np.where(explored, value, was[name]).tolist() for name, value in now.items()}
        return {**state, **known, "ceilings": self._next_ceilings(run, seen.step)}

    def _next_ceilings(self, run: Run, step: int) -> list[float | None]:
        """Those of the cycle after ``step``; none after the last sync at which learning rates are moved."""
        then = (step // run.sync_every + 1) * run.sync_every
        return ceilings_at(run, then / (run.total_steps or 1)) if then <= self.rates_window(run)[1] + EDGE else []

    def _rate(self, run: Run) -> float:
        if self.rate is not None:
            return self.rate
        return min(3 / max(run.syncs(*self.window(run)), 1), LARGEST_MOVE)


@dataclass(frozen=True)
class HypergradientController(SlopeController):
    """Moves learning rates by b_j = ⟨ḡ, θ̄(kT) − θ̄((k−1)T)⟩ over the parameters of group j: the next gradient times the
    last cycle's displacement. Needs no spread and works with a single replica; with several it needs shared gradients.
    It keeps up to two copies of the parameters."""

    reads: ClassVar[Literal["slopes"]] = "slopes"

    def update(self, run: Run, state: State, seen: Observation) -> State:
        if seen.slopes is None:  # the first cycle has none before it
            return {**state, "ceilings": self._next_ceilings(run, seen.step)}
        slopes = countable(seen.slopes)
        return self._moved(run, state, slopes, np.where(slopes != 0, TRUSTED, 0.0), np.ones(len(slopes), bool), seen)


def _fresh(looks: Array) -> Array:
    """What running means of so many numbers are short of, having begun at 0."""
    found: Array = 1 - 0.9**looks
    return found


def noise_gate(s: Array, looks: Array, demand: float = 1.0) -> Array:
    """How much slopes count that were looked at so often, with s the running mean of their squared significances, which
    has to be above ``demand``."""
    gate: Array = 1 - np.minimum(demand * _fresh(looks) / np.maximum(s, 1e-12), 1)
    return gate


def countable(slopes: Array) -> Array:
    """An overflowed gradient says nothing, and no square may overflow."""
    return np.clip(np.where(np.isfinite(slopes), slopes, 0.0), -HUGE, HUGE)
