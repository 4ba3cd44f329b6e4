"""The search for a learning rate: from slopes of the loss, one at each sync, to the factor on the schedule.

The slope b of the loss in log η, seen over a cycle of T steps, is negative where a larger step would have helped at
once and positive where a smaller one would. Its zero η_c is the *greedy* learning rate. It is not the one to train
with: noise that the end of the schedule takes away costs at once, and progress pays late. But it is a good ruler.
Noise costs in proportion to η, and what T steps gain falls as 1/t, so that η_c(t) = A/t; and A tells the peak that is
best for the whole run:

    η* = A / (h·S),   h = 0.011·√(40·T/S),   S the length of the run in steps,

for a schedule that anneals; where its end is a share e of its peak, h is larger by 1 + 3·e.

So the search drives η to where the slope vanishes, notes log(η·t) there, and goes on with schedule·η*/peak.
``docs/controller.md`` shows the measurements behind the law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

#: The sync interval at which the constants below were found, as a share of the run.
USUAL_INTERVAL = 0.025

#: Before the first sync that counts, η is at most this share of the peak, as in the first steps of OneCycleLR.
CEILING = 1 / 20

#: The share of the run at which a search ends at the latest.
UNTIL = 0.2

#: A start that is off by less than this (in log η) stays: it is within what the search can tell.
DEAD = 0.5

#: h is larger by 1 + this times the share of its peak at which a schedule ends: the best constant learning rate was a
#: quarter of the best peak of a schedule that anneals.
STAYING = 3.0

#: The most by which log η rises at a sync when the search is over: networks that are hurried break.
RISE = 0.6


@dataclass(frozen=True)
class Search:
    """Where the search for one learning rate stands. All of it are plain numbers.

    rate: η while searching; afterwards the ceiling under which the schedule comes back; None: the schedule rules.
    mu: log(η*/peak) as far as known. found: whether it is settled.
    m, size, updates: momentum of the slopes in units of ``size``, a decaying maximum of |b|, and how many there were.
    seen_at: η at the last of them.
    weight, total: decaying sums of the weights and of the weighted readings of log(η·t/S).
    signal: sum of the squared slopes over their squared errors.
    """

    rate: float | None = None
    mu: float = 0.0
    found: bool = False
    m: float = 0.0
    size: float = 0.0
    seen_at: float = 0.0
    updates: int = 0
    weight: float = 0.0
    total: float = 0.0
    signal: float = 0.0


@dataclass(frozen=True)
class Sync:
    """A sync: the slope of the loss in log η and its standard error (0: not known), the η that it belongs to, the
    step, the steps S of the run and T of a cycle, and whether no other will count."""

    slope: float
    error: float
    rate: float
    step: int
    total_steps: int
    sync_every: int
    last: bool


def begin(peak: float) -> Search:
    return Search(rate=peak * CEILING)


def searched(state: Search, sync: Sync, *, peak: float, horizon: float, enough: float, limit: float) -> Search:
    """The search after one more sync.

    q ← max(√0.7·q, |b|), and less where η fell;  u ← 0.3·u − 0.7·b/q, bias-corrected: 1 far below η_c, 0 there, −1
    above. Each sync is a reading o = log(η·t/S) + 1.5·u of weight 1.05 − |u|; earlier ones count 0.75 of the next.
    Until the weights add up to ``enough``, or until 20 % of the run: η ← η·exp(2·u)·t/(t+T). Then μ = mean(o) − log h
    − log peak; 0 if that is small, or if the slopes are no larger than their errors. From there η rises to
    schedule·e^μ by at most e^0.6 at a sync.
    """
    # Shorter cycles show less and are more: each counts less.
    share = sync.sync_every / sync.total_steps / USUAL_INTERVAL
    part = min(share, 1.0)
    if state.found:
        return replace(state, rate=None if sync.last else sync.rate * math.exp(RISE * part))
    updates = state.updates + 1
    fallen = min(sync.rate / state.seen_at, 1.0) if state.seen_at else 1.0  # slopes fall with η
    size = max(0.7 ** (part / 2) * fallen * state.size, abs(sync.slope))
    if size == 0.0:  # equal losses say nothing, and the schedule rules
        return replace(state, rate=None)
    beta = 0.3**part
    m = beta * state.m - (1 - beta) * sync.slope / size
    u = m / (1 - beta**updates)
    own = part * (1.05 - abs(u))
    reading = math.log(sync.rate * sync.step / sync.total_steps) + 1.5 * u
    weight = 0.75**part * state.weight + own
    total = 0.75**part * state.total + own * reading
    clear = sync.slope / sync.error if sync.error > 0 else math.inf
    signal = state.signal + clear * clear  # a power would raise where this overflows
    best = total / weight - math.log(horizon) - 0.5 * math.log(share) - math.log(peak)
    mu = min(max(best, -limit), limit) * min(max(signal / updates - 1, 0.0), 1.0)
    found = sync.last or sync.step >= UNTIL * sync.total_steps or weight >= enough
    rate: float | None = sync.rate * math.exp(2 * part * u) * sync.step / (sync.step + sync.sync_every)
    if found:
        mu = mu if abs(mu) > DEAD else 0.0
        rate = None if sync.last else sync.rate * math.exp(RISE * part)
    return Search(rate, mu, found, m, size, sync.rate, updates, weight, total, signal)


def ended(state: Search) -> Search:
    """The search where its last sync told nothing: what is known must do."""
    return replace(state, rate=None, mu=state.mu if abs(state.mu) > DEAD else 0.0, found=True)


def applied(state: Search, scheduled: Any) -> Any:
    """η where the schedule says ``scheduled``, a number or a tensor."""
    if state.rate is None:
        return scheduled * math.exp(state.mu)
    if state.updates and not state.found:
        return scheduled * 0 + state.rate  # of the schedule's type, without waiting for the device
    moved = scheduled * math.exp(state.mu)
    return min(moved, state.rate) if isinstance(moved, float) else moved.clamp(max=state.rate)
