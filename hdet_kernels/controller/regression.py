"""The default controller: regress the replicas' losses on their log multipliers, and follow the slopes.

A sync of it, in :meth:`RegressionController.update`:

1. slopes of the losses and their significance (``least_squares.py``);
2. scalars other than learning rates move against their slopes (``slopes.py``);
3. for each learning rate, the slope becomes evidence on its right peak (``peak_posterior.py``), what the size of slopes
   and the course of the loss say of stability is noted (``stability.py``), and μ moves towards the chosen peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from hdet_kernels.checks import check_positive, keep_plain
from hdet_kernels.controller import peak_posterior
from hdet_kernels.controller.least_squares import (
    has_explosion,
    mean_level,
    noise_deviation,
    normal_significance,
    regress,
    residual_deviation,
    significances,
    updated_noise,
    without_outliers,
)
from hdet_kernels.controller.protocol import STEP_TOLERANCE, Array, Observation, Run, State
from hdet_kernels.controller.settings import RegressionSettings, SlopeSettings
from hdet_kernels.controller.slopes import Flags, SlopeController, noise_gate, usable_slopes
from hdet_kernels.controller.stability import Cycle, Stability
from hdet_kernels.controller.warmup import relative_rate


@dataclass(frozen=True)
class Slopes:
    """Slopes of the losses in the logarithms of the hyperparameters at one sync. Arrays are [J].

    Args:
        values: the slopes.
        significance: standard errors that each is away from 0; NaN where that cannot be told.
        explored: which hyperparameters have a slope at all.
    """

    values: Array
    significance: Array
    explored: Flags


@dataclass(frozen=True)
class RegressionController(SlopeController):
    """The default controller: slopes by least squares, and a posterior over the right peak of every learning rate.

    The slope b of the replicas' losses on the logarithms of their multipliers is found over all hyperparameters jointly
    (with ``ridge`` where there are too few replicas to separate them). Where replicas come in pairs, each slope is
    found from the replicas that depart in that hyperparameter.

    For a learning rate the slopes are evidence on its right peak, from the first sync on, and μ goes to a cautious
    quantile of the posterior: up by a bounded step at a sync, because a jump can break the model, and down at once.
    ``rate`` bounds both. The evidence is where a rising learning rate turns from too low to too high, so a schedule
    without a warm-up gets one.

    Other scalars follow their slopes later, by default from 30 % to 90 % of the run (until ``stop_at``, from a third of
    it): a regulariser helps once there is something to regularise, and before that less of it always looks better.
    Outside its part of the run a hyperparameter is not explored: all replicas have its base value.
    ``docs/controller.md`` has the reasons.

    Args:
        ridge: regularisation of the joint regression; the other arguments are those of :class:`SlopeController`.
    """

    reads: ClassVar[Literal["losses"]] = "losses"
    ridge: float = 1e-3
    settings: RegressionSettings = field(default_factory=RegressionSettings, kw_only=True)

    _settings_kind: ClassVar[type[SlopeSettings]] = RegressionSettings

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_plain(self, ridge=check_positive("ridge", self.ridge))

    def prepare(self, run: Run) -> Run:
        """Return ``run`` with early syncs, pairs, and the steps between which replicas differ."""
        run = super().prepare(run)
        in_pairs = run.probed and run.gradients != "local"
        return replace(run, early=self._early_syncs(run), in_pairs=in_pairs, departs=self._departs(run))

    def _early_syncs(self, run: Run) -> tuple[int, ...]:
        """Return the syncs within the first cycle, by default after an eighth, a quarter and a half of it.

        A learning rate that is far too high must be noticed before it does damage that no later one repairs. Only with
        a probe: the mean training loss of so few steps is that of the parameters at their start.
        """
        if self.start_at or not run.probed or not run.moves_rates:
            return ()
        steps = {round(run.sync_every * share) for share in self.settings.early_syncs}
        return tuple(sorted(steps - {0, run.sync_every}))

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

        rates = between(*self.rate_steps(run), from_start=True)
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
        return moves_others or (run.moves_rates and super().active(run, step))

    def start(self, count: int, run: Run | None = None) -> State:
        """Return the state before the first update, for ``count`` hyperparameters.

        log_likelihood: over the grid of log θ, empty before the first observation. path_length: see
        :func:`.peak_posterior.path_length`. slow: whether a smaller learning rate was better once, so that μ may rise
        only slowly. signs: running mean of the slopes' signs. noise: see :func:`.least_squares.updated_noise`.
        level: mean loss at the last sync. stability: see :class:`.stability.Stability`.
        """
        per_rate: State = {"log_likelihood": [[] for _ in range(count)], "path_length": [None] * count}
        per_rate |= {"slow": [False] * count}
        shared: State = {"signs": [0.0] * count, "noise": [0.0, 0], "level": None, "stability": None}
        return {**super().start(count, run), **per_rate, **shared}

    def update(self, run: Run, state: State, seen: Observation) -> State:
        """Return the state after a sync; the module's docstring has its parts."""
        settings, logs, noise = self.settings, np.log(seen.multipliers), state["noise"]
        if run.in_pairs:
            equal = ~logs.any(axis=0)  # the replicas that train with the base values: they differ by noise
            noise = updated_noise(noise, without_outliers(seen.losses, settings)[equal], settings)
        slopes = self._slopes_of_pairs(seen.losses, logs, noise) if run.in_pairs else self._joint_slopes(seen, logs)
        slopes, signs = self._with_sign_significance(state, slopes)
        signal = np.sign(slopes.values) * np.minimum(slopes.significance, settings.largest_significance)
        moved = self._moved(run, state, signal, slopes.significance, slopes.explored, seen)
        moved |= self._rate_entries(run, state, seen, slopes, noise, moved)
        return {**moved, "signs": signs.tolist(), "noise": noise}

    def _joint_slopes(self, seen: Observation, logs: Array) -> Slopes:
        """Return the slopes of all hyperparameters, found jointly from all replicas."""
        explored = np.ptp(logs, axis=1) > 0
        values, significance = np.zeros(len(logs)), np.zeros(len(logs))
        if explored.any():
            found = regress(seen.losses, logs[explored], self.ridge, self.settings)
            values[explored] = usable_slopes(found, self.settings)
            significance[explored] = significances(seen.losses, logs[explored], values[explored], self.settings)
        return Slopes(values, significance, explored)

    def _slopes_of_pairs(self, losses: Array, logs: Array, noise: list[float]) -> Slopes:
        """Return the slope of each hyperparameter from the replicas that depart in it.

        Errors come from the noise estimate and from the residual of the straight line.
        """
        settings, count = self.settings, len(logs)
        values, significance, explored = np.zeros(count), np.zeros(count), np.zeros(count, bool)
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
            significance[index] = normal_significance(slope, error, freedom)[0] if freedom else math.nan
        return Slopes(values, significance, explored)

    def _with_sign_significance(self, state: State, slopes: Slopes) -> tuple[Slopes, Array]:
        """Return the slopes and the running mean of their signs.

        Where there are too few replicas to estimate errors (NaN), a slope is significant if its sign persists.
        """
        decay, signs = self.settings.sign_decay, np.asarray(state["signs"])
        signs = np.where(slopes.explored, decay * signs + (1 - decay) * np.sign(slopes.values), signs)
        persistence = _sign_persistence(slopes.values, signs, np.asarray(state["observations"]) + 1, decay)
        significance = np.where(np.isnan(slopes.significance), persistence, slopes.significance)
        return replace(slopes, significance=significance), signs

    def _rate_entries(
        self, run: Run, state: State, seen: Observation, slopes: Slopes, noise: list[float], moved: State
    ) -> State:
        """Return the entries of all learning rates after a sync, and those that they share."""
        settings = self.settings
        gates = noise_gate(
            np.asarray(moved["s"]), np.asarray(moved["observations"]), settings.moment_weight, settings.noise_demand
        )
        before, level = state["level"], mean_level(seen.losses, settings)
        gain = before - level if run.probed and before is not None and level is not None else 0.0
        rates = [index for index, peak in enumerate(run.peaks) if peak is not None]
        # A cycle's gain is the work of all learning rates together, and an explosion tells only the sign of a slope.
        size_is_known = len(rates) == 1 and not has_explosion(seen.losses, settings)
        stability = None if state["stability"] is None else Stability.of(state["stability"])
        entries = {name: list(state[name]) for name in ("log_likelihood", "path_length", "slow")}
        entries["mu"] = list(moved["mu"])
        for index in rates:
            slope, significance = float(slopes.values[index]), float(slopes.significance[index])
            found, elasticity = None, None
            if slopes.explored[index]:
                found = peak_posterior.evidence(slope, significance, float(gates[index]), settings)
            if size_is_known:
                elasticity = _elasticity(slope, significance, gain)
                if run.probed and found is not None and level is not None:
                    deviation = noise_deviation(noise, abs(level), settings)[0]
                    rate = relative_rate(run, seen, index, settings)
                    stability = self._judged(run, seen, stability, Cycle(level, slope, found, rate, deviation))
            own = {name: state[name][index] for name in entries}
            for name, entry in self._rate_entry(run, seen, index, own, found, elasticity, stability).items():
                entries[name][index] = entry
        return {
            **entries,
            "level": before if level is None else level,
            "stability": stability and stability.state_dict(),
        }

    def _judged(self, run: Run, seen: Observation, stability: Stability | None, cycle: Cycle) -> Stability:
        """Return the judgement of stability after a cycle. The early syncs only give the initial level."""
        stability = stability or Stability(cycle.level)
        if seen.step < run.sync_every:
            return stability
        early = seen.step < self.settings.stability_from * self.rate_steps(run)[1] - STEP_TOLERANCE
        span = max(round(self.settings.plateau_span * (run.total_steps or 0) / run.sync_every), 1)
        return stability.after(cycle, early=early, span=span, settings=self.settings)

    def _rate_entry(
        self,
        run: Run,
        seen: Observation,
        index: int,
        own: State,
        found: float | None,
        elasticity: float | None,
        stability: Stability | None,
    ) -> State:
        """Return the entries of one learning rate after a sync.

        Args:
            own: its entries before.
            found: evidence of its slope; None if it was not explored.
            elasticity: see :func:`.peak_posterior.updated`.
            stability: judgement after this sync; None if there is none.
        """
        settings, total, cycle = self.settings, run.total_steps or 1, run.steps_since_sync(seen.step)
        rate = relative_rate(run, seen, index, settings)
        length = peak_posterior.path_length(own["path_length"], rate, seen.step, cycle)
        if found is None:
            return {**own, "path_length": length}
        log_likelihood, (first, last) = own["log_likelihood"], self.rate_steps(run)
        slow = own["slow"] or found > settings.slow_rise_evidence
        rise = settings.largest_move
        if slow:
            rise = min(100 * settings.slow_rise * run.sync_every / total, settings.largest_move)
        plateau = stability is not None and stability.plateau
        if plateau and seen.step <= settings.plateau_until * last + STEP_TOLERANCE:
            log_likelihood = peak_posterior.shifted(log_likelihood, rise, settings)
        elif found != 0 and seen.step >= first - STEP_TOLERANCE:
            turn = peak_posterior.turning_point(length, rate, cycle, total, settings)
            share = run.sync_every / total
            log_likelihood = peak_posterior.updated(log_likelihood, turn, found, share, elasticity, settings)
        highest = math.inf if stability is None else stability.highest_rate(settings)
        target = min(peak_posterior.chosen(log_likelihood, settings), math.log(highest))
        mu = self._towards(target, own["mu"], rise)
        return {"mu": mu, "log_likelihood": log_likelihood, "path_length": length, "slow": slow}

    def _towards(self, target: float, mu: float, most: float) -> float:
        """Return μ after a move towards ``target``: up by at most ``most``, down at once; ``rate`` bounds both."""
        fall, rise = (math.inf, most) if self.rate is None else (self.rate, self.rate)
        return min(max(mu + min(max(target - mu, -fall), rise), -self.limit), self.limit)


def _sign_persistence(slopes: Array, signs: Array, observations: Array, decay: float) -> Array:
    """Return how far the running mean of signs is from that of random signs, in standard deviations.

    0 where the mean has not the sign of the last slope.
    """
    k = np.maximum(observations, 1)
    mean = signs / (1 - decay**k)
    variance = (1 - decay) / (1 + decay) * (1 + decay**k) / (1 - decay**k)
    found: Array = np.maximum(mean * np.sign(slopes), 0) / np.sqrt(variance)
    return found


def _elasticity(slope: float, significance: float, gain: float) -> float | None:
    """Return the relative change of a cycle's gain for each e-fold of the learning rate.

    Only the significant part of the slope counts. None if nothing is significant or nothing was gained.
    """
    return -slope * (1 - 1 / significance**2) / gain if gain > 0 and significance > 1 else None
