"""Fit the constants of the controller: each is what the tasks of the zoo measure, without the family of one of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.markdown import table
from hdet_kernels.controller.settings import RegressionSettings

from . import held_out, observations
from .measure import AT_BEST, BREAK_NOISES, BREAK_SHARES, TEN_HIGH, TEN_LOW, THIRTY_HIGH, Measured, measure
from .tasks import TASKS

# Largest share of tasks at which a rule may act though the learning rate is right, or too low.
FALSE_ALARMS = 0.05

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
        "edge_cost": edge_cost(tasks),
        "break_share": share,
        "break_noise": noise,
    }
    return {name: float(f"{value:.{DIGITS}g}") for name, value in found.items()}


def edge_cost(tasks: Sequence[Measured]) -> float:
    """Return the smallest cost, in steps of 0.01, that runs at the best learning rate nearly never see.

    Every task counts by the share of its runs that see it, with a probe and without.
    """
    for hundredths in range(1, 1000):
        cost = hundredths / 100
        if _mean(_mean(found > cost for found in task.edge_costs) for task in tasks) <= FALSE_ALARMS:
            return cost
    raise ValueError("more than 5 % of the runs at the best learning rate see a cost of 10 times what was gained")


def break_pair(tasks: Sequence[Measured]) -> tuple[float, float]:
    """Return the ``break_share`` and ``break_noise`` that find most of what is 10 and 30 times too high.

    They may nearly never judge a run broken whose learning rate is the best or ten times too low. For each noise that
    is the smallest such share.
    """
    alarms = np.maximum(_judged(tasks, (AT_BEST,)), _judged(tasks, (TEN_LOW,)))
    found = _judged(tasks, (TEN_HIGH, THIRTY_HIGH))
    allowed = [(int(np.argmax(quiet)), noise) for noise, quiet in enumerate((alarms <= FALSE_ALARMS).T) if quiet.any()]
    if not allowed:
        raise ValueError("every break_share judges more than 5 % of the tasks broken at their best learning rate")
    share, noise = max(allowed, key=lambda pair: float(found[pair]))
    return BREAK_SHARES[share], BREAK_NOISES[noise]


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
