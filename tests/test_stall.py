"""Whether training stands still, on levels and signs that are written out, and what the controller makes of it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_kernels import RegressionController, multipliers, permutation
from hdet_kernels.controller import Observation, Run
from hdet_kernels.stall import ABOVE, CYCLES, Stall

PROPERTY = settings(deadline=None, max_examples=80)


def seen(levels: list[float], said: list[float] | float = 0.9, first: float = 3.0) -> Stall:
    """After cycles that ended at these levels, with learning rates of 1, 2, 3, …"""
    stall, signs = Stall(first), [said] * len(levels) if isinstance(said, float) else said
    for index, (level, sign) in enumerate(zip(levels, signs, strict=True)):
        stall = stall.after(level, sign, index + 1.0)
    return stall


FALLING = [2.5, 2.0, 1.5, 1.0]


@pytest.mark.parametrize("more", range(CYCLES + 3))
def test_is_heard_after_four_cycles_that_gained_next_to_nothing(more: int) -> None:
    """The learning rate is that of the fourth of them, also when it goes on."""
    stall = seen([*FALLING, *[0.999] * more])
    assert stall.value == (None if more < CYCLES else len(FALLING) + CYCLES)
    assert stall.highest == (math.inf if more < CYCLES else ABOVE * stall.value if stall.value else 0)


@pytest.mark.parametrize(
    ("levels", "stands"),
    [([0.998] * 4, True), ([0.998, 0.996, 0.994, 0.9899], False), ([0.998, 0.996, 0.994, 0.991], True),
     ([1.5, 0.9, 1.5, 1.5], False), ([1.5, 5.0, 1.2, 1.0], True)],
    ids=["stands", "half a percent of all", "less", "once lower", "worse"],
)  # fmt: skip
def test_what_is_gained_is_the_lowest_so_far_over_all_that_was_gained(levels: list[float], stands: bool) -> None:
    assert (seen([*FALLING, *levels]).value is not None) is stands


@pytest.mark.parametrize("said", [0.4, 0.0, -0.1, -0.9])
def test_is_not_heard_unless_a_smaller_one_is_surely_better_each_time(said: float) -> None:
    for at in range(CYCLES):
        signs = [0.9] * 8
        signs[4 + at] = said
        assert seen([*FALLING, *[1.0] * 4], signs).value is None


@pytest.mark.parametrize(("said", "ends"), [(-0.9, True), (-0.3, True), (-0.2, False), (0.0, False), (0.9, False)])
def test_a_larger_one_that_is_better_ends_it_and_progress_does_not(said: float, ends: bool) -> None:
    """Progress is what holding it is for."""
    stall = seen([*FALLING, *[1.0] * 4]).after(0.2, said, 20.0)
    assert (stall.value is None) is ends


@PROPERTY
@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-1, 1)), max_size=12))
def test_its_state_survives_json_bit_for_bit(cycles: list[tuple[float, float]]) -> None:
    straight = loaded = Stall(3.0)
    for index, (level, said) in enumerate(cycles):
        straight = straight.after(level, said, index + 1.0)
        loaded = Stall.of(json.loads(json.dumps(loaded.after(level, said, index + 1.0).state_dict())))
    assert loaded == straight


STOOD_AT = 0.2
STANDS = Stall(3.0, (1.0,) * 5, 4, STOOD_AT).state_dict()


def after_a_sync(stall: dict[str, Any] | None, *, rates: int = 1, rate: float | None = None, slope: float = 0.1) -> Any:
    """The state after a sync of eight replicas that gained nothing, with learning rates at their peak."""
    controller, run = RegressionController(rate=rate), Run(1000, 10, 0.3, (None,) * rates, (1.0,) * rates)
    orders = [permutation(8, seed=0, cycle=0, hyperparameter=f"lr/{j}") for j in range(rates)]
    rho = np.stack([multipliers(8, 0.3)[order] for order in orders])
    losses = 1.0 + slope * np.log(rho).sum(axis=0)
    state = controller.start(rates, run) | {"stall": stall}
    return controller.update(run, state, Observation(losses, rho, np.ones(rates), 290))


def test_the_peak_is_held_near_where_training_stood_still() -> None:
    held, free = after_a_sync(STANDS), after_a_sync(None)
    assert held["mu"] == pytest.approx([math.log(ABOVE * STOOD_AT)])
    assert free["mu"][0] > held["mu"][0] + 0.5
    assert held["belief"] == free["belief"]


def test_a_rate_bounds_that_too() -> None:
    assert after_a_sync(STANDS, rate=0.05)["mu"] == pytest.approx([-0.05])


def test_a_larger_one_that_is_better_lets_it_go() -> None:
    """It rises again, in steps."""
    assert after_a_sync(STANDS, slope=-0.1)["stall"]["value"] is None


def test_of_several_learning_rates_nothing_is_known() -> None:
    """What stands still may do so because of any of them."""
    assert after_a_sync(None, rates=2)["stall"] is None


@pytest.mark.parametrize("probed", [True, False])
def test_is_seen_from_losses_on_a_probe(probed: bool) -> None:
    """The syncs of the first cycle say where it began; from then on losses fall for three cycles, and stand."""
    controller, run = RegressionController(), Run(1000, 10, 0.3, (None,), (1.0,), probed=probed, early=(1, 2, 5))
    state = controller.start(1, run)
    for look, step in enumerate([1, 2, 5, *range(10, 121, 10)]):
        rho = multipliers(8, 0.3)[permutation(8, seed=0, cycle=look, hyperparameter="lr/0")][None]
        losses = 1.0 + max(3.0 - 0.5 * look, 0.0) + 0.1 * np.log(rho[0])
        state = controller.update(run, state, Observation(losses, rho, np.full(1, step / 1000), step))
    if not probed:
        assert state["stall"] is None
    else:
        assert state["stall"]["first"] == pytest.approx(4.0, abs=0.1)
        assert state["stall"]["value"] == pytest.approx(0.08)  # the lowest is that of step 40, four cycles before
