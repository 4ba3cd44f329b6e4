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

from .regression import regress, slope_errors

Array = NDArray[np.float64]
State = dict[str, Any]

#: Shares of a run become steps by a product that may be off by a rounding: 0.29·100 is a little less than 29.
EDGE = 1e-6

#: Learning rates are moved until this share of the run, and by at most this at a sync: see ``docs/controller.md``.
SETTLED, LARGEST_MOVE = 0.125, 0.75

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
    slopes: [J], ⟨gradient, last cycle's displacement⟩, for the hypergradient controller alone.
    step: the step that the sync follows; None: one at which the controller acts.
    """

    losses: Array
    multipliers: Array
    base: Array
    slopes: Array | None = None
    step: int | None = None


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

    m ← β·m + (1−β)·b;  q ← 0.9·q + 0.1·b², both bias-corrected;  e ← 0.9·e + 0.1·error(b)²;
    μ ← clip(μ − λ·max(1 − e/q, 0)·clip(m/(√q + 1e-12), −1, 1), −limit, limit).

    The second factor is the noise gate: slopes that are no larger than their errors move nothing. The sync before the
    first one at which it acts shows how large slopes are: it counts for q and e alone.

    Learning rates are moved while they climb, until the moment at which one that is right has passed the greedy optimum
    for as long as it was below (12.5 % of the run); what does not climb by itself is made to, under a ceiling:
    ``docs/controller.md`` says why. Other scalars are moved until the peak of the schedule.

    Args:
        beta: β, the momentum of the slope.
        rate: λ, the most that one sync moves μ. Default: 3 over the number of active syncs, so that the controller
            can travel a factor of e³ ≈ 20 in all; at most 0.75.
        start_at: share of the run at which it becomes active.
        stop_at: share of the run after which μ is frozen. Default: for learning rates 12.5 %, or four syncs if that
            is later; for other scalars the peak of the schedule, or 30 %. Near the end of a run a smaller step always
            looks better at once (short-horizon bias).
        limit: bound of |μ|.
    """

    beta: float = 0.9
    rate: float | None = None
    start_at: float = 0.05
    stop_at: float | None = None
    limit: float = 4.0

    def __post_init__(self) -> None:
        check_share("beta", self.beta, below_one=True)
        check_share("start_at", self.start_at)
        if self.stop_at is not None:
            check_share("stop_at", self.stop_at)
            if self.stop_at <= self.start_at:
                raise ValueError(f"stop_at={self.stop_at} must be greater than start_at={self.start_at}")
        if self.rate is not None:
            check_positive("rate", self.rate)
        check_positive("limit", self.limit)

    def check(self, run: Run) -> None:
        if run.total_steps is None:
            raise ValueError(
                f"{type(self).__name__} acts in a part of the run and needs its length: pass total_steps= to the "
                "scheduler, or auto_lr=False"
            )

    def window(self, run: Run) -> tuple[float, float]:
        """First and last step at which it may act."""
        total = run.total_steps or 0
        return self.start_at * total, (max(run.peak, CLIMBS_FOR) if self.stop_at is None else self.stop_at) * total

    def rates_window(self, run: Run) -> tuple[float, float]:
        """The same for learning rates."""
        first, last = self.window(run)
        if self.stop_at is not None:
            return first, last
        four_syncs = (max(math.ceil((first - EDGE) / run.sync_every), 1) + 3) * run.sync_every
        return first, min(max(SETTLED * (run.total_steps or 0), four_syncs), last)

    def active(self, run: Run, step: int) -> bool:
        first, last = self.window(run)
        return first - run.sync_every - EDGE <= step <= last + EDGE

    def start(self, count: int, run: Run | None = None) -> State:
        ceilings: list[float | None] = []
        if run is not None and run.total_steps is not None and run.syncs(*self.window(run)) > 0:
            ceilings = _ceilings(run, 0.5 * self.start_at)
        per_scalar = {name: [0.0] * count for name in ("mu", "m", "q", "e")}
        return {**per_scalar, "looks": 0, "updates": 0, "ceilings": ceilings}

    def base(self, state: State, index: int, scheduled: Any) -> Any:
        ceiling = state["ceilings"][index] if index < len(state["ceilings"]) else None
        if ceiling is not None:
            scheduled = min(scheduled, ceiling) if isinstance(scheduled, float) else scheduled.clamp(max=ceiling)
        return scheduled * math.exp(state["mu"][index])

    def _moved(self, run: Run, state: State, slopes: Array, errors: Array, step: int | None) -> State:
        slopes = np.clip(np.where(np.isfinite(slopes), slopes, 0.0), -HUGE, HUGE)  # an overflowed gradient says nothing
        looks = state["looks"] + 1
        q = 0.9 * np.asarray(state["q"]) + 0.1 * slopes**2
        e = 0.9 * np.asarray(state["e"]) + 0.1 * np.minimum(errors, HUGE) ** 2
        seen = {**state, "q": q.tolist(), "e": e.tolist(), "looks": looks, "ceilings": self._next_ceilings(run, step)}
        if not _within(step, (self.window(run)[0], math.inf)):
            return seen
        updates = state["updates"] + 1
        m = self.beta * np.asarray(state["m"]) + (1 - self.beta) * slopes
        direction = np.clip(m / (1 - self.beta**updates) / (np.sqrt(q / (1 - 0.9**looks)) + 1e-12), -1, 1)
        direction *= np.clip(1 - np.divide(e, q, out=np.zeros_like(q), where=q > 0), 0, 1)
        moves = self._rate(run, self.window(run)) * direction
        rates = self.rates_window(run)
        for index, peak in enumerate(run.peaks):
            if peak is not None:
                moves[index] = self._rate(run, rates) * direction[index] if _within(step, rates) else 0.0
        mu = np.clip(np.asarray(state["mu"]) - moves, -self.limit, self.limit)
        return {**seen, "mu": mu.tolist(), "m": m.tolist(), "updates": updates}

    def _next_ceilings(self, run: Run, step: int | None) -> list[float | None]:
        """Those of the cycle after ``step``; none after the last sync at which it acts."""
        then = None if step is None else step + run.sync_every
        return _ceilings(run, then / (run.total_steps or 1)) if then is not None and self.active(run, then) else []

    def _rate(self, run: Run, window: tuple[float, float]) -> float:
        return min(3 / max(run.syncs(*window), 1), LARGEST_MOVE) if self.rate is None else self.rate


