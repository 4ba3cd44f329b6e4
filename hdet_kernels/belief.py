"""What is believed of the right peak of a learning rate, from the signs of the slopes of the losses while it climbs.

The learning rate that looks best over the next T steps falls with the steps t: in a run of S steps, with T = 1.25 % of
it, it was about 0.09·S^(2/3)/(t + T) of the right peak, and lower for shorter cycles (``docs/controller.md``). So an η
for which a smaller one would have been better speaks for a right peak that is lower than that makes it, and otherwise
for a higher one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: The greedy learning rate over the right peak, times t + T, over S^(2/3), where T is this share of the run; it grows
#: with T by about this power.
GREEDY, USUAL, GROWTH = 0.09, 0.0125, 0.8

#: How far off that may be, as a standard deviation of log η: it differs from task to task, and not from sync to sync.
SLACK = 0.5

#: How far off a sync may be from where its task turns, as a scale of log η.
JITTER = 0.2

#: How far off a start may be before anything was heard: the mean of |log θ| where it is too high and where it is too
#: low, which are as likely. To fall too far costs a few syncs, to fall too little can break what is trained.
TOO_HIGH, TOO_LOW = 3.0, 1.5

#: Signs that are wrong however sure they look.
WRONG = 0.03

#: A sync counts in full if its cycle is at least this share of the run: many short ones tell no more than a few.
WHOLE = 0.0125

#: What a cycle gains counts as growing by at most this share of itself for each e-fold of η.
LINEAR = 0.9

#: log θ, the right peak over the one given.
GRID: Array = np.linspace(-6.0, 6.0, 241)


def _before_anything_was_heard() -> Array:
    lower, higher = np.exp(GRID / TOO_HIGH) * (GRID < 0), np.exp(-GRID / TOO_LOW) * (GRID > 0)
    believed: Array = lower / lower.sum() + higher / higher.sum()
    believed[GRID == 0] = believed.max()
    return believed


#: How likely each of them is before anything was heard.
AT_FIRST = _before_anything_was_heard()


def turning_point(value: float, step: int, cycle: int, total_steps: int) -> float:
    """log θ for which ``value``, as a share of the peak of its schedule, is the greedy one after ``step`` steps, the
    last ``cycle`` of them since the sync before."""
    greedy = GREEDY * (cycle / (USUAL * total_steps)) ** GROWTH * total_steps ** (2 / 3) / (step + cycle)
    return math.log(max(value / greedy, 1e-300))


def ahead(elasticity: float) -> float:
    """How far the greedy learning rate is above this one, as log: ``elasticity`` is the share of what the last cycle
    gained by which it would have gained more for each e-fold. Where gains are a parabola in η with its top at η_c, that
    is (1 − x)/(1 − x/2) at x = η/η_c."""
    share = min(max(elasticity, 0.0), LINEAR)
    return math.log((1 - share / 2) / (1 - share))


def opposed(logs: Sequence[float]) -> bool:
    """Whether a smaller learning rate was ever better, as far as that was heard."""
    return len(logs) > 0 and logs[-1] < -0.5


def heard(slope: float, significance: float, gate: float) -> float:
    """What a slope says, from −1 (a larger value would surely have been better) to 1 (a smaller one)."""
    return math.copysign((1 - 2 * WRONG) * gate * math.erf(significance / math.sqrt(2)), slope)


def updated(logs: Sequence[float], turn: float, said: float, cycle: float) -> list[float]:
    """How likely all that was heard is, as a logarithm, for each point of ``GRID`` at which the task may turn, none
    before anything was heard: after one thing more was :func:`heard` at a turning point, from a cycle that lasts this
    share of the run."""
    before = np.asarray(logs) if len(logs) else np.zeros(len(GRID))
    too_high = 1 / (1 + np.exp(np.clip((GRID - turn) / JITTER, -50, 50)))
    after = before + min(cycle / WHOLE, 1.0) * np.log(0.5 + said * (too_high - 0.5))
    return list((after - after.max()).tolist())


def median(logs: Sequence[float]) -> float:
    """Of what is believed of log θ: where the task turns is off from it by ``SLACK``. 0 before anything was heard."""
    if not len(logs):
        return 0.0
    weights = AT_FIRST * (_around(SLACK) @ np.exp(np.asarray(logs)))
    below = np.cumsum(weights) - 0.5 * weights
    return float(np.interp(0.5 * weights.sum(), below, GRID))


@cache
def _around(deviation: float) -> Array:
    """For each point of ``GRID`` a normal distribution around it, over all of them."""
    found: Array = np.exp(-0.5 * ((GRID[:, None] - GRID) / deviation) ** 2)
    return found / found.sum(axis=1, keepdims=True)
