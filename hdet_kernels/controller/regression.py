"""The default controller: begin anew with a lower learning rate where it was too high, leave the rest.

A sync of it, in :meth:`RegressionController.update`:

1. slopes: of learning rates from gradients where all replicas share them, otherwise, and of other scalars, from the
   replicas' losses (``least_squares.py``);
2. scalars other than learning rates move against their slopes (:class:`.SlopeController`);
3. the course of the losses and of the slopes goes on (:class:`Soundness`). Before all of this the scheduler asks
   :meth:`RegressionController.broke`: then the run begins anew, see :meth:`RegressionController.begun_anew`. After it,
   once in a run, it asks :meth:`RegressionController.doubts`: then a lower learning rate is tried;
4. where the user does not trust the given learning rate, the signs of slopes are evidence on the right one.

The evidence of 4: the learning rate that looks best over the next T steps falls as training goes on. At first a larger
one looks better, later a smaller one. The favoured direction turns where the path length (the sum of the learning rates
so far) is about 0.5·√S times the right peak, in runs of S steps. From task to task that is off by a factor of e^1.2,
from start to start of one task by little (``docs/controller-why.md``). So the sign of a slope is evidence that the
right peak is higher or lower than the one for which this path length would be the turning point. It is weak evidence,
and counts only where the user trusts the given learning rate less than that. θ is the right peak over the given one;
likelihoods are tabulated as logarithms over a grid of log θ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from statistics import median
from typing import Any, ClassVar, Literal

import numpy as np

from hdet_kernels.checks import check_choice, check_number, check_positive, check_whole, keep_plain
from hdet_kernels.controller.hypergradient import Flags, SlopeController, relative_rate, usable_slopes
from hdet_kernels.controller.least_squares import (
    mean_level,
    noise_deviation,
    normal_significance,
    regress,
    residual_deviation,
    significances,
    standard_errors,
    updated_noise,
    without_outliers,
)
from hdet_kernels.controller.protocol import STEP_TOLERANCE, Array, Findings, Observation, Run, State
from hdet_kernels.controller.settings import RegressionSettings, SlopeSettings, repr_of_changes

#: Largest |log θ| of the grid, and its number of points: far beyond what any evidence moves.
GRID_REACH, GRID_POINTS = 6.0, 121


@cache
def grid() -> Array:
    """Return the tabulated values of log θ."""
    points: Array = np.linspace(-GRID_REACH, GRID_REACH, GRID_POINTS)
    return points


@cache
def prior(trust: float | None, settings: RegressionSettings) -> Array | None:
    """Return the prior over the grid; None where the given learning rate is trusted more than slopes could tell.

    It is normal around the given learning rate, its standard deviation log(trust / least_distrust), and flat for no
    trust at all. Both sides have such weights that the chosen quantile of it is log θ = 0.
    """
    if trust is not None and trust <= settings.least_distrust:
        return None
    points = grid()
    deviation = math.inf if trust is None else math.log(trust / settings.least_distrust)
    density = np.exp(-0.5 * (points / deviation) ** 2)
    lower, higher = density * (points < 0), density * (points > 0)
    weights: Array = settings.quantile * lower / lower.sum() + (1 - settings.quantile) * higher / higher.sum()
    return weights


def path_length(before: float, rate: float, step: int, cycle: int) -> float:
    """Return the path length after ``step`` steps, the last ``cycle`` of them with learning rate ``rate``.

    Args:
        before: path length at the sync before.
        rate: learning rate of the last cycle. Earlier steps with a higher one count as made with this one: such steps
            oscillate and do not add up.
        step: steps so far.
        cycle: steps since the sync before.
    """
    return min(before, rate * (step - cycle)) + rate * cycle


def turning_point(length: float, total_steps: int, settings: RegressionSettings) -> float:
    """Return the log θ for which the favoured direction turns at this path length, over the peak of the schedule."""
    return math.log(max(length / (settings.turning_length * math.sqrt(total_steps)), 1e-300))


def evidence(slope: float, significance: float, settings: RegressionSettings) -> float:
    """Return the evidence of a slope, from −1 (a larger value is certainly better) to 1 (a smaller one is)."""
    beyond_noise = 1 - 1 / significance**2 if significance > 1 else 0.0
    return math.copysign((1 - 2 * settings.sign_error) * beyond_noise, slope)


def updated_likelihood(log_likelihood: Sequence[float], turn: float, found: float) -> list[float]:
    """Return the log-likelihood over the grid after one more observation.

    Args:
        log_likelihood: before it; empty before the first one.
        turn: turning point at this sync, see :func:`turning_point`.
        found: the evidence, see :func:`evidence`.
    """
    points = grid()
    before = np.asarray(log_likelihood) if len(log_likelihood) else np.zeros(len(points))
    after = before + np.log(0.5 + 0.5 * found * np.where(points < turn, 1.0, -1.0))
    return list((after - after.max()).tolist())


def chosen_peak(log_likelihood: Sequence[float], trust: float | None, settings: RegressionSettings) -> float:
    """Return the chosen quantile of the posterior of log θ; 0 without evidence, or where none counts.

    Tasks differ in where they turn: the likelihood is blurred by ``task_deviation`` first.
    """
    weights = _posterior(log_likelihood, trust, settings)
    if weights is None:
        return 0.0
    below = np.cumsum(weights) - 0.5 * weights
    return float(np.interp(settings.quantile * weights.sum(), below, grid()))


def posterior_moments(
    log_likelihood: Sequence[float], trust: float | None, settings: RegressionSettings
) -> tuple[float, float] | None:
    """Return mean and standard deviation of the posterior of log θ; None without evidence, or where none counts."""
    weights = _posterior(log_likelihood, trust, settings)
    if weights is None:
        return None
    share, points = weights / weights.sum(), grid()
    mean = float(share @ points)
    return mean, math.sqrt(float(share @ (points - mean) ** 2))


def _posterior(log_likelihood: Sequence[float], trust: float | None, settings: RegressionSettings) -> Array | None:
    """Return the posterior over the grid, not normalised; None without evidence, or where none counts."""
    weights = prior(trust, settings)
    if weights is None or not len(log_likelihood):
        return None
    return weights * (_blur(settings) @ np.exp(np.asarray(log_likelihood)))


@cache
def _blur(settings: RegressionSettings) -> Array:
    """Return, for each grid point, the weights of a normal distribution around it over all grid points."""
    points = grid()
    found: Array = np.exp(-0.5 * ((points[:, None] - points) / settings.task_deviation) ** 2)
    return found / found.sum(axis=1, keepdims=True)


#: Changes of the level from which the usual one is taken, and bends from which the noise is.
CHANGES, BENDS = 8, 5


@dataclass(frozen=True)
class Soundness:
    """The course of the losses and of the slopes of all learning rates together, since the run began.

    Two signs tell that a learning rate is too high. The first slopes ask for a smaller one, where those of a good one
    ask for a larger one: they come earliest, before much is lost, and are judged while the learning rate climbs. The
    losses have lost, for good, a large part of what was gained.

    First slopes that ask for a smaller one with less certainty raise a doubt: once, a lower learning rate is tried.

    Args:
        initial: level (mean loss of the replicas) at the first sync.
        lowest: lowest level so far.
        last: level at the last sync.
        changes: sizes of the last changes of the level, from sync to sync.
        before: level at the sync before the last; None before there were two.
        bends: how far the last levels were from the mean of the two beside them: noise without the trend.
        slopes: the sum of all slopes over their errors.
        count: how many they are.
        path: path length so far, over the peak and the steps of the run.
    """

    initial: float
    lowest: float
    last: float
    changes: tuple[float, ...] = ()
    before: float | None = None
    bends: tuple[float, ...] = ()
    slopes: float = 0.0
    count: int = 0
    path: float = 0.0

    @staticmethod
    def at(level: float) -> Soundness:
        """Return the course that begins with ``level``."""
        return Soundness(level, level, level)

    @property
    def gain(self) -> float:
        """The gain since the first sync, at the lowest level."""
        return self.initial - self.lowest

    def fell_back(self, level: float, settings: RegressionSettings) -> bool:
        """Return whether this level, before it is added, and the one before it have lost a large part of the gain."""
        above = min(level, self.last) - self.lowest
        return above > settings.fall_share * self.gain and above > settings.fall_noise * self.usual_change

    @property
    def usual_change(self) -> float:
        """The usual change of the level from sync to sync."""
        return median(self.changes) if self.changes else math.inf

    @property
    def mean_slope(self) -> float:
        """The mean of the slopes over their errors; NaN before the first."""
        return self.slopes / self.count if self.count else math.nan

    def evidence(self, settings: RegressionSettings) -> float:
        """Return the mean of the first slopes over their errors; minus infinity before the first.

        The error of a mean falls with the root of their number: a mean of fewer than ``turned_count`` counts less.
        """
        if not self.count:
            return -math.inf
        return self.mean_slope * math.sqrt(min(self.count / settings.turned_count, 1.0))

    def turned(self, settings: RegressionSettings) -> bool:
        """Return whether the first slopes certainly ask for a smaller learning rate, while they are judged."""
        judged = settings.turned_from <= self.path <= settings.turned_until
        return judged and self.evidence(settings) > settings.turned_mean

    def doubtful(self, settings: RegressionSettings) -> bool:
        """Return whether the first slopes ask for a smaller learning rate at all.

        Before anything is gained they tell nothing: on a plateau all learning rates look alike.
        """
        gained = self.gain > settings.fall_noise * self.usual_change
        return gained and self.evidence(settings) > settings.doubt_mean

    @property
    def words(self) -> str:
        """The lowest level, the gain and the usual change, for messages."""
        return f"lowest {self.lowest:.4g}, gain so far {self.gain:.3g}, usual change {self.usual_change:.2g}"

    @property
    def recent(self) -> float:
        """The mean of the last two levels."""
        return self.last if self.before is None else 0.5 * (self.before + self.last)

    @property
    def noise(self) -> float:
        """The usual distance of a level from the mean of the two beside it."""
        return median(self.bends) if self.bends else math.inf

    def numbers(self, level: float | None, last: float) -> dict[str, float]:
        """Return the numbers of a sync with this level, the last one in the course, after one with ``last``.

        NaN stands for those that are not known.
        """
        known = {"lowest": self.lowest, "gain": self.gain, "usual_change": self.usual_change}
        return {"level": math.nan if level is None else level, "last": last, **known, "slope": self.mean_slope}

    def after(self, level: float, *, sign: float | None, path: float) -> Soundness:
        """Return the course after one more sync.

        Args:
            level: mean loss of the replicas.
            sign: the mean of the learning rates' slopes over their errors; None if they are not known.
            path: path length of the cycle, over the peak and the steps of the run.
        """
        bends = self.bends if self.before is None else (*self.bends, abs(self.last - 0.5 * (self.before + level)))
        return Soundness(
            initial=self.initial,
            lowest=min(self.lowest, level),
            last=level,
            changes=(*self.changes, abs(level - self.last))[-CHANGES:],
            before=self.last,
            bends=bends[-BENDS:],
            slopes=self.slopes + (sign or 0.0),
            count=self.count + (sign is not None),
            path=self.path + path,
        )

    def sign(self, level: float | None, after: Soundness, settings: RegressionSettings) -> str | None:
        """Return in words why the learning rate is too high, with what decided; None if no sign tells that.

        Args:
            level: mean loss at the sync; None: no replica is finite.
            after: the course after this sync.
            settings: the controller's constants.
        """
        if level is None:
            return "no replica is finite"
        if self.fell_back(level, settings):
            return f"training fell back (mean loss {level:.4g} after {self.last:.4g}; {self.words})"
        if after.turned(settings):
            return (
                f"the first slopes ask for a smaller learning rate (by {after.mean_slope:.2g} standard errors in the "
                f"mean of {after.count} syncs, where {settings.turned_mean:.2g} is allowed; mean loss {level:.4g})"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**asdict(self), "changes": list(self.changes), "bends": list(self.bends)}

    @staticmethod
    def of(state: dict[str, Any]) -> Soundness:
        """Return the course that :meth:`state_dict` saved."""
        return Soundness(**{**state, "changes": tuple(state["changes"]), "bends": tuple(state.get("bends", ()))})


@dataclass(frozen=True)
class Slopes:
    """Slopes of the losses in the logarithms of the hyperparameters at one sync. Arrays are [J].

    Args:
        values: the slopes.
        errors: their standard errors; NaN where there are too few replicas to tell.
        significance: standard errors that each is away from 0; NaN where that cannot be told.
        explored: which hyperparameters have a slope at all.
    """

    values: Array
    errors: Array
    significance: Array
    explored: Flags


@dataclass(frozen=True)
class RegressionController(SlopeController):
    """The default controller: it keeps a good learning rate and lowers one that is certainly too high.

    Where a sign tells that the learning rate is too high (:class:`Soundness`), or no replica is finite, all replicas
    return to the start, and the schedule begins again over the steps that remain, with a sixth of the peak. That can
    happen from the first sync on: by slopes until the peak of the schedule, by losses for 60 % of the run. Where the
    first slopes raise a doubt only, the same happens as a trial: after as many steps the lower learning rate must be
    better, or everything goes back to where it was when the doubt arose.

    Everything else depends on ``trust``. The signs of slopes tell the right peak within a factor of about 4, from task
    to task. So a learning rate that is trusted to a factor of 3 is not moved by them; one that is trusted less moves
    to a cautious quantile of the posterior: up by a bounded step at a sync, and down at once. ``rate`` bounds both.

    Slopes of learning rates are products of the next gradients with a cycle's displacement where replicas share their
    gradients, and are found by least squares from their losses otherwise (with ``ridge`` where there are too few
    replicas to separate several). Levels are those of the probe, or of the training losses.

    Other scalars follow their slopes later, by default from 30 % to 90 % of the run (until ``stop_at``, from a third of
    it): a regulariser helps once there is something to regularise, and before that less of it always looks better.
    Outside its part of the run a hyperparameter is not explored: all replicas have its base value.
    ``docs/controller-why.md`` has the reasons and the figures.

    Args:
        ridge: regularisation of the joint regression.
        trust: "the learning rate is right within this factor". 1: it is never changed. Up to 3: it is lowered where it
            is certainly too high. More: it also follows the signs of slopes. None: nothing is known of it.
        undo: the most returns to the start, trials included. 0: none, and no copy of it is kept.
        undo_on: where the start, and what a trial is compared with, are kept: ``"auto"``, on the device of the
            parameters if there is room, or ``"cpu"``, in pinned host memory.
        beta, rate, start_at, stop_at, limit, settings: see :class:`SlopeController`.
    """

    __repr__ = repr_of_changes
    reads: ClassVar[Literal["losses"]] = "losses"
    ridge: float = 1e-3
    trust: float | None = 3.0
    undo: int = 4
    undo_on: Literal["auto", "cpu"] = field(default="auto", metadata={"saved": False})
    settings: RegressionSettings = field(default_factory=RegressionSettings, kw_only=True)

    _settings_kind: ClassVar[type[SlopeSettings]] = RegressionSettings

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_plain(self, ridge=check_positive("ridge", self.ridge), undo=check_whole("undo", self.undo, at_least=0))
        keep_plain(self, trust=checked_trust(self.trust))
        check_choice("undo_on", self.undo_on, ("auto", "cpu"))
        if self.trust == 1:
            keep_plain(self, undo=0)  # a return lowers the learning rate

    def prepare(self, run: Run) -> Run:
        """Return ``run`` with pairs, slopes, and the steps between which replicas differ."""
        run = super().prepare(run)
        shared, moves_rates = run.gradients != "local", self._moves_rates(run)
        in_pairs = run.probed and shared and (moves_rates or run.others)
        slopes = shared and not run.overlaps and moves_rates
        return replace(run, in_pairs=in_pairs, departs=self._departs(run), slopes=slopes)

    def _departs(self, run: Run) -> tuple[tuple[int, int] | None, ...]:
        """Return, for each hyperparameter, the steps between which replicas differ in it.

        They end with the last sync at which the controller moves it. Learning rates differ from the start, other
        scalars from the sync before the first one that moves them. None: no sync moves it, so replicas always differ.
        """

        def between(first: float, last: float, *, from_start: bool) -> tuple[int, int] | None:
            if not run.syncs(first, last):
                return None
            begin = 0 if from_start else math.ceil((first - STEP_TOLERANCE) / run.sync_every) - 1
            end = math.floor((last + STEP_TOLERANCE) / run.sync_every)
            return max(begin, 0) * run.sync_every, end * run.sync_every

        rates = between(*self.rate_steps(run), from_start=True) if self._moves_rates(run) else None
        others = between(*self.slope_steps(run), from_start=False)
        return tuple(others if peak is None else rates for peak in run.peaks)

    def slope_steps(self, run: Run) -> tuple[float, float]:
        """Return the first and the last step at which scalars other than learning rates are moved."""
        stop = self.settings.others_until if self.stop_at is None else self.stop_at
        start = self.settings.others_from * stop if self.start_at is None else self.start_at
        return start * (run.total_steps or 0), stop * (run.total_steps or 0)

    def active(self, run: Run, step: int) -> bool:
        """Return whether the sync after ``step`` updates the state."""
        first, last = self.slope_steps(run)
        moves_others = run.others and first - STEP_TOLERANCE <= step <= last + STEP_TOLERANCE
        return moves_others or self._watches_at(run, step)

    def start(self, count: int, run: Run | None = None) -> State:
        """Return the state before the first update, for ``count`` hyperparameters.

        log_likelihood: over the grid of log θ, empty before the first observation. path_length: see
        :func:`path_length`. ceiling: highest μ that is allowed, None before it was lowered. signs:
        running mean of the slopes' signs. noise: see :func:`.least_squares.updated_noise`. soundness: see
        :class:`Soundness`. trial: what a trial is compared with, its step, level and noise; else None.
        """
        per_rate: State = {"log_likelihood": [[] for _ in range(count)], "path_length": [0.0] * count}
        shared: State = {"ceiling": [None] * count, "signs": [0.0] * count, "noise": [0.0, 0]}
        shared |= {"soundness": None, "trial": None}
        state = {**super().start(count, run), **per_rate, **shared}
        return state if self._follows_signs else {**state, "caps": []}

    @property
    def _follows_signs(self) -> bool:
        """Whether the signs of slopes move learning rates."""
        return prior(self.trust, self.settings) is not None

    def broke(self, run: Run, state: State, seen: Observation) -> bool:
        """Return whether a sign tells, at this sync, that the learning rate is too high."""
        return self._sign(run, state, seen) is not None

    def doubts(self, run: Run, state: State, seen: Observation) -> bool:
        """Return whether a lower learning rate is to be tried after this sync; see :class:`.TryingController`."""
        return self._doubt(run, state, seen) is not None

    def tried(self, run: Run, state: State, seen: Observation) -> State:
        """Return the state with which the trial begins: that of a new beginning, with what it is compared with."""
        course = self._course_at(run, state, seen)
        level, noise = (math.nan, math.inf) if course is None else (course.recent, course.noise)
        return {**self.begun_anew(run, state, seen), "trial": {"step": seen.step, "level": level, "noise": noise}}

    def worse(self, run: Run, state: State, seen: Observation) -> bool:
        """Return whether the trial, which ends at this sync, is no better than what it is compared with."""
        compared = self._comparison(run, state, seen)
        return compared is not None and not compared[0]

    def begun_anew(self, run: Run, state: State, seen: Observation) -> State:
        """Return the state with which the run begins anew: all learning rates are lowered, and do not rise again."""
        mu, ceiling = list(state["mu"]), list(state["ceiling"])
        for index in _rates(run):
            mu[index] = ceiling[index] = mu[index] - math.log(self.settings.cut)
        return {**self.start(len(mu), run.rest(seen.step)), "mu": mu, "ceiling": ceiling}

    @property
    def lowest(self) -> float:
        """The lowest μ: that of ``limit``, after all returns."""
        return -self.limit - self.undo * math.log(self.settings.cut)

    def update(self, run: Run, state: State, seen: Observation) -> State:
        """Return the state after a sync; the module's docstring has its parts."""
        settings, logs, noise = self.settings, np.log(seen.multipliers), state["noise"]
        if run.in_pairs:
            equal = ~logs.any(axis=0)  # the replicas that train with the base values: they differ by noise
            noise = updated_noise(noise, without_outliers(seen.losses, settings)[equal], settings)
        slopes, signs = self._with_sign_significance(state, self._slopes(run, seen, noise))
        signal = np.sign(slopes.values) * np.minimum(slopes.significance, settings.largest_significance)
        moved = self._moved(run, state, signal, slopes.significance, slopes.explored, seen)
        moved |= self._rate_entries(run, state, seen, slopes, moved)
        trial = None if self._compares_at(run, state, seen.step) else state["trial"]
        return {**moved, "signs": signs.tolist(), "noise": noise, "trial": trial}

    def findings(self, run: Run, before: State, after: State, seen: Observation, *, returned: bool) -> Findings:
        """Return slopes, posteriors and reasons of a sync, for its record; see :class:`.ExplainingController`."""
        slopes = self._slopes(run, seen, after["noise"])
        moments = {i: posterior_moments(after["log_likelihood"][i], self.trust, self.settings) for i in _rates(run)}
        posterior = {index: each for index, each in moments.items() if each is not None}
        if np.isfinite(seen.losses).any():
            values, errors = (np.where(slopes.explored, each, np.nan) for each in (slopes.values, slopes.errors))
            found = Findings(values, errors, posterior)
        else:  # a slope of losses would be 0, and certain
            found = replace(Findings.measured(seen), posterior=posterior)
        if self._watches_at(run, seen.step):
            certain, _ = self._with_sign_significance(before, slopes)
            course, level = self._course(run, seen, before, certain), mean_level(seen.losses, self.settings)
            last = before["soundness"]["last"] if before["soundness"] else math.nan
            found = replace(found, judgement=course.numbers(level, last) if course else {})
        return replace(found, why=self._reason(run, before, after, seen, posterior, returned=returned))

    def _reason(
        self,
        run: Run,
        before: State,
        after: State,
        seen: Observation,
        posterior: dict[int, tuple[float, float]],
        *,
        returned: bool,
    ) -> str:
        """Return the reason, in words, for what was moved at this sync."""
        better, words = self._comparison(run, before, seen) or (False, None)
        if returned:
            reasons = (self._sign(run, before, seen), None if better else words, self._doubt(run, before, seen))
            return next(filter(None, reasons), "")
        if words:  # also of a trial that goes on because nothing can go back
            return words
        followed = [moments for index, moments in posterior.items() if after["mu"][index] != before["mu"][index]]
        if followed:
            right = " and ".join(f"{math.exp(m):.2g} (within a factor of {math.exp(d):.2g})" for m, d in followed)
            return f"the signs of the slopes put the right peak, over the given one, at {right}"
        return "by the slopes of the loss"

    def _slopes(self, run: Run, seen: Observation, noise: list[float]) -> Slopes:
        """Return the slopes of all hyperparameters: from gradients where they were measured, or else from losses."""
        logs = np.log(seen.multipliers)
        slopes = self._slopes_of_pairs(seen.losses, logs, noise) if run.in_pairs else self._joint_slopes(seen, logs)
        return _with_measured(run, slopes, seen, self.settings)

    def _joint_slopes(self, seen: Observation, logs: Array) -> Slopes:
        """Return the slopes of all hyperparameters, found jointly from all replicas."""
        explored = np.ptp(logs, axis=1) > 0
        values, errors, significance = np.zeros(len(logs)), np.full(len(logs), np.nan), np.zeros(len(logs))
        if explored.any():
            found = regress(seen.losses, logs[explored], self.ridge, self.settings)
            values[explored] = usable_slopes(found, self.settings)
            errors[explored] = standard_errors(seen.losses, logs[explored], values[explored], self.settings)
            significance[explored] = significances(seen.losses, logs[explored], values[explored], self.settings)
        return Slopes(values, errors, significance, explored)

    def _slopes_of_pairs(self, losses: Array, logs: Array, noise: list[float]) -> Slopes:
        """Return the slope of each hyperparameter from the replicas that depart in it.

        Errors come from the noise estimate and from the residual of the straight line.
        """
        settings, count = self.settings, len(logs)
        values, significance, explored = np.zeros(count), np.zeros(count), np.zeros(count, bool)
        errors = np.full(count, np.nan)
        for index, log in enumerate(logs):
            departing = np.flatnonzero(log)
            own = losses[departing]
            level = mean_level(own, settings)
            if level is None or not np.ptp(log[departing]) > 0:
                continue
            explored[index] = True
            x = logs[index : index + 1, departing]
            slope = usable_slopes(regress(own, x, self.ridge, settings), settings)
            deviation, freedom = noise_deviation(noise, abs(level), settings)
            residual = settings.nonlinearity_weight * residual_deviation(own, x, slope, settings)
            error = np.array([math.hypot(deviation, residual) / math.sqrt(x.size * x.var())])
            values[index] = slope[0]
            errors[index] = error[0] if freedom else math.nan
            significance[index] = normal_significance(slope, error, freedom)[0] if freedom else math.nan
        return Slopes(values, errors, significance, explored)

    def _with_sign_significance(self, state: State, slopes: Slopes) -> tuple[Slopes, Array]:
        """Return the slopes and the running mean of their signs.

        Where there are too few replicas to estimate errors (NaN), a slope is significant if its sign persists.
        """
        decay, signs = self.settings.sign_decay, np.asarray(state["signs"])
        signs = np.where(slopes.explored, decay * signs + (1 - decay) * np.sign(slopes.values), signs)
        persistence = _sign_persistence(slopes.values, signs, np.asarray(state["observations"]) + 1, decay)
        significance = np.where(np.isnan(slopes.significance), persistence, slopes.significance)
        return replace(slopes, significance=significance), signs

    def _rate_entries(self, run: Run, state: State, seen: Observation, slopes: Slopes, moved: State) -> State:
        """Return the entries of all learning rates after a sync, and those that they share."""
        kept = {name: state[name] for name in ("log_likelihood", "path_length", "ceiling", "soundness")}
        rates, kept["mu"] = _rates(run), list(moved["mu"])
        for index in rates:  # they do not follow their slopes, as other scalars do
            kept["mu"][index] = state["mu"][index]
        if not self._watches_at(run, seen.step):
            return kept
        course = self._course(run, seen, state, slopes)
        state = {**moved, **kept, "soundness": course and course.state_dict()}
        followed = self._followed(run, state, seen, slopes, rates if self._moves_rates_at(run, seen.step) else ())
        return {name: state[name] for name in kept} | followed

    def _sign(self, run: Run, state: State, seen: Observation) -> str | None:
        """Return in words the sign that the learning rate is too high; None if there is none at this sync."""
        if not self._watches_at(run, seen.step):
            return None
        level, course = mean_level(seen.losses, self.settings), state["soundness"]
        if course is None:
            return None
        after = self._course_after(run, state, seen)
        return None if after is None else Soundness.of(course).sign(level, after, self.settings)

    def _compares_at(self, run: Run, state: State, step: int) -> bool:
        """Return whether a doubt may be raised at the sync after ``step``, or the trial under way ends there."""
        trial = state["trial"]
        look = self.settings.doubt_at * (run.total_steps or 0) if trial is None else trial["step"]
        before = step - run.steps_since_sync(step)
        return self._moves_rates_at(run, step) and before < look - STEP_TOLERANCE <= step

    def _course_at(self, run: Run, state: State, seen: Observation) -> Soundness | None:
        """Return the course after a sync at which a doubt may be raised or a trial ends; None at any other."""
        if state["soundness"] is None or not self._compares_at(run, state, seen.step):
            return None
        return self._course_after(run, state, seen)

    def _doubt(self, run: Run, state: State, seen: Observation) -> str | None:
        """Return in words why the learning rate is in doubt at this sync; None if it is not.

        Only the given one is ever in doubt. Of 44 trials after a return, 35 were lost.
        """
        if any(state["ceiling"][rate] is not None for rate in _rates(run)):
            return None
        course = self._course_at(run, state, seen)
        ends = self._moves_rates_at(run.rest(seen.step), seen.step)  # the trial, while it can still be judged
        if course is None or not ends or not course.doubtful(self.settings):
            return None
        return (
            f"the first slopes do not ask for a larger learning rate (they are {course.mean_slope:.2g} standard errors "
            f"in the mean of {course.count} syncs, where that of a good one is below {self.settings.doubt_mean:.2g}; "
            f"mean loss {course.last:.4g})"
        )

    def _comparison(self, run: Run, state: State, seen: Observation) -> tuple[bool, str] | None:
        """Return whether the trial that ends at this sync is better, and why in words; None if none ends.

        Both are compared after the same number of steps, by the mean of their last two levels.
        """
        course, trial = self._course_at(run, state, seen), state["trial"]
        if course is None or trial is None:
            return None
        noise = max(course.noise, trial["noise"])
        better = trial["level"] - course.recent > self.settings.better_noise * noise
        found = "better" if better else "no better"
        return better, (
            f"the lower learning rate is {found} after {seen.step} steps (mean loss {course.recent:.4g}, where it was "
            f"{trial['level']:.4g}; noise {noise:.2g})"
        )

    def _course_after(self, run: Run, state: State, seen: Observation) -> Soundness | None:
        """Return the course of losses and slopes after this sync; None before the first level."""
        slopes, _ = self._with_sign_significance(state, self._slopes(run, seen, state["noise"]))
        return self._course(run, seen, state, slopes)

    def _course(self, run: Run, seen: Observation, state: State, slopes: Slopes) -> Soundness | None:
        """Return the same, given the slopes."""
        rates, level = _rates(run), mean_level(seen.losses, self.settings)
        before = None if state["soundness"] is None else Soundness.of(state["soundness"])
        if level is None:
            return before
        rate = relative_rate(run, seen, rates[0], self.settings) / math.exp(state["mu"][rates[0]])
        path = rate * run.steps_since_sync(seen.step) / (run.total_steps or 1)
        if before is None:
            return replace(Soundness.at(level), path=path)
        explored = [index for index in rates if slopes.explored[index]]
        largest = self.settings.largest_significance
        signs = [math.copysign(min(slopes.significance[i], largest), slopes.values[i]) for i in explored]
        # Slopes of losses are not judged: they are compared on other examples, or by few replicas.
        sign = sum(signs) / len(signs) if signs and seen.slopes is not None else None
        return before.after(level, sign=sign, path=path)

    def _followed(self, run: Run, state: State, seen: Observation, slopes: Slopes, rates: Sequence[int]) -> State:
        """Return the entries after the signs of slopes were taken as evidence, if they count."""
        settings, total, cycle = self.settings, run.total_steps or 1, run.steps_since_sync(seen.step)
        mu, lengths, likelihoods = list(state["mu"]), list(state["path_length"]), list(state["log_likelihood"])
        for index in rates if self._follows_signs else ():
            rate = relative_rate(run, seen, index, settings)
            lengths[index] = path_length(lengths[index], rate, seen.step, cycle)
            if not slopes.explored[index] or seen.step < self.rate_steps(run)[0] - STEP_TOLERANCE:
                continue
            slope, significance = float(slopes.values[index]), float(slopes.significance[index])
            turn = turning_point(lengths[index], total, settings)
            found = evidence(slope, significance, settings)
            likelihoods[index] = updated_likelihood(likelihoods[index], turn, found)
            target = chosen_peak(likelihoods[index], self.trust, settings)
            ceiling = math.inf if state["ceiling"][index] is None else state["ceiling"][index]
            mu[index] = min(self._towards(min(target, ceiling), mu[index]), ceiling)
        return {"mu": mu, "path_length": lengths, "log_likelihood": likelihoods}

    def _moves_rates(self, run: Run) -> bool:
        """Return whether learning rates can be moved at all: there are some, and the user does not rule it out."""
        return run.moves_rates and self.trust != 1

    def _moves_rates_at(self, run: Run, step: int) -> bool:
        return self._moves_rates(run) and super().active(run, step)

    def _watches_at(self, run: Run, step: int) -> bool:
        """Return whether losses are watched for breaks at the sync after ``step``: longer than learning rates move."""
        until = self.settings.watch_until * (run.total_steps or 0)
        watched = self.stop_at is None and self._moves_rates(run) and step <= until + STEP_TOLERANCE
        return self._moves_rates_at(run, step) or watched

    def _next_caps(self, run: Run, step: int) -> list[float | None]:
        """Return the caps of the cycle after ``step``: only evidence from a climb needs one."""
        return super()._next_caps(run, step) if self._follows_signs else []

    def _towards(self, target: float, mu: float) -> float:
        """Return μ after a move towards ``target``: up by a bounded step, down at once; ``rate`` bounds both."""
        fall, rise = (math.inf, self.settings.largest_move) if self.rate is None else (self.rate, self.rate)
        return min(max(mu + min(max(target - mu, -fall), rise), -self.limit), self.limit)


