"""Controllers: from the losses and values of all replicas to new base values.

A controller is a frozen set of constants and a few pure functions of numbers. Its state is a dict of plain lists that
the scheduler keeps and saves. At every sync in its active window ``update`` returns the next state from an
:class:`Observation`; ``base`` turns the state and the scheduled value into the base value η_j that is fanned out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from . import belief
from .regression import TRUSTED, regress, significances

Array = NDArray[np.float64]
State = dict[str, Any]

#: Shares of a run become steps by a product that may be off by a rounding: 0.29·100 is a little less than 29.
EDGE = 1e-6

#: What one sync moves μ by, at most.
LARGEST_MOVE = 0.75

#: How OneCycleLR climbs: from this share of its peak to all of it, in this share of the run.
CLIMBS_FROM, CLIMBS_FOR = 1 / 25, 0.3

#: The best constant learning rate was a quarter of the best peak of a schedule that anneals: 1 + this.
STAYING = 3.0

#: Slopes count up to here: their squares must not overflow.
HUGE = 1e150


@dataclass(frozen=True)
class Run:
    """What a controller knows of the run: its length and sync interval in steps, the share of it at which the schedule
    peaks, for each hyperparameter the value that the schedule ends at (None where that is not known) and the highest
    that it has (None where there is none to move: weight decay, dropout, …), and the share of its peak at which the
    schedule ends: 0 where it anneals, 1 where it is constant."""

    total_steps: int | None
    sync_every: int
    peak: float
    floors: tuple[float | None, ...]
    peaks: tuple[float | None, ...] = ()
    end: float = 0.0

    def syncs(self, first: float, last: float) -> int:
        """How many syncs (multiples of ``sync_every``) fall on steps ``first`` to ``last``, both included."""
        first_sync = max(math.ceil((first - EDGE) / self.sync_every), 1)
        return max(math.floor((last + EDGE) / self.sync_every) - first_sync + 1, 0)


@dataclass(frozen=True)
class Observation:
    """One sync, before averaging. N replicas, J hyperparameters.

    losses: [N], the replicas' losses (on the probe, or the mean training loss of the window); not finite where bad.
    multipliers: [J, N], value over base of each replica in the cycle that ends here.
    base: [J], the base values η_j at this step.
    step: the step that the sync follows.
    slopes: [J], ⟨gradient, last cycle's displacement⟩, for the hypergradient controller alone.
    """

    losses: Array
    multipliers: Array
    base: Array
    step: int
    slopes: Array | None = None


@runtime_checkable
class Controller(Protocol):
    @property
    def reads(self) -> Literal["losses", "slopes"]:
        """What it is told at a sync: the replicas' losses, or the slopes of the hypergradient."""

    def check(self, run: Run) -> None:
        """Raise if the controller cannot work in this run."""

    def active(self, run: Run, step: int) -> bool:
        """Whether the sync at ``step`` updates the state."""

    def start(self, count: int, run: Run | None = None) -> State:
        """The state before the first update, for ``count`` hyperparameters."""

    def update(self, run: Run, state: State, seen: Observation) -> State:
        """The state after a sync."""

    def base(self, state: State, index: int, scheduled: Any) -> Any:
        """The base value of hyperparameter ``index`` where the schedule says ``scheduled``."""


