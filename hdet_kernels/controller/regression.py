"""The default controller: what the slopes of the replicas' losses say of learning rates, and of other scalars."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from hdet_kernels.checks import check_positive
from hdet_kernels.controller import peak_posterior as belief
from hdet_kernels.controller.least_squares import (
    explodes,
    level_of,
    noise,
    noise_scale,
    normal,
    ordinary,
    regress,
    significances,
    unexplained,
)
from hdet_kernels.controller.protocol import EDGE, Array, Observation, Run, State
from hdet_kernels.controller.slopes import LARGEST_MOVE, TRUSTED, Flags, SlopeController, countable, noise_gate
from hdet_kernels.controller.stability import SPAN, Terrain
from hdet_kernels.controller.warmup import over_peak

#: What μ of a learning rate rises by at most in each percent of the run after a smaller one was better once, and so is
#: near the turn; and what counts as having been better.
LATER_MOVE, OPPOSED = 0.2, 0.25

#: The share of the run until which scalars other than learning rates are moved, and of that the share from which on.
OTHERS_UNTIL, OTHERS_FROM = 0.9, 1 / 3

#: How much of what a straight line leaves unexplained counts as an error where losses have none themselves.
CROOKED = 0.5

#: The weight of what was before in the running mean of signs.
CONSISTENT = 0.5

#: The mean square of the significances of a learning rate's slopes from which on they are heard: noise has 1.
DEMAND = 1.5

#: From which share of its part of the run on a learning rate may be held where it is near what breaks training, and up
#: to which it may be raised on a plateau: near the end all gain little.
WATCHED_FROM, RAISED_UNTIL = 0.25, 0.8

#: Shares of the first cycle at which learning rates are looked at besides.
EARLY = (1 / 8, 1 / 4, 1 / 2)


@dataclass(frozen=True)
class RegressionController(SlopeController):
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
        seen = {"signs": [0.0] * count, "noise": [0.0, 0], "level": None, "terrain": None}
        return {**super().start(count, run), **heard, **seen}

    def update(self, run: Run, state: State, seen: Observation) -> State:
        state = {**self.start(len(seen.base)), **state}  # checkpoints of earlier versions lack entries
        logs, known = np.log(seen.multipliers), state["noise"]
        if run.in_pairs:
            known = noise(known, ordinary(seen.losses)[~logs.any(axis=0)])
        slopes, sure, explored = self._apart(seen.losses, logs, known) if run.in_pairs else self._jointly(seen, logs)
        signs = np.asarray(state["signs"])
        signs = np.where(explored, CONSISTENT * signs + (1 - CONSISTENT) * np.sign(slopes), signs)
        # Where there are too few replicas to know errors by, those signs are sure that stay the same.
        sure = np.where(np.isnan(sure), _consistency(slopes, signs, np.asarray(state["looks"]) + 1), sure)
        moved = self._moved(run, state, np.sign(slopes) * np.minimum(sure, TRUSTED), sure, explored, seen)
        gate = noise_gate(np.asarray(moved["s"]), np.asarray(moved["looks"]), DEMAND)
        before, level = state["level"], level_of(seen.losses)
        gain = before - level if run.probed and before is not None and level is not None else 0.0
        rates = [index for index, peak in enumerate(run.peaks) if peak is not None]
        # What a cycle gained is the work of all learning rates, and of an explosion only the sign of a slope is known.
        tells_how_far = len(rates) == 1 and not explodes(seen.losses)
        terrain = None if state["terrain"] is None else Terrain.of(state["terrain"])
        entries = {name: list(state[name]) for name in ("belief", "way", "opposed")} | {"mu": list(moved["mu"])}
        for index in rates:
            was = {name: state[name][index] for name in entries}
            said = belief.heard(slopes[index], sure[index], gate[index]) if explored[index] else None
            elasticity = _elasticity(slopes[index], sure[index], gain) if tells_how_far else None
            if tells_how_far and run.probed and said is not None and level is not None:
                found = {"level": level, "slope": float(slopes[index]), "said": said}
                found |= {"value": over_peak(run, seen, index), "noise": noise_scale(known, abs(level))[0]}
                terrain = self._watched(run, seen, terrain, found)
            for name, entry in self._learned(run, seen, index, was, said, elasticity, terrain).items():
                entries[name][index] = entry
        kept = {"level": before if level is None else level, "terrain": terrain and terrain.state_dict()}
        return {**moved, **entries, **kept, "signs": signs.tolist(), "noise": known}

    def _learned(
        self,
        run: Run,
        seen: Observation,
        index: int,
        was: State,
        said: float | None,
        elasticity: float | None,
        terrain: Terrain | None,
    ) -> State:
        """The entries of a learning rate after what was ``said`` on it, None if it was not looked at."""
        total, cycle = run.total_steps or 1, run.steps_since_sync(seen.step)
        value = over_peak(run, seen, index)
        gone = belief.way(was["way"], value, seen.step, cycle)
        if said is None:
            return {**was, "way": gone}
        believed, (first, last) = was["belief"], self.rates_window(run)
        opposed = was["opposed"] or said > OPPOSED
        rise = min(100 * LATER_MOVE * run.sync_every / total, LARGEST_MOVE) if opposed else LARGEST_MOVE
        if terrain is not None and terrain.flat and seen.step <= RAISED_UNTIL * last + EDGE:
            believed = belief.raised(believed, rise)
        elif said != 0 and seen.step >= first - EDGE:
            turn = belief.turning_point(gone, value, cycle, total)
            believed = belief.updated(believed, turn, said, run.sync_every / total, elasticity)
        highest = math.inf if terrain is None else terrain.highest
        mu = self._towards(min(belief.chosen(believed), math.log(highest)), was["mu"], rise)
        return {"mu": mu, "belief": believed, "way": gone, "opposed": opposed}

    def _watched(self, run: Run, seen: Observation, terrain: Terrain | None, found: dict[str, float]) -> Terrain:
        """What is known of the terrain after what was found. The syncs of the first cycle say only where it began."""
        terrain = terrain or Terrain(found["level"])
        if seen.step < run.sync_every:
            return terrain
        early = seen.step < WATCHED_FROM * self.rates_window(run)[1] - EDGE
        span = max(round(SPAN * (run.total_steps or 0) / run.sync_every), 1)
        return terrain.after(**found, early=early, span=span)

    def _jointly(self, seen: Observation, logs: Array) -> tuple[Array, Array, Flags]:
        """The slopes, how many errors each is from 0 (NaN where that cannot be told), and which there are: of all
        hyperparameters by all replicas."""
        explored = np.ptp(logs, axis=1) > 0
        slopes, sure = np.zeros(len(logs)), np.zeros(len(logs))
        if explored.any():
            slopes[explored] = countable(regress(seen.losses, logs[explored], self.ridge))
            sure[explored] = significances(seen.losses, logs[explored], slopes[explored])
        return slopes, sure, explored

    def _apart(self, losses: Array, logs: Array, known: list[float]) -> tuple[Array, Array, Flags]:
        """The same of each hyperparameter by the replicas that depart in it; how sure they are, by the noise that is
        ``known`` and by what is crooked."""
        slopes, sure, explored = np.zeros(len(logs)), np.zeros(len(logs)), np.zeros(len(logs), bool)
        for row, log in enumerate(logs):
            mine = np.flatnonzero(log)
            level = level_of(losses[mine])
            if level is not None and np.ptp(log[mine]) > 0:
                explored[row] = True
                x = logs[row : row + 1, mine]
                slopes[row] = countable(regress(losses[mine], x, self.ridge))[0]
                scale, spare = noise_scale(known, abs(level))
                scale = math.hypot(scale, CROOKED * unexplained(losses[mine], x, slopes[row : row + 1]))
                error = np.array([scale / math.sqrt(x.size * x.var())])
                sure[row] = normal(slopes[row : row + 1], error, spare)[0] if spare else math.nan
        return slopes, sure, explored

    def _towards(self, believed: float, mu: float, most: float) -> float:
        fall, rise = (math.inf, most) if self.rate is None else (self.rate, self.rate)
        return min(max(mu + min(max(believed - mu, -fall), rise), -self.limit), self.limit)


def _moves_rates(run: Run) -> bool:
    return any(peak is not None for peak in run.peaks)


def _consistency(slopes: Array, signs: Array, looks: Array) -> Array:
    """How far the running mean of the signs of slopes is from that of signs by chance, in standard deviations, as far
    as it has the sign of the last."""
    k = np.maximum(looks, 1)
    mean = signs / (1 - CONSISTENT**k)
    variance = (1 - CONSISTENT) / (1 + CONSISTENT) * (1 + CONSISTENT**k) / (1 - CONSISTENT**k)
    found: Array = np.maximum(mean * np.sign(slopes), 0) / np.sqrt(variance)
    return found


def _elasticity(slope: float, sure: float, gain: float) -> float | None:
    """By what share of what the last cycle gained it would have gained more for each e-fold, from as much of the slope
    as is sure; None if nothing is, or nothing was gained."""
    return -slope * (1 - 1 / sure**2) / gain if gain > 0 and sure > 1 else None
