"""Controllers that go by the slopes of the loss in the logarithms of the hyperparameters, and ride on the schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from . import belief
from .controller import EDGE, Array, Observation, Run, State, check_positive, check_share
from .regression import comparable, noise, noise_scale, normal, regress, significances, unexplained
from .stall import Stall

Flags = NDArray[np.bool_]

#: What one sync moves μ by, at most.
LARGEST_MOVE = 0.75

#: The same of a learning rate that rises after a smaller one was better once, and so is near the turn, in each percent
#: of the run; and what counts as having been better.
LATER_MOVE, OPPOSED = 0.2, 0.25

#: How many errors a slope counts as being from 0 at most where scalars follow it, and that of the hypergradient always,
#: where nothing tells.
TRUSTED = 4.0

#: The share of the run until which scalars other than learning rates are moved, and of that the share from which on.
OTHERS_UNTIL, OTHERS_FROM = 0.9, 1 / 3

#: How much of what a straight line leaves unexplained counts as an error where losses have none themselves.
CROOKED = 0.5

#: The weight of what was before in the running mean of signs.
CONSISTENT = 0.5

#: The mean square of the significances of a learning rate's slopes from which on they are heard: noise has 1.
DEMAND = 1.5

#: Shares of the first cycle at which learning rates are looked at besides.
EARLY = (1 / 8, 1 / 4, 1 / 2)

#: How OneCycleLR climbs: from this share of its peak to all of it, in this share of the run.
CLIMBS_FROM, CLIMBS_FOR = 1 / 25, 0.3

#: The best constant learning rate was a quarter of the best peak of a schedule that anneals: 1 + this.
STAYING = 3.0

#: Slopes count up to here: their squares must not overflow.
HUGE = 1e150


@dataclass(frozen=True)
class _SlopeController:
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
            ceilings = _ceilings(run, run.sync_every / run.total_steps)
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
            move = self._rate(run) * _gate(now["s"], now["looks"]) * np.clip(mean / (np.sqrt(square) + 1e-12), -1, 1)
            low, high = np.transpose(run.reach or [(-math.inf, math.inf)] * len(said))
            now["mu"] = np.clip(was["mu"] - move, np.maximum(low, -self.limit), np.minimum(high, self.limit))
        known = {name: np.where(explored, value, was[name]).tolist() for name, value in now.items()}
        return {**state, **known, "ceilings": self._next_ceilings(run, seen.step)}

    def _next_ceilings(self, run: Run, step: int) -> list[float | None]:
        """Those of the cycle after ``step``; none after the last sync at which learning rates are moved."""
        then = (step // run.sync_every + 1) * run.sync_every
        return _ceilings(run, then / (run.total_steps or 1)) if then <= self.rates_window(run)[1] + EDGE else []

    def _rate(self, run: Run) -> float:
        if self.rate is not None:
            return self.rate
        return min(3 / max(run.syncs(*self.window(run)), 1), LARGEST_MOVE)


def _moves_rates(run: Run) -> bool:
    return any(peak is not None for peak in run.peaks)


def _fresh(looks: Array) -> Array:
    """What running means of so many numbers are short of, having begun at 0."""
    found: Array = 1 - 0.9**looks
    return found


def _gate(s: Array, looks: Array, demand: float = 1.0) -> Array:
    """How much slopes count that were looked at so often, with s the running mean of their squared significances, which
    has to be above ``demand``."""
    gate: Array = 1 - np.minimum(demand * _fresh(looks) / np.maximum(s, 1e-12), 1)
    return gate


def _countable(slopes: Array) -> Array:
    """An overflowed gradient says nothing, and no square may overflow."""
    return np.clip(np.where(np.isfinite(slopes), slopes, 0.0), -HUGE, HUGE)


def _annealed(peak: float, run: Run) -> float:
    """The peak that a schedule which anneals would have in its place."""
    return peak * (1 + STAYING * run.end)


def _over_peak(run: Run, seen: Observation, index: int) -> float:
    """A learning rate over the peak that was given."""
    return float(seen.base[index]) / _annealed(run.peaks[index] or 1.0, run)


def _watched(run: Run, seen: Observation, index: int, stall: State | None, level: float, said: float) -> State:
    """What is known of whether training stands still. The syncs of the first cycle say only where it began."""
    known = Stall(level) if stall is None else Stall.of(stall)
    if seen.step < run.sync_every:
        return known.state_dict()
    return known.after(level, said, _over_peak(run, seen, index)).state_dict()


def _ceilings(run: Run, share: float) -> list[float | None]:
    """What the learning rates may be at this share of the run where the schedule does not climb itself."""
    if run.peak >= 0.5 * CLIMBS_FOR:
        return []
    climbed = 0.5 - 0.5 * math.cos(math.pi * min(share / CLIMBS_FOR, 1.0))
    part = CLIMBS_FROM + (1 - CLIMBS_FROM) * climbed
    return [None if peak is None else _annealed(peak, run) * part for peak in run.peaks]


@dataclass(frozen=True)
class RegressionController(_SlopeController):
    """The default: the slope b of the replicas' losses on the logarithms of their multipliers, by least squares: over
    all hyperparameters jointly (with ``ridge`` where there are too few replicas to tell them apart) or, where replicas
    come in pairs, over each by those that depart in it.

    Of a learning rate it believes what the slopes say of its right peak (:mod:`.belief`), from the first sync on, and μ
    goes to a prudent quantile of that: up by a bounded step at a sync, a jump can break what it trains, and down at
    once; ``rate`` bounds both. A learning rate tells by where it turns from too low to too high, so it must climb: one
    that does not by itself is made to, under a ceiling.

    Other scalars follow their slopes after that, by default from 30 % to 90 % of the run (until ``stop_at``, from a
    third of it): what a regulariser is good for shows when there is something to hold back, and before that less of it
    always looks better. Outside of its part of the run there is nothing to compare of a hyperparameter: all replicas
    have its base value. ``docs/controller.md`` says why.
    """

    reads: ClassVar[Literal["losses"]] = "losses"
    begins: ClassVar[float] = 0.0
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("ridge", self.ridge)

    def window(self, run: Run) -> tuple[float, float]:
        """First and last step at which it may move other scalars than learning rates."""
        stop = OTHERS_UNTIL if self.stop_at is None else self.stop_at
        start = OTHERS_FROM * stop if self.start_at is None else self.start_at
        return start * (run.total_steps or 0), stop * (run.total_steps or 0)

    def active(self, run: Run, step: int) -> bool:
        first, last = self.window(run)
        of_others = run.others and first - EDGE <= step <= last + EDGE
        return of_others or (_moves_rates(run) and super().active(run, step))

    def early_syncs(self, run: Run) -> tuple[int, ...]:
        """An eighth, a quarter and a half of the first cycle: what is far too high must be heard before it has done
        what no later learning rate repairs, and what is far too low is known as soon. Only with a probe: the mean of
        the training losses of so few steps is that of what they started from."""
        if self.start_at or not run.probed or not _moves_rates(run):
            return ()
        return tuple(sorted({round(run.sync_every * share) for share in EARLY} - {0, run.sync_every}))

    def departs(self, run: Run) -> tuple[tuple[int, int] | None, ...]:
        """For each hyperparameter the steps between which replicas depart in it: up to the last sync at which it acts
        (those of the first cycle aside), other scalars from the one before the first; None if there is no such sync."""

        def between(first: float, last: float, *, ahead: bool) -> tuple[int, int] | None:
            if not run.syncs(first, last):
                return None
            begin = math.ceil((first - EDGE) / run.sync_every) - 1 if ahead else 0
            return max(begin, 0) * run.sync_every, math.floor((last + EDGE) / run.sync_every) * run.sync_every

        rates, others = between(*self.rates_window(run), ahead=False), between(*self.window(run), ahead=True)
        return tuple(others if peak is None else rates for peak in run.peaks)

    def start(self, count: int, run: Run | None = None) -> State:
        heard = {"belief": [[] for _ in range(count)], "way": [None] * count, "opposed": [False] * count}
        seen = {"signs": [0.0] * count, "noise": [0.0, 0], "level": None, "stall": None}
        return {**super().start(count, run), **heard, **seen}

    def update(self, run: Run, state: State, seen: Observation) -> State:
        state = {**self.start(len(seen.base)), **state}  # checkpoints of earlier versions lack entries
        logs, known = np.log(seen.multipliers), state["noise"]
        if run.in_pairs:
            known = noise(known, _ordinary(seen.losses)[~logs.any(axis=0)])
        slopes, sure, explored = self._apart(seen.losses, logs, known) if run.in_pairs else self._jointly(seen, logs)
        signs = np.asarray(state["signs"])
        signs = np.where(explored, CONSISTENT * signs + (1 - CONSISTENT) * np.sign(slopes), signs)
        # Where there are too few replicas to know errors by, those signs are sure that stay the same.
        sure = np.where(np.isnan(sure), _consistency(slopes, signs, np.asarray(state["looks"]) + 1), sure)
        moved = self._moved(run, state, np.sign(slopes) * np.minimum(sure, TRUSTED), sure, explored, seen)
        gate = _gate(np.asarray(moved["s"]), np.asarray(moved["looks"]), DEMAND)
        before, level = state["level"], _level(seen.losses)
        gain = before - level if run.probed and before is not None and level is not None else 0.0
        rates = [index for index, peak in enumerate(run.peaks) if peak is not None]
        # What a cycle gained is the work of all learning rates, and of an explosion only the sign of a slope is known.
        tells_how_far = len(rates) == 1 and not _explodes(seen.losses)
        stall, entries = state["stall"], {name: list(state[name]) for name in ("belief", "way", "opposed")}
        entries["mu"] = list(moved["mu"])
        for index in rates:
            was = {name: state[name][index] for name in entries}
            said = belief.heard(slopes[index], sure[index], gate[index]) if explored[index] else None
            elasticity = _elasticity(slopes[index], sure[index], gain) if tells_how_far else None
            if tells_how_far and run.probed and said is not None and level is not None:
                stall = _watched(run, seen, index, stall, level, said)
            highest = math.inf if stall is None else Stall.of(stall).highest
            for name, entry in self._learned(run, seen, index, was, said, elasticity, highest).items():
                entries[name][index] = entry
        level = before if level is None else level
        return {**moved, **entries, "signs": signs.tolist(), "noise": known, "level": level, "stall": stall}

    def _learned(
        self,
        run: Run,
        seen: Observation,
        index: int,
        was: State,
        said: float | None,
        elasticity: float | None,
        highest: float,
    ) -> State:
        """The entries of a learning rate after what was ``said`` on it, None if it was not looked at. ``highest``: what
        it may be multiplied with."""
        total, cycle = run.total_steps or 1, run.steps_since_sync(seen.step)
        value = _over_peak(run, seen, index)
        gone = belief.way(was["way"], value, seen.step, cycle)
        if said is None:
            return {**was, "way": gone}
        believed = was["belief"]
        if said != 0 and seen.step >= self.rates_window(run)[0] - EDGE:
            turn = belief.turning_point(gone, value, cycle, total)
            believed = belief.updated(believed, turn, said, run.sync_every / total, elasticity)
        opposed = was["opposed"] or said > OPPOSED
        rise = min(100 * LATER_MOVE * run.sync_every / total, LARGEST_MOVE) if opposed else LARGEST_MOVE
        mu = self._towards(min(belief.chosen(believed), math.log(highest)), was["mu"], rise)
        return {"mu": mu, "belief": believed, "way": gone, "opposed": opposed}

    def _jointly(self, seen: Observation, logs: Array) -> tuple[Array, Array, Flags]:
        """The slopes, how many errors each is from 0 (NaN where that cannot be told), and which there are: of all
        hyperparameters by all replicas."""
        explored = np.ptp(logs, axis=1) > 0
        slopes, sure = np.zeros(len(logs)), np.zeros(len(logs))
        if explored.any():
            slopes[explored] = _countable(regress(seen.losses, logs[explored], self.ridge))
            sure[explored] = significances(seen.losses, logs[explored], slopes[explored])
        return slopes, sure, explored

    def _apart(self, losses: Array, logs: Array, known: list[float]) -> tuple[Array, Array, Flags]:
        """The same of each hyperparameter by the replicas that depart in it; how sure they are, by the noise that is
        ``known`` and by what is crooked."""
        slopes, sure, explored = np.zeros(len(logs)), np.zeros(len(logs)), np.zeros(len(logs), bool)
        for row, log in enumerate(logs):
            mine = np.flatnonzero(log)
            level = _level(losses[mine])
            if level is not None and np.ptp(log[mine]) > 0:
                explored[row] = True
                x = logs[row : row + 1, mine]
                slopes[row] = _countable(regress(losses[mine], x, self.ridge))[0]
                scale, spare = noise_scale(known, abs(level))
                scale = math.hypot(scale, CROOKED * unexplained(losses[mine], x, slopes[row : row + 1]))
                error = np.array([scale / math.sqrt(x.size * x.var())])
                sure[row] = normal(slopes[row : row + 1], error, spare)[0] if spare else math.nan
        return slopes, sure, explored

    def _towards(self, believed: float, mu: float, most: float) -> float:
        fall, rise = (math.inf, most) if self.rate is None else (self.rate, self.rate)
        return min(max(mu + min(max(believed - mu, -fall), rise), -self.limit), self.limit)


def _consistency(slopes: Array, signs: Array, looks: Array) -> Array:
    """How far the running mean of the signs of slopes is from that of signs by chance, in standard deviations, as far
    as it has the sign of the last."""
    k = np.maximum(looks, 1)
    mean = signs / (1 - CONSISTENT**k)
    variance = (1 - CONSISTENT) / (1 + CONSISTENT) * (1 + CONSISTENT**k) / (1 - CONSISTENT**k)
    found: Array = np.maximum(mean * np.sign(slopes), 0) / np.sqrt(variance)
    return found


def _ordinary(losses: Array) -> Array:
    """Those that are compared as they are, and NaN for the others: an explosion is no noise."""
    return np.where(comparable(losses) == losses, losses, np.nan)


def _explodes(losses: Array) -> bool:
    """Whether a loss is not finite, or so high that less than half of what it is above the best is compared."""
    compared = comparable(losses)
    return not bool((losses - compared <= np.ptp(compared)).all())


def _level(losses: Array) -> float | None:
    """Where the replicas are; None if none is finite."""
    return float(comparable(losses).mean()) if np.isfinite(losses).any() else None


def _elasticity(slope: float, sure: float, gain: float) -> float | None:
    """By what share of what the last cycle gained it would have gained more for each e-fold, from as much of the slope
    as is sure; None if nothing is, or nothing was gained."""
    return -slope * (1 - 1 / sure**2) / gain if gain > 0 and sure > 1 else None


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
        return self._moved(run, state, slopes, np.where(slopes != 0, TRUSTED, 0.0), np.ones(len(slopes), bool), seen)