@dataclass(frozen=True)
class _SlopeController:
    """Moves μ_j against the slope b_j of the loss in log η_j; η_j(t) = schedule_j(t)·exp(μ_j).

    m ← β·m + (1−β)·b;  q ← 0.9·q + 0.1·b²;  s ← 0.9·s + 0.1·(b/error)², all bias-corrected;
    μ ← clip(μ − λ·max(1 − 1/s, 0)·clip(m/(√q + 1e-12), −1, 1), −limit, limit).

    max(1 − 1/s, 0) is the noise gate: slopes that are no larger than their errors move nothing. Syncs before the first
    one at which it acts count for q and s alone.

    Args:
        beta: β, the momentum of the slope.
        rate: the most that one sync moves μ. Default: λ = 3 over the number of active syncs, at most 0.75, so that the
            controller can travel a factor of e³ ≈ 20 in all.
        start_at: share of the run at which it becomes active. Default: 5 %.
        stop_at: share of the run after which μ is frozen. Default: the peak of the schedule, or 30 % if that is later.
            Near the end of a run a smaller step always looks better at once (short-horizon bias).
        limit: bound of |μ|.
    """

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
        return 0.05 if self.start_at is None else self.start_at

    def window(self, run: Run) -> tuple[float, float]:
        """First and last step at which it may act."""
        total = run.total_steps or 0
        return self._start_at * total, (max(run.peak, CLIMBS_FOR) if self.stop_at is None else self.stop_at) * total

    def rates_window(self, run: Run) -> tuple[float, float]:
        """The same for learning rates."""
        return self.window(run)

    def active(self, run: Run, step: int) -> bool:
        first, last = self.rates_window(run)
        return first - run.sync_every - EDGE <= step <= last + EDGE

    def start(self, count: int, run: Run | None = None) -> State:
        ceilings: list[float | None] = []
        if run is not None and run.total_steps is not None and run.syncs(*self.rates_window(run)) > 0:
            ceilings = _ceilings(run, run.sync_every / run.total_steps)
        per_scalar = {name: [0.0] * count for name in ("mu", "m", "q", "s")}
        return {**per_scalar, "looks": 0, "updates": 0, "ceilings": ceilings}

    def base(self, state: State, index: int, scheduled: Any) -> Any:
        ceiling = state["ceilings"][index] if index < len(state["ceilings"]) else None
        if ceiling is not None:
            scheduled = min(scheduled, ceiling) if isinstance(scheduled, float) else scheduled.clamp(max=ceiling)
        return scheduled * math.exp(state["mu"][index])

    def _moved(self, run: Run, state: State, slopes: Array, sure: Array, seen: Observation) -> State:
        """``sure``: how many errors each slope is from 0."""
        looks = state["looks"] + 1
        fresh = 1 - 0.9**looks
        q = 0.9 * np.asarray(state["q"]) + 0.1 * slopes**2
        s = 0.9 * np.asarray(state["s"]) + 0.1 * sure**2
        known = {"q": q.tolist(), "s": s.tolist(), "looks": looks, "ceilings": self._next_ceilings(run, seen.step)}
        if seen.step < self.window(run)[0] - EDGE:
            return {**state, **known}
        updates = state["updates"] + 1
        m = self.beta * np.asarray(state["m"]) + (1 - self.beta) * slopes
        direction = np.clip(m / (1 - self.beta**updates) / (np.sqrt(q / fresh) + 1e-12), -1, 1)
        mu = np.asarray(state["mu"]) - self._rate(run) * _gate(s, fresh) * direction
        mu = np.clip(mu, -self.limit, self.limit)
        return {**state, **known, "mu": mu.tolist(), "m": m.tolist(), "updates": updates}

    def _next_ceilings(self, run: Run, step: int) -> list[float | None]:
        """Those of the cycle after ``step``; none after the last sync at which it acts."""
        then = step + run.sync_every
        return _ceilings(run, then / (run.total_steps or 1)) if self.active(run, then) else []

    def _rate(self, run: Run) -> float:
        return min(3 / max(run.syncs(*self.window(run)), 1), LARGEST_MOVE) if self.rate is None else self.rate


def _gate(s: Array, fresh: float) -> Array:
    """How much slopes count whose squared significances have the mean s/fresh."""
    gate: Array = 1 - np.minimum(fresh / np.maximum(s, 1e-12), 1)
    return gate


def _countable(slopes: Array) -> Array:
    """An overflowed gradient says nothing, and no square may overflow."""
    return np.clip(np.where(np.isfinite(slopes), slopes, 0.0), -HUGE, HUGE)


def _annealed(peak: float, run: Run) -> float:
    """The peak that a schedule which anneals would have in its place."""
    return peak * (1 + STAYING * run.end)


def _ceilings(run: Run, share: float) -> list[float | None]:
    """What the learning rates may be at this share of the run where the schedule does not climb itself."""
    if run.peak >= 0.5 * CLIMBS_FOR:
        return []
    climbed = 0.5 - 0.5 * math.cos(math.pi * min(share / CLIMBS_FOR, 1.0))
    part = CLIMBS_FROM + (1 - CLIMBS_FROM) * climbed
    return [None if peak is None else _annealed(peak, run) * part for peak in run.peaks]


