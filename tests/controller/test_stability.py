"""Whether a learning rate is near what breaks training, past it, or on a plateau, on levels and slopes that are written
out, and what follows from that."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_kernels import RegressionController, multipliers, permutation
from hdet_kernels.controller import peak_posterior as belief
from hdet_kernels.controller.protocol import Observation, Run
from hdet_kernels.controller.regression import LATER_MOVE, RAISED_UNTIL, WATCHED_FROM
from hdet_kernels.controller.stability import ABOVE, BELOW, BREAKS, CHEAP, COSTS, CYCLES, LOST, REAL, STILL, Terrain

PROPERTY = settings(deadline=None, max_examples=80)

#: How many cycles make a plateau.
COUNT = 8


def after(*costs: float, first: float = 3.0, level: float = 1.0, said: float = 0.9, early: bool = False) -> Terrain:
    """After cycles in which an e-fold more would have cost these shares of all that was gained, with learning rates of
    1, 2, 3, …"""
    terrain = Terrain(first)
    for index, cost in enumerate(costs):
        terrain = terrain.after(level, cost * (first - level), said, index + 1.0, early=early, span=COUNT)
    return terrain


#: What is near the brink.
AT_IT = (1.01 * COSTS,) * CYCLES


@pytest.mark.parametrize("first", [3.0, 1.001, 100.0])
@pytest.mark.parametrize(("more", "is_near"), [(1.01, True), (0.99, False), (1e6, True), (-5.0, False), (0.0, False)])
def test_is_what_an_e_fold_more_would_cost_over_all_that_was_gained(more: float, is_near: bool, first: float) -> None:
    terrain = after(*[more * COSTS] * CYCLES, first=first)
    assert terrain.near == (CYCLES if is_near else None)
    assert terrain.highest == (ABOVE * CYCLES if is_near else math.inf)


def test_one_cycle_that_stumbles_is_not_enough() -> None:
    assert after(0.01, 0.01, 0.01, 3.5 * COSTS, 0.01, 0.01, 0.01).near is None
    assert after(*AT_IT[1:]).near is None


def test_it_is_the_median_of_the_last_cycles() -> None:
    """Of a rise that stumbles once nothing is left when it stumbled most."""
    assert after(-9.0, -9.0, 0.5 * COSTS, 1.6 * COSTS, 0.5 * COSTS, 1.6 * COSTS).near == 6
    assert after(0.0, 9.0, 0.3 * COSTS, 0.3 * COSTS, 0.3 * COSTS).near is None
    assert after(0.0, 1.6 * COSTS, -9.0, 1.6 * COSTS, 1.6 * COSTS).near == 5


@pytest.mark.parametrize("level", [3.0, 3.1])
def test_where_nothing_was_gained_there_is_nothing_to_lose(level: float) -> None:
    terrain = Terrain(3.0)
    for _ in range(CYCLES):
        terrain = terrain.after(level, 1.0, 0.9, 1.0, early=False, span=COUNT)
    assert terrain.near is None


@pytest.mark.parametrize("said", [0.4, 0.0, -0.9])
def test_it_must_be_sure(said: float) -> None:
    assert after(*AT_IT, said=said).near is None


def test_what_was_seen_early_counts_later() -> None:
    early = after(*AT_IT, early=True)
    assert early.near is None
    assert early.after(1.0, 2.1 * COSTS, 0.9, 7.0, early=False, span=COUNT).near == 7.0


def test_the_first_one_counts() -> None:
    for value in (0.1, 9.0):
        assert after(*AT_IT).after(0.9, 1.0, 0.9, value, early=False, span=COUNT).near == CYCLES


@pytest.mark.parametrize(("said", "ends"), [(-0.9, True), (-0.3, True), (-0.2, False), (0.0, False), (0.9, False)])
def test_a_larger_one_that_is_better_ends_it_and_progress_does_not(said: float, ends: bool) -> None:
    """Progress is what holding it is for."""
    assert (after(*AT_IT).after(0.2, 1e-3, said, 20.0, early=False, span=COUNT).near is None) is ends


@PROPERTY
@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-9, 9), st.floats(-1, 1)), max_size=12))
def test_its_state_survives_json_bit_for_bit(cycles: list[tuple[float, float, float]]) -> None:
    straight = loaded = Terrain(3.0)
    for index, cycle in enumerate(cycles):
        straight = straight.after(*cycle, value=index + 1.0, early=index < 3, span=COUNT)
        loaded = Terrain.of(
            json.loads(json.dumps(loaded.after(*cycle, value=index + 1.0, early=index < 3, span=COUNT).state_dict()))
        )
    assert loaded == straight


@pytest.mark.parametrize(("share", "breaks"), [(1.02, True), (0.98, False), (1e9, True), (-1.0, False)])
@pytest.mark.parametrize("since", [1, 2, COUNT + 3])
def test_what_is_lost_at_once_breaks(share: float, breaks: bool, since: int) -> None:
    """However long ago the lowest level was."""
    terrain = at_levels(2.5, 2.0, 1.0, *[1.05] * (since - 1))
    terrain = terrain.after(1.0 + share * BREAKS * 2.0, 0.0, 0.9, 7.0, early=False, span=COUNT)
    assert terrain.broke == (7.0 if breaks else None)
    assert terrain.highest == (BELOW * 7.0 if breaks else math.inf)


def test_the_lowest_that_broke_counts_and_nothing_ends_it() -> None:
    terrain = at_levels(2.5, 2.0, 1.0)
    for value, broke in ((7.0, 7.0), (9.0, 7.0), (3.0, 3.0)):
        terrain = terrain.after(2.0, 0.0, 0.9, value, early=False, span=COUNT)
        assert terrain.broke == broke
    assert terrain.after(0.5, -1.0, -0.9, 1.0, early=False, span=COUNT).highest == BELOW * 3.0


@pytest.mark.parametrize("said", [0.4, 0.0, -0.9])
def test_what_is_lost_where_a_smaller_one_is_not_surely_better_is_noise(said: float) -> None:
    assert at_levels(2.5, 2.0, 1.0).after(9.0, 1.0, said, 7.0, early=False, span=COUNT).broke is None
    assert not at_levels(*[1.0] * (COUNT + 1), said=said).flat


@pytest.mark.parametrize(("noise", "real"), [(0.0, True), (1.9 / REAL, True), (2.1 / REAL, False)])
def test_what_was_gained_must_be_more_than_noise(noise: float, real: bool) -> None:
    terrain = at_levels(2.5, 2.0, 1.0)
    assert (terrain.after(1.5, 0.1, 0.9, 7.0, early=False, span=COUNT, noise=noise).broke is not None) is real
    terrain = at_levels(*[1.0] * COUNT)
    assert terrain.after(1.0, 0.1, 0.9, 7.0, early=False, span=COUNT, noise=noise).flat is real


def test_nothing_breaks_early_and_where_nothing_was_gained() -> None:
    assert at_levels(2.5, 2.0, 1.0).after(9.0, 1.0, 0.9, 7.0, early=True, span=COUNT).broke is None
    assert at_levels(4.0, 3.5, 3.2).after(9.0, 1.0, 0.9, 7.0, early=False, span=COUNT).broke is None


def at_levels(*levels: float, first: float = 3.0, cost: float = 0.0, said: float = 0.9) -> Terrain:
    """After cycles that came to these levels, where more would have cost this share of all that was gained."""
    terrain = Terrain(first)
    for index, level in enumerate(levels):
        terrain = terrain.after(level, cost * (first - level), said, index + 1.0, early=False, span=COUNT)
    return terrain


@pytest.mark.parametrize("first", [3.0, 1.1, 100.0])
@pytest.mark.parametrize(
    ("share", "flat"),
    [(0.0, True), (0.9 * STILL, True), (1.1 * STILL, False), (-0.9 * LOST, True), (-1.1 * LOST, False)],
)
def test_a_plateau_is_where_so_many_cycles_gain_next_to_nothing(share: float, flat: bool, first: float) -> None:
    """In the lowest of their levels, as each may stumble."""
    there = 1.0 - share * (first - 1.0)
    for lowest in range(COUNT):
        levels = [there + 1e-3 * (first - 1.0)] * COUNT
        levels[lowest] = there
        assert at_levels(1.0, *levels, first=first).flat is flat
        assert not at_levels(*levels, first=first).flat, "nothing is known of what was before"


@pytest.mark.parametrize(("cost", "flat"), [(0.9 * CHEAP, True), (1.1 * CHEAP, False), (-9.0, True)])
def test_on_a_plateau_more_costs_little(cost: float, flat: bool) -> None:
    assert at_levels(*[1.0] * (COUNT + 1), cost=cost).flat is flat


def test_is_none_where_nothing_was_gained() -> None:
    assert not at_levels(*[3.0] * (COUNT + 1)).flat
    assert not at_levels(*[3.1] * (COUNT + 1)).flat


@PROPERTY
@given(st.floats(-2, 2), st.floats(0.05, 1))
def test_a_belief_that_is_raised_is_the_same_further_up(turn: float, by: float) -> None:
    heard = belief.updated([], turn, 0.9, 0.0125)
    raised = belief.raised(heard, by)
    at = by - 6.0 < belief.GRID
    assert np.allclose(np.asarray(raised)[at], np.interp(belief.GRID[at] - by, belief.GRID, heard))
    assert belief.chosen(heard) < belief.chosen(raised) < belief.chosen(heard) + by
    assert belief.raised([], by) == []


FLAT = Terrain(3.0, (0.0,) * CYCLES, levels=(1.0,) * COUNT, lowest=1.0).state_dict()


def on_a_plateau(step: int, worst: float | None = None) -> tuple[float, float]:
    """μ before and after a sync of eight replicas on a plateau, on which a smaller learning rate looks better; the
    highest loss may be another."""
    controller, run = RegressionController(), Run(1000, 10, 0.3, (None,), (1.0,))
    heard = belief.updated([], -1.0, 0.9, 0.01)
    before = {"belief": [heard], "opposed": [True], "mu": [belief.chosen(heard)], "terrain": FLAT, "way": [0.3 * step]}
    rho = multipliers(8, 0.3)[permutation(8, seed=0, cycle=0, hyperparameter="lr/0")][None]
    losses = 1.0 + 0.05 * np.log(rho[0])
    if worst is not None:
        losses[losses.argmax()] = worst
    state = controller.start(1, run) | before
    after = controller.update(run, state, Observation(losses, rho, np.full(1, 0.3), step))
    return state["mu"][0], after["mu"][0]


@pytest.mark.parametrize("share", [WATCHED_FROM - 0.01, WATCHED_FROM, RAISED_UNTIL, RAISED_UNTIL + 0.01])
def test_on_a_plateau_it_rises_in_steps_though_a_smaller_one_looks_better(share: float) -> None:
    """From some time on, and until near the end of its part of the run."""
    before, after = on_a_plateau(round(share * 300))
    assert (after > before + 0.5 * LATER_MOVE) is (WATCHED_FROM <= share <= RAISED_UNTIL)
    assert after <= before + LATER_MOVE + 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30, 1e3])
def test_a_replica_that_explodes_on_a_plateau_does_not_raise_it(bad: float) -> None:
    before, after = on_a_plateau(150, bad)
    assert after <= before


WAS_AT = 0.2
NEAR = Terrain(3.0, AT_IT, WAS_AT).state_dict()


def after_a_sync(
    terrain: dict[str, Any] | None, *, rates: int = 1, rate: float | None = None, slope: float = 0.1
) -> Any:
    """The state after a sync of eight replicas that gained nothing, with learning rates at their peak."""
    controller, run = RegressionController(rate=rate), Run(1000, 10, 0.3, (None,) * rates, (1.0,) * rates)
    orders = [permutation(8, seed=0, cycle=0, hyperparameter=f"lr/{j}") for j in range(rates)]
    rho = np.stack([multipliers(8, 0.3)[order] for order in orders])
    losses = 1.0 + slope * np.log(rho).sum(axis=0)
    state = controller.start(rates, run) | {"terrain": terrain}
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
    assert after_a_sync(NEAR, slope=-0.1)["terrain"]["near"] is None


def test_of_several_learning_rates_nothing_is_known() -> None:
    """Each costs a part of what all gained."""
    assert after_a_sync(None, rates=2)["terrain"] is None


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
        assert state["terrain"] is None
    else:
        assert state["terrain"]["first"] == pytest.approx(3.0)
        at = math.ceil(WATCHED_FROM * 300 / 10) * 10 / 1000
        assert state["terrain"]["near"] == (pytest.approx(at) if slope > COSTS else None)