def checked_trust(trust: float | None) -> float | None:
    """Return ``trust`` as a plain number; raise unless it is a factor of at least 1, or None."""
    if trust is None:
        return None
    return check_number("trust", trust, at_least=1, remedy="1 leaves the learning rate as it is, None is for no trust")


def _rates(run: Run) -> list[int]:
    """Return the indices of the learning rates whose peaks can be moved."""
    return [index for index, peak in enumerate(run.peaks) if peak is not None]


def _with_measured(run: Run, slopes: Slopes, seen: Observation, settings: RegressionSettings) -> Slopes:
    """Return the slopes with those of learning rates that were measured from gradients in their places.

    The displacement of the first cycle is not known where replicas may start apart, so that the third one is the first
    with slopes. Before it, and after a return, nothing is known of learning rates. Replicas whose gradients turn out to
    be local never have such slopes.
    """
    found_local = run.gradients == "auto" and seen.slopes is None and seen.step > 2 * run.sync_every
    if not run.slopes or found_local:
        return slopes
    values, significance, explored = slopes.values.copy(), slopes.significance.copy(), slopes.explored.copy()
    errors = slopes.errors.copy()
    for index in _rates(run):
        explored[index] = seen.slopes is not None
        if seen.slopes is not None and seen.errors is not None:
            values[index] = usable_slopes(seen.slopes[index : index + 1], settings)[0]
            error, size = float(seen.errors[index]), abs(float(values[index]))
            errors[index] = error
            significance[index] = size / error if error != 0 else math.inf if size else 0.0
    return Slopes(values, errors, significance, explored)


def _sign_persistence(slopes: Array, signs: Array, observations: Array, decay: float) -> Array:
    """Return how far the running mean of signs is from that of random signs, in standard deviations.

    0 where the mean has not the sign of the last slope.
    """
    k = np.maximum(observations, 1)
    mean = signs / (1 - decay**k)
    variance = (1 - decay) / (1 + decay) * (1 + decay**k) / (1 - decay**k)
    found: Array = np.maximum(mean * np.sign(slopes), 0) / np.sqrt(variance)
    return found
