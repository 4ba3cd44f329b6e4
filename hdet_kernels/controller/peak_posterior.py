"""What is believed of the right peak of a learning rate, from the slopes of the losses while it climbs.

The learning rate that looks best over the next T steps falls as training goes on. In a run of S steps with cycles of
1.25 % of it, a larger one looked better until the way that the parameters had gone, the sum of the learning rates of
all steps and of one cycle more, was about 0.18·√S times the right peak, and a smaller one from then on: whatever the
schedule and wherever it began (``docs/controller.md``). So every sync speaks for a right peak that is higher or lower
than the way so far makes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: The way at which a task turns, over the right peak and √S, where cycles are this share of the run; it grows with
#: their length by about this power.
WAY, USUAL, GROWTH = 0.18, 0.0125, 0.8

#: In runs of more steps than these the way is longer by this power besides: prudence. The learning rate at which a task
#: breaks is the same however long it is trained, and the right peak comes near it.
LONG, LONGER = 2000, 0.5

#: How far off that may be, as a standard deviation of the logarithm: it differs from task to task, and not from sync to
#: sync.
SLACK = 0.4

#: How far off a sign may be from where its task turns, as a scale of the logarithm.
JITTER = 0.2

#: How far off a start may be before anything was heard: the mean of |log θ| where it is too high and where it is too
#: low.
TOO_HIGH, TOO_LOW = 2.0, 3.0

#: The share of what is believed that is below the peak that is chosen: one that is too high costs more than one that is
#: too low by as much, and can break what is trained.
PRUDENT = 0.35

#: Signs that are wrong however sure they look.
WRONG = 0.03

#: A sync counts in full if its cycle is at least this share of the run: many short ones tell no more than a few.
WHOLE = 0.0125

#: How far ahead the turn is, as a logarithm, for each unit of the elasticity of what a cycle gains, and how far behind
#: for each that it is negative, with this standard deviation.
AHEAD, BEHIND, BLUR = 3.0, 1.0, 0.5

#: From this elasticity on the turn is so far ahead at least; from the other down, as far behind as that says at least:
#: where next to nothing is gained its size is noise. Above the last, gains grow faster than the learning rate, as where
#: a plateau is left: that says nothing.
FAR, AT_LEAST = 0.6, 1.5
PAST, FASTER = -0.75, 1.25

#: log θ, the right peak over the one given.
GRID: Array = np.linspace(-6.0, 6.0, 241)


def _before_anything_was_heard() -> Array:
    lower, higher = np.exp(GRID / TOO_HIGH) * (GRID < 0), np.exp(-GRID / TOO_LOW) * (GRID > 0)
    believed: Array = PRUDENT * lower / lower.sum() + (1 - PRUDENT) * higher / higher.sum()
    return believed


#: How likely each of them is before anything was heard: such that the start is what is chosen.
AT_FIRST = _before_anything_was_heard()


def way(before: float | None, value: float, step: int, cycle: int) -> float:
    """The way gone after ``step`` steps, the last ``cycle`` of them with this learning rate; ``before`` them, if that
    is known. Steps with a higher one count as made with this: they went to and fro."""
    steps = value * (step - cycle)
    return (steps if before is None else min(before, steps)) + value * cycle


def turns_at(cycle: int, total_steps: int) -> float:
    """The way at which a task turns, over its right peak, where a sync follows so many steps on the one before."""
    longer = max(total_steps / LONG, 1.0) ** LONGER
    return WAY * math.sqrt(total_steps) * longer * (cycle / (USUAL * total_steps)) ** GROWTH


def turning_point(gone: float, value: float, cycle: int, total_steps: int) -> float:
    """log θ for which a task turns here, after a way ``gone`` whose last ``cycle`` steps were made with ``value``, both
    over the peak of the schedule."""
    return math.log(max((gone + value * cycle) / turns_at(cycle, total_steps), 1e-300))


def heard(slope: float, significance: float, gate: float) -> float:
    """What a slope says, from −1 (a larger value would surely have been better) to 1 (a smaller one)."""
    return math.copysign((1 - 2 * WRONG) * gate * math.erf(significance / math.sqrt(2)), slope)


def updated(
    logs: Sequence[float], turn: float, said: float, cycle: float, elasticity: float | None = None
) -> list[float]:
    """How likely all that was heard is, as a logarithm, for each point of ``GRID`` at which the task may turn, none
    before anything was heard: after one thing more was :func:`heard` at a turning point, from a cycle that lasts this
    share of the run.

    ``elasticity``, where it is known: the share of what the cycle gained by which it would have gained more for each
    e-fold of the learning rate, which tells how far away the turn is.
    """
    if elasticity is not None and elasticity > FASTER:
        return list(logs)
    before = np.asarray(logs) if len(logs) else np.zeros(len(GRID))
    if elasticity is None:
        too_high = 1 / (1 + np.exp(np.clip((GRID - turn) / JITTER, -50, 50)))
        likely = 0.5 + said * (too_high - 0.5)
    else:
        likely = 0.5 * (1 - abs(said)) + abs(said) * _around_turn(turn, elasticity)
    after = before + min(cycle / WHOLE, 1.0) * np.log(likely)
    return list((after - after.max()).tolist())


def raised(logs: Sequence[float], by: float) -> list[float]:
    """What is believed where the task turns later than all that was heard says, by so much of the logarithm."""
    return list(np.interp(GRID - by, GRID, logs).tolist()) if len(logs) else []


def _around_turn(turn: float, elasticity: float) -> Array:
    """How likely what a cycle gained is, over the most likely, for each point of ``GRID``."""
    if elasticity >= FAR:
        off = np.minimum(GRID - turn - AT_LEAST, 0.0)
    elif elasticity <= PAST:
        off = np.maximum(GRID - turn - BEHIND * PAST, 0.0)
    else:
        off = GRID - turn - (AHEAD if elasticity > 0 else BEHIND) * elasticity
    found: Array = np.exp(-0.5 * (np.clip(off, -50, 50) / BLUR) ** 2)
    return found


def chosen(logs: Sequence[float]) -> float:
    """The prudent quantile of what is believed of log θ: where the task turns is off from it by ``SLACK``. 0 before
    anything was heard."""
    if not len(logs):
        return 0.0
    weights = AT_FIRST * (_around(SLACK) @ np.exp(np.asarray(logs)))
    below = np.cumsum(weights) - 0.5 * weights
    return float(np.interp(PRUDENT * weights.sum(), below, GRID))


@cache
def _around(deviation: float) -> Array:
    """For each point of ``GRID`` a normal distribution around it, over all of them."""
    found: Array = np.exp(-0.5 * ((GRID[:, None] - GRID) / deviation) ** 2)
    return found / found.sum(axis=1, keepdims=True)
