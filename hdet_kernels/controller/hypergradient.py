"""Move hyperparameters against slopes of the loss, and the controller whose slopes are hypergradients.

:class:`SlopeController` is the base of this controller and of the regression controller. Its caps are for schedules
without a warm-up: a controller learns from where a rising learning rate turns from too low to too high. A schedule that
starts at its peak never shows that, so its learning rate stays under a cap that climbs as OneCycleLR does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from hdet_kernels.checks import check_kind, check_positive, check_share, keep_plain
from hdet_kernels.controller.protocol import STEP_TOLERANCE, Array, Findings, Observation, Run, State
from hdet_kernels.controller.settings import SlopeSettings, repr_of_changes


def annealed_peak(peak: float, run: Run, settings: SlopeSettings) -> float:
    """Return the peak that a schedule which anneals would need in place of one that ends at ``run.end`` of it."""
    return peak * (1 + settings.constant_factor * run.end)


def relative_rate(run: Run, seen: Observation, index: int, settings: SlopeSettings) -> float:
    """Return the learning rate at a sync over the peak that the user gave."""
    return float(seen.base[index]) / annealed_peak(run.peaks[index] or 1.0, run, settings)


def caps_at(run: Run, share: float, settings: SlopeSettings) -> list[float | None]:
    """Return the highest allowed learning rates at ``share`` of the run; empty where the schedule warms up itself."""
    if run.peak >= settings.early_peak:
        return []
    climbed = 0.5 - 0.5 * math.cos(math.pi * min(share / settings.warmup_share, 1.0))
    part = settings.warmup_from + (1 - settings.warmup_from) * climbed
    return [None if peak is None else annealed_peak(peak, run, settings) * part for peak in run.peaks]


Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class SlopeController:
    """Moves μ_j against the slope b_j of the loss in log η_j; η_j(t) = schedule_j(t)·exp(μ_j).

    m ← β·m + (1−β)·x;  q ← 0.9·q + 0.1·x²;  s ← 0.9·s + 0.1·(b/error)², all bias-corrected;
    μ ← clip(μ − λ·max(1 − 1/s, 0)·clip(m/(√q + 1e-12), −1, 1), −limit, limit).

    x is b/error, at most 4 in size, where the error is known, and b otherwise: slopes are large where the loss falls
    fast, and no more certain for that. max(1 − 1/s, 0) is the noise gate: slopes no larger than their errors move
    nothing. The sync before the first active one updates q and s only. Bounds of a hyperparameter hold for μ too.

    Args:
        beta: β, the momentum of the slope.
        rate: the most that one sync moves μ. Default: λ = 3 over the number of active syncs, at most 0.75, so that the
            controller can travel a factor of e³ ≈ 20 in all.
        start_at: share of the run at which it becomes active. Default for learning rates: 5 %, or the first sync where
            losses are compared.
        stop_at: share of the run after which μ is frozen. Default for learning rates: the peak of the schedule, or 30 %
            if that is later. Near the end of a run a smaller step always looks better (short-horizon bias).
        limit: bound of |μ|.
        settings: the remaining constants.
    """

    __repr__ = repr_of_changes
    beta: float = 0.9
    rate: float | None = None
    start_at: float | None = None
    stop_at: float | None = None
    limit: float = 4.0
    settings: SlopeSettings = field(default_factory=SlopeSettings, kw_only=True)

    _settings_kind: ClassVar[type[SlopeSettings]] = SlopeSettings

    def __post_init__(self) -> None:
        check_kind("settings", self.settings, self._settings_kind, f"a {self._settings_kind.__name__}")
        keep_plain(self, beta=check_share("beta", self.beta, below_one=True))
        if self.start_at is not None:
            keep_plain(self, start_at=check_share("start_at", self.start_at))
        if self.stop_at is not None:
            keep_plain(self, stop_at=check_share("stop_at", self.stop_at))
            if self.stop_at <= self._start_at:
                raise ValueError(f"stop_at={self.stop_at} must be greater than start_at={self._start_at}")
        if self.rate is not None:
            keep_plain(self, rate=check_positive("rate", self.rate))
        keep_plain(self, limit=check_positive("limit", self.limit))

    def prepare(self, run: Run) -> Run:
        """Return ``run`` as it is; raise if its length is not known."""
        if run.total_steps is None:
            raise ValueError(
                f"{type(self).__name__} acts in a part of the run and needs its length: pass total_steps= to the "
                "scheduler, or auto_lr=False"
            )
        return run

    @property
    def _start_at(self) -> float:
        return self.settings.begins if self.start_at is None else self.start_at

    @property
    def lowest(self) -> float:
        """The lowest μ."""
        return -self.limit

    def rate_steps(self, run: Run) -> tuple[float, float]:
        """Return the first and the last step at which learning rates are moved."""
        total = run.total_steps or 0
        until = max(run.peak, self.settings.warmup_share) if self.stop_at is None else self.stop_at
        return self._start_at * total, until * total

    def slope_steps(self, run: Run) -> tuple[float, float]:
        """Return the first and the last step at which hyperparameters follow their slopes."""
        return self.rate_steps(run)

    def active(self, run: Run, step: int) -> bool:
        """Return whether the sync after ``step`` updates the state."""
        first, last = self.rate_steps(run)
        return first - run.sync_every - STEP_TOLERANCE <= step <= last + STEP_TOLERANCE

    def start(self, count: int, run: Run | None = None) -> State:
        """Return the state before the first update, for ``count`` hyperparameters."""
        caps: list[float | None] = []
        if run is not None and run.total_steps is not None and run.syncs(*self.rate_steps(run)) > 0:
            caps = caps_at(run, run.sync_every / run.total_steps, self.settings)
        per_scalar: State = {name: [0.0] * count for name in ("mu", "m", "q", "s")}
        return {**per_scalar, "observations": [0] * count, "updates": [0] * count, "caps": caps}

    def base(self, state: State, index: int, scheduled: Any) -> Any:
        """Return the base value of hyperparameter ``index`` where the schedule says ``scheduled``."""
        cap = state["caps"][index] if index < len(state["caps"]) else None
        if cap is not None:
            scheduled = min(scheduled, cap) if isinstance(scheduled, float) else scheduled.clamp(max=cap)
        return scheduled * math.exp(state["mu"][index])

    def factors(self, state: State) -> list[float]:
        """Return exp(μ) of each hyperparameter; see :class:`.ExplainingController`."""
        return [math.exp(mu) for mu in state["mu"]]

    def findings(self, run: Run, before: State, after: State, seen: Observation, *, returned: bool) -> Findings:
        """Return the slopes of a sync, for its record; see :class:`.ExplainingController`."""
        return replace(Findings.measured(seen), why="by the slopes of the loss")

    def _moved(
        self, run: Run, state: State, signal: Array, significance: Array, explored: Flags, seen: Observation
    ) -> State:
        """Return the state after one step of the equations above.

        Args:
            signal: x of each hyperparameter.
            significance: standard errors that each slope is away from 0.
            explored: which hyperparameters were explored; the others keep their entries.
        """
        weight = self.settings.moment_weight
        names = ("mu", "m", "q", "s", "observations", "updates")
        before = {name: np.asarray(state[name]) for name in names}
        now = {
            "observations": before["observations"] + 1,
            "q": (1 - weight) * before["q"] + weight * signal**2,
            "s": (1 - weight) * before["s"] + weight * significance**2,
        }
        if seen.step >= self.slope_steps(run)[0] - STEP_TOLERANCE:
            now["updates"] = before["updates"] + 1
            now["m"] = self.beta * before["m"] + (1 - self.beta) * signal
            mean = now["m"] / (1 - self.beta ** now["updates"])
            square = now["q"] / bias_correction(now["observations"], weight)
            direction = np.clip(mean / (np.sqrt(square) + 1e-12), -1, 1)
            move = self._rate(run) * noise_gate(now["s"], now["observations"], weight) * direction
            low, high = np.transpose(run.reach or [(-math.inf, math.inf)] * len(signal))
            now["mu"] = np.clip(before["mu"] - move, np.maximum(low, -self.limit), np.minimum(high, self.limit))
        entries = {name: np.where(explored, value, before[name]).tolist() for name, value in now.items()}
        return {**state, **entries, "caps": self._next_caps(run, seen.step)}

    def _next_caps(self, run: Run, step: int) -> list[float | None]:
        """Return the caps of the cycle after ``step``; none after the last sync at which learning rates are moved."""
        following = (step // run.sync_every + 1) * run.sync_every
        if following > self.rate_steps(run)[1] + STEP_TOLERANCE:
            return []
        return caps_at(run, following / (run.total_steps or 1), self.settings)

    def _rate(self, run: Run) -> float:
        if self.rate is not None:
            return self.rate
        syncs = max(run.syncs(*self.slope_steps(run)), 1)
        return min(self.settings.total_travel / syncs, self.settings.largest_move)


def bias_correction(observations: Array, weight: float) -> Array:
    """Return the sum of the weights in a running mean of that many values that began at 0."""
    total: Array = 1 - (1 - weight) ** observations
    return total


def noise_gate(s: Array, observations: Array, weight: float) -> Array:
    """Return by how much slopes count, from 0 to 1: up to a mean of 1 they are noise.

    Args:
        s: running mean of squared significances.
        observations: number of values in that mean.
        weight: weight of the newest value in it.
    """
    gate: Array = 1 - np.minimum(bias_correction(observations, weight) / np.maximum(s, 1e-12), 1)
    return gate


def usable_slopes(slopes: Array, settings: SlopeSettings) -> Array:
    """Return the slopes with 0 for those that are not finite, clipped so that their squares do not overflow."""
    largest = settings.largest_slope
    return np.clip(np.where(np.isfinite(slopes), slopes, 0.0), -largest, largest)


@dataclass(frozen=True)
class HypergradientController(SlopeController):
    """Moves learning rates by b_j = ⟨ḡ, θ̄(kT) − θ̄((k−1)T)⟩ over the parameters of group j.

    ḡ is the mean of the first gradients of the new cycle. It works with a single replica; several need shared
    gradients. It keeps up to two copies of the parameters. The arguments are those of :class:`SlopeController`.
    """

    __repr__ = repr_of_changes
    reads: ClassVar[Literal["slopes"]] = "slopes"

    def prepare(self, run: Run) -> Run:
        """Return ``run`` with the wish for slopes."""
        return replace(super().prepare(run), slopes=True)

    def update(self, run: Run, state: State, seen: Observation) -> State:
        """Return the state after a sync; the first cycle has no displacement before it, so only the caps move."""
        if seen.slopes is None:
            return {**state, "caps": self._next_caps(run, seen.step)}
        slopes = usable_slopes(seen.slopes, self.settings)
        # The error of a hypergradient is not known: every one that is not 0 counts as significant.
        significance = np.where(slopes != 0, self.settings.largest_significance, 0.0)
        return self._moved(run, state, slopes, significance, np.ones(len(slopes), bool), seen)
