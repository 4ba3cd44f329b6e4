"""Whether a learning rate is near what breaks training, on slopes that are written out, and what follows from that."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_kernels import RegressionController, multipliers, permutation
from hdet_kernels.brink import ABOVE, COSTS, CYCLES, Brink
from hdet_kernels.controller import Observation, Run
from hdet_kernels.regression_controller import WATCHED_FROM

PROPERTY = settings(deadline=None, max_examples=80)


def after(*costs: float, first: float = 3.0, level: float = 1.0, said: float = 0.9, early: bool = False) -> Brink:
    """After cycles in which an e-fold more would have cost these shares of all that was gained, with learning rates of
    1, 2, 3, …"""
    brink = Brink(first)
    for index, cost in enumerate(costs):
        brink = brink.after(level, cost * (first - level), said, index + 1.0, early=early)
    return brink


#: What is near the brink.
AT_IT = (1.01 * COSTS,) * CYCLES


@pytest.mark.parametrize("first", [3.0, 1.001, 100.0])
@pytest.mark.parametrize(("more", "is_near"), [(1.01, True), (0.99, False), (1e6, True), (-5.0, False), (0.0, False)])
def test_is_what_an_e_fold_more_would_cost_over_all_that_was_gained(more: float, is_near: bool, first: float) -> None:
    brink = after(*[more * COSTS] * CYCLES, first=first)
    assert brink.value == (CYCLES if is_near else None)
    assert brink.highest == (ABOVE * CYCLES if is_near else math.inf)


def test_one_cycle_that_stumbles_is_not_enough() -> None:
    assert after(0.01, 0.01, 0.01, 3.5 * COSTS, 0.01, 0.01, 0.01).value is None
    assert after(*AT_IT[1:]).value is None


def test_it_is_the_mean_of_the_last_cycles() -> None:
    assert after(-9.0, -9.0, 0.5 * COSTS, 1.6 * COSTS, 0.5 * COSTS, 1.6 * COSTS).value == 6
    assert after(0.0, 1.6 * COSTS, -9.0, 1.6 * COSTS, 1.6 * COSTS).value is None


@pytest.mark.parametrize("level", [3.0, 3.1])
def test_where_nothing_was_gained_there_is_nothing_to_lose(level: float) -> None:
    brink = Brink(3.0)
    for _ in range(CYCLES):
        brink = brink.after(level, 1.0, 0.9, 1.0, early=False)
    assert brink.value is None


@pytest.mark.parametrize("said", [0.4, 0.0, -0.9])
def test_it_must_be_sure(said: float) -> None:
    assert after(*AT_IT, said=said).value is None


def test_what_was_seen_early_counts_later() -> None:
    early = after(*AT_IT, early=True)
    assert early.value is None
    assert early.after(1.0, 2.1 * COSTS, 0.9, 7.0, early=False).value == 7.0


def test_the_first_one_counts() -> None:
    for value in (0.1, 9.0):
        assert after(*AT_IT).after(0.9, 1.0, 0.9, value, early=False).value == CYCLES


@pytest.mark.parametrize(("said", "ends"), [(-0.9, True), (-0.3, True), (-0.2, False), (0.0, False), (0.9, False)])
def test_a_larger_one_that_is_better_ends_it_and_progress_does_not(said: float, ends: bool) -> None:
    """Progress is what holding it is for."""
    assert (after(*AT_IT).after(0.2, 1e-3, said, 20.0, early=False).value is None) is ends


@PROPERTY
@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-9, 9), st.floats(-1, 1)), max_size=12))
def test_its_state_survives_json_bit_for_bit(cycles: list[tuple[float, float, float]]) -> None:
    straight = loaded = Brink(3.0)
    for index, cycle in enumerate(cycles):
        straight = straight.after(*cycle, value=index + 1.0, early=index < 3)
        loaded = Brink.of(json.loads(json.dumps(loaded.after(*cycle, value=index + 1.0, early=index < 3).state_dict())))
    assert loaded == straight


WAS_AT = 0.2
NEAR = Brink(3.0, AT_IT, WAS_AT).state_dict()


def after_a_sync(brink: dict[str, Any] | None, *, rates: int = 1, rate: float | None = None, slope: float = 0.1) -> Any:
    """The state after a sync of eight replicas that gained nothing, with learning rates at their peak."""
    controller, run = RegressionController(rate=rate), Run(1000, 10, 0.3, (None,) * rates, (1.0,) * rates)
    orders = [permutation(8, seed=0, cycle=0, hyperparameter=f"lr/{j}") for j in range(rates)]
    rho = np.stack([multipliers(8, 0.3)[order] for order in orders])
    losses = 1.0 + slope * np.log(rho).sum(axis=0)
    state = controller.start(rates, run) | {"brink": brink}
    return controller.update(run, state, Observation(losses, rho, np.ones(rates), 290))


def test_the_peak_is_held_near_the_brink() -> None:
    held, free = after_a_sync(NEAR), after_a_sync(None)
    assert held["mu"] == pytest.approx([math.log(ABOVE * WAS_AT)])
    assert free["mu"][0] > held["mu"][0] + 0.5
    assert held["belief"] == free["belief"]


def test_a_rate_bounds_that_too() -> None:
    assert after_a_sync(NEAR, rate=0.05)["mu"] == pytest.approx([-0.05])


def test_a_larger_one_that_is_better_lets_it_go() -> None:
    """It rises again, in steps."""
    assert after_a_sync(NEAR, slope=-0.1)["brink"]["value"] is None


def test_of_several_learning_rates_nothing_is_known() -> None:
    """Each costs a part of what all gained."""
    assert after_a_sync(None, rates=2)["brink"] is None


@pytest.mark.parametrize("probed", [True, False])
@pytest.mark.parametrize("slope", [0.9 * COSTS, 1.2 * COSTS])
def test_is_seen_from_losses_on_a_probe(slope: float, probed: bool) -> None:
    """What is lost is as large from the first sync on; it counts when enough was gained to tell."""
    controller, run = RegressionController(), Run(1000, 10, 0.3, (None,), (1.0,), probed=probed, early=(1, 2, 5))
    state = controller.start(1, run)
    for look, step in enumerate([1, 2, 5, *range(10, 121, 10)]):
        rho = multipliers(8, 0.3)[permutation(8, seed=0, cycle=look, hyperparameter="lr/0")][None]
        level = 3.0 - 0.1 * look
        losses = level + slope * (3.0 - level) * np.log(rho[0])
        state = controller.update(run, state, Observation(losses, rho, np.full(1, step / 1000), step))
    if not probed:
        assert state["brink"] is None
    else:
        assert state["brink"]["first"] == pytest.approx(3.0)
        at = math.ceil(WATCHED_FROM * 300 / 10) * 10 / 1000
        assert state["brink"]["value"] == (pytest.approx(at) if slope > COSTS else None)