@dataclass(frozen=True)
class RegressionController(_SlopeController):
    """The default: the slope b of the replicas' losses on the logarithms of their multipliers, by least squares over
    all hyperparameters jointly (with ``ridge`` where there are too few replicas to tell them apart).

    Of a learning rate it believes what the signs of the slopes say of its right peak (:mod:`.belief`), from the first
    sync on, and μ goes to the median of that: up by at most 0.75 at a sync, a jump can break what it trains, and down
    at once; ``rate`` bounds both. A learning rate tells by where it turns from too low to too high, so it must climb:
    one that does not by itself is made to, under a ceiling. ``docs/controller.md`` says why.
    """

    reads: ClassVar[Literal["losses"]] = "losses"
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("ridge", self.ridge)

    def rates_window(self, run: Run) -> tuple[float, float]:
        return (self.start_at or 0.0) * (run.total_steps or 0), self.window(run)[1]

    def start(self, count: int, run: Run | None = None) -> State:
        return {**super().start(count, run), "evidence": [[] for _ in range(count)]}

    def update(self, run: Run, state: State, seen: Observation) -> State:
        logs = np.log(seen.multipliers)
        slopes = _countable(regress(seen.losses, logs, self.ridge))
        sure = significances(seen.losses, logs, slopes)
        moved = self._moved(run, state, slopes, sure, seen)
        gate = _gate(np.asarray(moved["s"]), 1 - 0.9 ** moved["looks"])
        mu, evidence = list(moved["mu"]), list(state["evidence"])
        for index, peak in enumerate(run.peaks):
            if peak is not None:
                said = belief.heard(slopes[index], sure[index], gate[index])
                evidence[index] = [*evidence[index], *self._told(run, seen, index, peak, said)]
                mu[index] = self._towards(run, state["mu"][index], evidence[index])
        return {**moved, "mu": mu, "evidence": evidence}

    def _told(self, run: Run, seen: Observation, index: int, peak: float, said: float) -> list[list[float]]:
        """What this sync adds to the evidence on a learning rate; nothing if it says nothing."""
        if said == 0 or seen.step < self.rates_window(run)[0] - EDGE:
            return []
        share = float(seen.base[index]) / _annealed(peak, run)
        return [[belief.turning_point(share, seen.step, run.sync_every, run.total_steps or 1), said]]

    def _towards(self, run: Run, mu: float, evidence: list[list[float]]) -> float:
        fall, rise = (math.inf, LARGEST_MOVE) if self.rate is None else (self.rate, self.rate)
        believed = belief.median(evidence, run.sync_every / (run.total_steps or 1))
        return min(max(mu + min(max(believed - mu, -fall), rise), -self.limit), self.limit)


@dataclass(frozen=True)
class HypergradientController(_SlopeController):
    """Moves learning rates by b_j = ⟨ḡ, θ̄(kT) − θ̄((k−1)T)⟩ over the parameters of group j: the next gradient times the
    last cycle's displacement. Needs no spread and works with a single replica; with several it needs shared gradients.
    It keeps up to two copies of the parameters."""

    reads: ClassVar[Literal["slopes"]] = "slopes"

    def update(self, run: Run, state: State, seen: Observation) -> State:
        if seen.slopes is None:  # the first cycle has none before it
            return {**state, "ceilings": self._next_ceilings(run, seen.step)}
        slopes = _countable(seen.slopes)
        return self._moved(run, state, slopes, np.where(slopes != 0, TRUSTED, 0.0), seen)