def _within(step: int | None, window: tuple[float, float]) -> bool:
    return step is None or window[0] - EDGE <= step <= window[1] + EDGE


def _ceilings(run: Run, share: float) -> list[float | None]:
    """What the learning rates may be at this share of the run where the schedule does not climb itself."""
    if run.peak >= 0.5 * CLIMBS_FOR:
        return []
    climbed = 0.5 - 0.5 * math.cos(math.pi * min(share / CLIMBS_FOR, 1.0))
    part = (CLIMBS_FROM + (1 - CLIMBS_FROM) * climbed) * (1 + STAYING * run.end)
    return [None if peak is None else peak * part for peak in run.peaks]


@dataclass(frozen=True)
class RegressionController(_SlopeController):
    """The default: the slope b of the replicas' losses on the logarithms of their multipliers, by least squares over
    all hyperparameters jointly (with ``ridge`` where there are too few replicas to tell them apart)."""

    reads: ClassVar[Literal["losses"]] = "losses"
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("ridge", self.ridge)

    def update(self, run: Run, state: State, seen: Observation) -> State:
        logs = np.log(seen.multipliers)
        slopes = regress(seen.losses, logs, self.ridge)
        return self._moved(run, state, slopes, slope_errors(seen.losses, logs, slopes), seen.step)


@dataclass(frozen=True)
class HypergradientController(_SlopeController):
    """The same from b_j = ⟨ḡ, θ̄(kT) − θ̄((k−1)T)⟩ over the parameters of group j: the next gradient times the last
    cycle's displacement. Needs no spread and works with a single replica; it moves learning rates only, and with
    several replicas it needs shared gradients. It keeps up to two copies of the parameters."""

    reads: ClassVar[Literal["slopes"]] = "slopes"

    def update(self, run: Run, state: State, seen: Observation) -> State:
        if seen.slopes is None:  # the first cycle has none before it
            return {**state, "ceilings": self._next_ceilings(run, seen.step)}
        return self._moved(run, state, seen.slopes, np.zeros(len(seen.slopes)), seen.step)


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
