"""Fit the constants of the controller: each is what the tasks of the zoo measure, without the family of one of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.markdown import table
from bench.quality import held_out, observations
from bench.quality.designs import replay
from bench.quality.excess import CAP
from bench.quality.observations import Observed
from bench.quality.tasks import TASKS
from hdet_kernels.controller.regression import RegressionController, Soundness, evidence, path_length
from hdet_kernels.controller.settings import RegressionSettings

# Runs that tell where the favoured direction turns: within so many octaves of the best learning rate.
TURNING_RUNS = 1.7
# Standard errors from which on the sign of a slope should be right.
CLEAR_SIGN = 3.0
# Octaves above and below the best at which the costs of a wrong learning rate are compared.
COST_OCTAVES = (1.0, 2.0)
# Starts at which it is counted how often training is judged broken, in octaves from the best, and what is near them.
AT_BEST, TEN_LOW, TEN_HIGH, THIRTY_HIGH = 0.0, -math.log2(10), math.log2(10), math.log2(30)
NEAR = 0.5
# Candidates of ``fall_share`` and ``fall_noise``.
FALL_SHARES = tuple(round(0.05 * k, 2) for k in range(2, 20))
FALL_NOISES = (4.0, 8.0, 16.0)
# Candidates of ``cut``, and the starts that they are compared from, over the best.
CUTS = (3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
CUT_STARTS = (1.0, 3.0, 10.0, 30.0)

BREAKS = [[RegressionSettings(fall_share=share, fall_noise=noise) for share in FALL_SHARES] for noise in FALL_NOISES]

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Measured:
    """The figures of one task.

    Args:
        turn: Logarithm of the path length at the turn over √steps and the right peak; mean over runs near the best.
        wrong_signs: Share of clear signs of slopes that disagree with the side of the turn of their run.
        too_high, too_low: Mean excess of learning rates one and two octaves above and below the best, in percent.
        turned: Highest mean of the first slopes over their errors, while they are judged, of each run at the best.
        doubtful: That mean where doubts are raised, of each run at the best.
        after_cut: Mean excess from ``CUT_STARTS``, in percent, by the factor of a return.
        broken: By start, which pairs of ``FALL_SHARES`` and ``FALL_NOISES`` judge each run broken: [runs, shares,
            noises]. Starts outside the grid have no runs.
    """

    turn: float
    wrong_signs: float
    too_high: float
    too_low: float
    turned: list[float]
    doubtful: list[float]
    after_cut: dict[float, float]
    broken: dict[float, Flags]


def measure(seen: Observed, settings: RegressionSettings) -> Measured:
    """Return the figures of one task; of ``settings`` only what is not fitted matters."""
    turns, wrong = zip(*(turn_of(seen, run, settings) for run in seen.near(0.0, TURNING_RUNS)), strict=True)
    courses = {
        start: [played(seen, run, probe) for run in seen.near(start, NEAR) for probe in (True, False)]
        for start in (AT_BEST, TEN_LOW, TEN_HIGH, THIRTY_HIGH)
    }
    return Measured(
        turn=float(np.mean(turns)),
        wrong_signs=float(np.mean(wrong)),
        too_high=float(np.mean([seen.excess(octaves) for octaves in COST_OCTAVES])),
        too_low=float(np.mean([seen.excess(-octaves) for octaves in COST_OCTAVES])),
        turned=[highest_mean_slope(course, settings) for course in courses[AT_BEST]],
        doubtful=[mean_slope_at_doubt(course, seen, settings) for course in courses[AT_BEST]],
        after_cut={cut: after_cut(seen, cut) for cut in CUTS},
        broken={
            start: np.array([broken(c, len(seen.step)) for c in found]) for start, found in courses.items() if found
        },
    )


def turn_of(seen: Observed, run: int, settings: RegressionSettings) -> tuple[float, float]:
    """Return where the favoured direction turns in a run, and the share of clear signs on the wrong side of it.

    The turn is the one that makes the signs of the slopes most likely: logarithm of the path length over √steps and the
    right peak. The path length of a run that turns before the first slope or never is that of the first or last sync.
    """
    lengths, found, clear, length = [], [], [], 0.0
    for at, step in enumerate(seen.step):
        length = path_length(length, float(seen.rate[at, run]), int(step), seen.sync_every)
        slope, error = float(seen.slope[at, run]), float(seen.error[at, run])
        if at and math.isfinite(slope):  # the first cycle has no displacement before it
            significance = abs(slope) / error if error > 0 else math.inf
            lengths.append(length)
            found.append(evidence(slope, significance, settings))
            clear.append(significance > CLEAR_SIGN)
    signs = np.array(found)
    before = np.concatenate([[0.0], np.cumsum(np.log(0.5 - 0.5 * signs))])  # slopes up to the turn are negative
    after = np.concatenate([np.cumsum(np.log(0.5 + 0.5 * signs)[::-1])[::-1], [0.0]])
    turn = int(np.argmax(before + after))
    beside = [lengths[max(turn - 1, 0)], lengths[min(turn, len(lengths) - 1)]]
    side = np.where(np.arange(len(signs)) < turn, -1.0, 1.0)
    wrong = (np.sign(signs) != side)[np.array(clear)]
    right_peak = 2.0 ** -float(seen.octaves[run])  # over that of the run
    log_length = float(np.mean(np.log(beside)))
    return log_length - 0.5 * math.log(seen.steps) - math.log(right_peak), float(wrong.mean()) if wrong.size else 0.0


def played(seen: Observed, run: int, probe: bool) -> list[Soundness]:
    """Return the course of a run's losses after each sync, up to the first loss that is not finite.

    The controller sees every sync, but nothing that it does comes into effect.
    """
    controller = RegressionController()
    described, state = seen.described(controller, probe), controller.start(1)
    courses = []
    for at in range(len(seen.step)):
        observation = seen.observation(at, run, probe)
        if not np.isfinite(observation.losses).all():
            break
        state = controller.update(described, state, observation)
        courses.append(Soundness.of(state["soundness"]))
    return courses


def highest_mean_slope(courses: list[Soundness], settings: RegressionSettings) -> float:
    """Return the ``turned_mean`` from which on the first slopes of a run would not have asked for less at any sync."""
    judged = [c for c in courses if settings.turned_from <= c.path <= settings.turned_until]
    return max((course.evidence(settings) for course in judged), default=-math.inf)


def mean_slope_at_doubt(courses: list[Soundness], seen: Observed, settings: RegressionSettings) -> float:
    """Return the ``doubt_mean`` from which on a run would not have raised a doubt."""
    at = int(np.searchsorted(seen.step, settings.doubt_at * seen.steps))
    gained = at < len(courses) and courses[at].gain > settings.fall_noise * courses[at].usual_change
    return courses[at].evidence(settings) if gained else -math.inf


def after_cut(seen: Observed, cut: float) -> float:
    """Return the mean excess from ``CUT_STARTS``, in percent, where a return lowers the learning rate by ``cut``."""
    controller = RegressionController(settings=RegressionSettings(cut=cut))
    starts = [start for start in CUT_STARTS if seen.reaches(math.log2(start))]
    return _mean(
        min(replay(seen, controller, start, int(seed), probe=False), CAP)
        for start in starts
        for seed in np.unique(seen.seeds)
    )


def broken(courses: list[Soundness], syncs: int) -> Flags:
    """Return with which pairs of candidates a run is judged broken at any sync: [shares, noises]."""
    if len(courses) < syncs:  # a loss is not finite
        return np.ones((len(FALL_SHARES), len(FALL_NOISES)), dtype=np.bool_)
    found = np.zeros((len(FALL_SHARES), len(FALL_NOISES)), dtype=np.bool_)
    for j, candidates in enumerate(BREAKS):
        for i, settings in enumerate(candidates):
            found[i, j] = any(before.fell_back(now.last, settings) for before, now in pairwise(courses))
            if not found[i, j]:  # nor with any larger share
                break
    return found


# Largest share of tasks at which a rule may act though the learning rate is right, or too low.
FALSE_ALARMS = 0.05
# The same for the first slopes, whose alarms come before there is anything else to go by.
FEWER_ALARMS = 0.02
# The same for doubts: a false one costs the steps of a trial.
DOUBTS = 0.25
# Digits of fitted constants.
DIGITS = 3
Fit = dict[str, float]


def fit(tasks: Sequence[Measured]) -> Fit:
    """Return the constants that these tasks measure."""
    if len(tasks) < 2:
        raise ValueError(f"{len(tasks)} task is left: expected at least 2 of other families; observe more tasks")
    turns = [task.turn for task in tasks]
    cost_ratio = _mean(task.too_high for task in tasks) / _mean(task.too_low for task in tasks)
    share, noise = break_pair(tasks)
    found = {
        "turning_length": math.exp(_mean(turns)),
        "task_deviation": float(np.std(turns, ddof=1)),
        "sign_error": _mean(task.wrong_signs for task in tasks),
        "quantile": 1 / (1 + cost_ratio),
        "turned_mean": rarely_above([task.turned for task in tasks], 0.05, FEWER_ALARMS),
        "doubt_mean": rarely_above([task.doubtful for task in tasks], 0.05, DOUBTS),
        "cut": min(CUTS, key=lambda cut: _mean(task.after_cut[cut] for task in tasks)),
        "fall_share": share,
        "fall_noise": noise,
    }
    return {name: float(f"{value:.{DIGITS}g}") for name, value in found.items()}


def rarely_above(found: Sequence[Sequence[float]], step: float, alarms: float) -> float:
    """Return the smallest positive multiple of ``step`` that runs at the best learning rate are nearly never above.

    Args:
        found: of every task the highest value of each run, with a probe and without. Every task counts alike.
        step: between two candidates.
        alarms: the largest share of runs that may be above it.
    """
    for multiple in range(1, 1000):
        if _mean(_mean(value > multiple * step for value in values) for values in found) <= alarms:
            return multiple * step
    raise ValueError(f"more than {alarms:.0%} of the runs at the best learning rate are above {1000 * step:g}")


def break_pair(tasks: Sequence[Measured]) -> tuple[float, float]:
    """Return the ``fall_share`` and ``fall_noise`` that find most of what is 10 and 30 times too high.

    They may nearly never judge a run broken whose learning rate is the best or ten times too low. For each noise that
    is the smallest such share.
    """
    alarms = np.maximum(_judged(tasks, (AT_BEST,)), _judged(tasks, (TEN_LOW,)))
    found = _judged(tasks, (TEN_HIGH, THIRTY_HIGH))
    allowed = [(int(np.argmax(quiet)), noise) for noise, quiet in enumerate((alarms <= FALSE_ALARMS).T) if quiet.any()]
    if not allowed:
        raise ValueError("every fall_share judges more than 5 % of the tasks broken at their best learning rate")
    share, noise = max(allowed, key=lambda pair: float(found[pair]))
    return FALL_SHARES[share], FALL_NOISES[noise]


def _judged(tasks: Sequence[Measured], starts: Iterable[float]) -> observations.Array:
    """Return the share of runs from these starts that each pair judges broken, every task counting alike."""
    shares = [task.broken[start].mean(axis=0) for task in tasks for start in starts if start in task.broken]
    found: observations.Array = np.mean(shares, axis=0)
    return found


def leave_out(
    measured: Mapping[str, Measured], tasks: Iterable[str], family: Callable[[str], set[str]] = held_out.family
) -> dict[str, Fit]:
    """Return, for each of ``tasks``, the constants fitted without its family."""
    return {task: fit([found for name, found in measured.items() if name not in family(task)]) for task in tasks}


def fit_table(whole: Fit, without: Mapping[str, Fit]) -> str:
    """Return a table of each constant: fitted over all tasks, its range without a family, and its default."""
    default = RegressionSettings()
    rows = []
    for name, value in whole.items():
        found = [constants[name] for constants in without.values()]
        rows.append([f"`{name}`", f"{value:g}", f"{min(found):g} – {max(found):g}", f"{getattr(default, name):g}"])
    return table(["constant", "all tasks", "without a family", "default"], rows)


def write_fit(source: Path, out: Path) -> str:
    """Fit the constants to a file of observations, write them for every task, and return a table of them."""
    settings = RegressionSettings()
    measured = {task: measure(seen, settings) for task, seen in observations.read(source).items()}
    without = leave_out(measured, TASKS)
    out.write_text(json.dumps(without, indent=1) + "\n")
    return fit_table(fit(list(measured.values())), without)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