@dataclass(frozen=True)
class SoftmaxController:
    """The paper's controller. From ``warmup_steps`` on it replaces the schedule: η̄_j is constant between syncs.

    s_r = (L̄ − L_r)/σ;  w = softmax(s);  Δ_j = Σ_r w_r·η_{j,r} − (1/N)·Σ_r η_{j,r};
    v_j ← β·v_j + (1−β)·Δ_j;  η̄_j ← η̄_j·(1−γ_j) + λ·v_j.

    Args:
        warmup_steps: S_warm, the first step at which a sync updates η̄.
        scale: σ, in units of loss. The paper says 0.1, its released code 0.002.
        rate: λ. One sync moves η̄ by at most λ·α of itself.
        beta: β.
        decay: ``"floor"``: γ by :func:`decay_to_floor`; ``"published"``: γ by :func:`published_decay`, negative at
            torch's default factors (the learning rate then grows); or a number.
        div_factor, final_div_factor: OneCycleLR's, for ``decay="published"``.
    """

    warmup_steps: int = 100_000
    scale: float = 0.1
    rate: float = 0.5
    beta: float = 0.9
    decay: Literal["floor", "published"] | float = "floor"
    div_factor: float = 25.0
    final_div_factor: float = 1e4

    reads: ClassVar[Literal["losses"]] = "losses"

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}")
        for name in ("scale", "rate", "div_factor", "final_div_factor"):
            check_positive(name, getattr(self, name))
        check_share("beta", self.beta, below_one=True)
        number = isinstance(self.decay, float | int) and -math.inf < self.decay < 1
        if not number and self.decay not in ("floor", "published"):
            raise ValueError(f"decay must be 'floor', 'published' or a number below 1, got {self.decay!r}")

    def check(self, run: Run) -> None:
        if run.total_steps is None and not isinstance(self.decay, float | int):
            raise ValueError(
                f"SoftmaxController(decay={self.decay!r}) needs the length of the run: pass total_steps= to the "
                "scheduler, or a number as decay"
            )

    def active(self, run: Run, step: int) -> bool:
        return step >= self.warmup_steps

    def start(self, count: int, run: Run | None = None) -> State:
        return {"eta": [], "velocity": [0.0] * count, "gamma": []}

    def base(self, state: State, index: int, scheduled: Any) -> Any:
        return state["eta"][index] if state["eta"] else scheduled

    def update(self, run: Run, state: State, seen: Observation) -> State:
        gamma = state["gamma"] or self._gammas(run, seen.base)
        eta = seen.base  # the state's, moved into the bounds
        values = eta[:, None] * seen.multipliers
        delta = values @ softmax_weights(seen.losses, self.scale) - values.mean(axis=1)
        velocity = self.beta * np.asarray(state["velocity"]) + (1 - self.beta) * delta
        moved = eta * (1 - np.asarray(gamma)) + self.rate * velocity
        eta = np.maximum(moved, 0.01 * eta)  # a rate far beyond the paper's must not turn the sign
        return {"eta": eta.tolist(), "velocity": velocity.tolist(), "gamma": list(gamma)}

    def _gammas(self, run: Run, base: Array) -> list[float]:
        if isinstance(self.decay, float | int):
            return [float(self.decay)] * len(base)
        syncs = ((run.total_steps or 0) - self.warmup_steps) / run.sync_every
        gammas = []
        for value, floor in zip(base.tolist(), run.floors, strict=True):
            if floor is None:  # nothing that the schedule would bring down: weight decay, dropout, …
                gammas.append(0.0)
            elif self.decay == "published":
                gammas.append(published_decay(self.div_factor, self.final_div_factor, syncs))
            else:
                gammas.append(decay_to_floor(value, floor, syncs))
        return gammas


def decay_to_floor(base: float, floor: float, syncs: float) -> float:
    """γ = 1 − (floor/base)^{1/K}: what brings ``base`` to ``floor`` in K = ``syncs`` syncs."""
    if not (base > 0 and floor > 0):
        raise ValueError(f"a geometric decay needs a positive base and floor, got base={base} and floor={floor}")
    return max(1 - (floor / base) ** (1 / max(syncs, 1.0)), 0.0)


def published_decay(div_factor: float, final_div_factor: float, syncs: float) -> float:
    """γ = 1 − exp(−log(div_factor/final_div_factor)/K), as published. It is negative, so that the learning rate
    grows, whenever ``div_factor < final_div_factor``, as in torch's defaults."""
    return 1 - math.exp(-math.log(div_factor / final_div_factor) / max(syncs, 1.0))


def softmax_weights(losses: Array, scale: float) -> Array:
    """w = softmax((L̄ − L_r)/σ) over the finite losses; a replica whose loss is not finite has weight 0."""
    finite = np.isfinite(losses)
    if not finite.any():
        return np.full(len(losses), 1 / len(losses))
    score = np.where(finite, (losses[finite].mean() - losses) / scale, -np.inf)
    weights = np.exp(score - score.max())
    return weights / weights.sum()


def paper_settings(total_steps: int) -> dict[str, Any]:
    """The scheduler's keywords as the paper set them: α = 1/9, T = 1000, S_warm = 100 000, β = 0.9, λ = 0.5, σ = 0.1.

    A run of under 200 000 steps keeps their proportions: S_warm is half of it and T a hundredth of S_warm.
    """
    if total_steps < 2:
        raise ValueError(f"total_steps must be at least 2, got {total_steps}")
    warmup = min(100_000, total_steps // 2)
    return {
        "spread": 1 / 9,
        "sync_every": max(warmup // 100, 1),
        "auto_lr": SoftmaxController(warmup_steps=warmup),
    }


def check_share(name: str, value: float, *, below_one: bool = False) -> None:
    if not (0 <= value < 1 or (value == 1 and not below_one)):
        raise ValueError(f"{name} must lie between 0 and 1{' (excluded)' if below_one else ''}, got {value}")


def check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value}")
