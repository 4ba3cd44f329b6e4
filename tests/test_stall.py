"""Whether training stands still, on levels and signs that are written out, and what the controller makes of it."""

from __future__ import annotations

import json
import math

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


def climb(
    controller: RegressionController, *, floor: float, probed: bool = True, rates: int = 1, looks: int = 20
) -> tuple[list[float], list[float]]:
    """Learning rates, over the peak, and μ where losses fall to ``floor`` in seven cycles and a smaller rate is better
    by far: belief wants to stay, the law expects no other."""
    run = Run(1000, 10, 0.3, (None,) * rates, (1.0,) * rates, probed=probed)
    state, values, mus = controller.start(rates), [], []
    for look in range(looks):
        step, base = 10 * (look + 1), 0.04 + 0.04 * look
        rho = np.stack(
            [multipliers(8, 0.3)[permutation(8, seed=0, cycle=look, hyperparameter=f"{j}")] for j in range(rates)]
        )
        bases = np.array([base * math.exp(mu) for mu in state["mu"]])
        losses = floor + max(2.0 - 0.3 * look, 0.0) + 0.02 * np.log(rho).sum(axis=0)
        state = controller.update(run, state, Observation(losses, rho, bases, step))
        values.append(float(bases[0]))
        mus.append(state["mu"][0])
    return values, mus


def test_the_peak_is_held_near_where_training_stood_still() -> None:
    values, mus = climb(RegressionController(), floor=1.0)
    free, unheld = climb(RegressionController(), floor=1.0, rates=2)
    highest = ABOVE * values[7 + CYCLES - 1]
    assert mus[7 + CYCLES - 2] > math.log(highest)
    assert mus[-1] <= math.log(highest) + 1e-12
    assert unheld[-1] > math.log(highest), "of several learning rates none is known to be the one"


def test_only_a_probe_tells() -> None:
    values, mus = climb(RegressionController(), floor=1.0, probed=False)
    assert mus[-1] == pytest.approx(mus[10], abs=0.1)


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_a_rate_bounds_that_too(rate: float) -> None:
    _, mus = climb(RegressionController(rate=rate), floor=1.0, looks=25)
    assert np.abs(np.diff(mus)).max() <= rate + 1e-12
