"""The rounds of the scouting phase and their candidates."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_kernels.schedule.scout.rounds import (
    ScoutSettings,
    candidates,
    first_bracket,
    make_plan,
    middle,
    rounds_needed,
    tail_steps,
)

DEFAULT = ScoutSettings()


def last_factor(replicas: int) -> float:
    """Return the factor between neighbours in the last round, if the best is never at the edge."""
    low, high = first_bracket(DEFAULT)
    for _ in range(rounds_needed(replicas, DEFAULT) - 1):
        rates = candidates((low, high), replicas)
        edges = [low, *map(math.log, rates), high]
        low, high = edges[replicas // 2], edges[replicas // 2 + 2]
    rates = candidates((low, high), replicas)
    return rates[1] / rates[0]


@pytest.mark.parametrize(
    ("total_steps", "replicas", "rounds"),
    [
        (1000, 8, (37, 113)),
        (1000, 4, (37, 113)),
        (1000, 64, (37, 113)),
        (1000, 3, (26, 45, 79)),
        (1000, 2, (16, 21, 27, 36, 50)),
        (600, 2, (11, 17, 24, 38)),  # too short for five rounds
        (100, 8, (15,)),  # too short for two
        (67, 8, (10,)),
    ],
)
def test_lengths_of_the_rounds(total_steps: int, replicas: int, rounds: tuple[int, ...]) -> None:
    plan = make_plan(total_steps, replicas, DEFAULT)
    assert (plan.rounds, plan.run) == (rounds, total_steps - sum(rounds))
    assert plan.total_steps == total_steps
    assert plan.before(1) == rounds[0]


@given(st.integers(67, 10**7), st.integers(2, 64), st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_a_plan_keeps_to_the_share_and_leaves_no_step_out(total_steps: int, replicas: int, pct_start: float) -> None:
    plan = make_plan(total_steps, replicas, DEFAULT, workable=lambda steps: float(pct_start * steps) != 1)
    assert plan.total_steps == total_steps
    assert plan.steps <= 0.2 * total_steps
    assert all(length >= DEFAULT.fewest for length in plan.rounds)
    assert all(float(pct_start * length) != 1 for length in (*plan.rounds, plan.run))
    assert list(plan.rounds) == sorted(plan.rounds)
    assert 1 <= tail_steps(plan.rounds[0], DEFAULT) <= plan.rounds[0]


@pytest.mark.parametrize("replicas", [2, 3, 4, 8, 16, 64])
def test_neighbours_of_the_last_round_are_close(replicas: int) -> None:
    assert last_factor(replicas) <= (2.5 if replicas != 4 else DEFAULT.factor)


@given(st.floats(-20, 5), st.floats(1e-3, 20), st.integers(2, 64))
@settings(max_examples=60, deadline=None)
def test_candidates_are_spaced_evenly_inside_the_range(low: float, width: float, replicas: int) -> None:
    rates = candidates((low, low + width), replicas)
    logs = [low, *map(math.log, rates), low + width]
    gaps = [b - a for a, b in itertools.pairwise(logs)]
    assert gaps == pytest.approx([width / (replicas + 1)] * (replicas + 1), rel=1e-6, abs=1e-9)
    assert rates[0] * rates[-1] == pytest.approx(middle((low, low + width)) ** 2, rel=1e-9)


def test_one_replica_is_refused_with_a_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"several replicas, and there is one: pass a learning rate, or train replicas"
    ):
        make_plan(1000, 1, DEFAULT)


def test_a_short_run_is_told_the_least_number_of_steps() -> None:
    with pytest.raises(ValueError, match=r"got total_steps=66: pass total_steps of at least 67"):
        make_plan(66, 8, DEFAULT)
    make_plan(67, 8, DEFAULT)
