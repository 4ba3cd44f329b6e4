"""From the losses of a round to a narrower range and to a learning rate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_kernels.schedule.scout.rounds import Comparison, ScoutSettings, choose, narrow

DEFAULT = ScoutSettings()
RATES = tuple(10.0**exponent for exponent in (-4, -3.5, -3, -2.5, -2, -1.5))
BRACKET = (math.log(1e-5), 0.0)


def seen(losses: Any, *, rates: Any = RATES, errors: Any = 0.0, level: float = math.nan) -> Comparison:
    values = np.array(losses, dtype=np.float64)
    return Comparison(np.array(rates), values, np.broadcast_to(np.float64(errors), values.shape), level)


def test_the_range_narrows_to_the_neighbours_of_the_best() -> None:
    assert narrow(seen([5, 4, 3, 4, 5, 9]), BRACKET, DEFAULT) == pytest.approx((math.log(RATES[1]), math.log(RATES[3])))


@pytest.mark.parametrize(("losses", "expected"), [([1, 2, 3, 4, 5, 6], (-11.5129, 1)), ([6, 5, 4, 3, 2, 1], (4, 0.0))])
def test_at_an_edge_the_range_keeps_its_end(losses: list[float], expected: tuple[Any, Any]) -> None:
    ends = [end if isinstance(end, float) else math.log(RATES[end]) for end in expected]
    assert narrow(seen(losses), BRACKET, DEFAULT) == pytest.approx(ends, abs=1e-3)


def test_losses_that_say_nothing_keep_the_range_wide() -> None:
    flat = seen([2.3, 2.301, 2.299, 2.3, 2.31, np.nan], errors=0.02, level=2.3)
    low, high = narrow(flat, BRACKET, DEFAULT)
    assert (low, high) == (BRACKET[0], math.log(RATES[5]))
    assert not flat.learned(DEFAULT)
    assert seen([2.3, 1.0, 2.3, 2.3, 2.3, 2.3], level=2.3).learned(DEFAULT)
    assert seen([2.3, 1.0, 2.3, 2.3, 2.3, 2.3]).learned(DEFAULT)  # the level is not known


def test_the_minimum_of_the_parabola_is_chosen() -> None:
    best = math.log(2e-3)
    losses = [1 + (math.log(rate) - best) ** 2 for rate in RATES]
    assert choose(seen(losses, level=20.0), 8, DEFAULT).rate == pytest.approx(2e-3, rel=1e-6)


def test_a_diverged_neighbour_does_not_pull() -> None:
    losses = [2.0, 1.5, 1.2, 1.0, np.inf, np.nan]
    verdict = choose(seen(losses, level=2.5), 8, DEFAULT)
    assert RATES[2] <= verdict.rate <= RATES[3] * 1.0001
    above_the_start = choose(seen([2.0, 1.5, 1.2, 1.0, 400.0, np.nan], level=2.5), 8, DEFAULT)
    assert above_the_start == verdict


def test_a_flat_bottom_gives_its_middle() -> None:
    verdict = choose(seen([3.0, 1.01, 1.0, 1.005, 1.01, 9.0], errors=0.02, level=4.0), 8, DEFAULT)
    assert verdict.rate == pytest.approx(math.sqrt(RATES[1] * RATES[4]))
    assert "equally good" in verdict.how


def test_a_shift_grows_with_the_replicas() -> None:
    losses = [3, 2, 1, 2, 3, 4]
    plain, shifted = (choose(seen(losses), 8, ScoutSettings(shift=shift)).rate for shift in (0.0, 1 / 3))
    assert shifted / plain == pytest.approx(2.0)


def test_without_any_finite_loss_the_learning_rates_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"no loss was finite at any of the learning rates 0.0001, .* pass max_lr"):
        choose(seen([np.nan, np.inf, np.nan, -np.inf, np.nan, np.nan]), 8, DEFAULT)


LOSSES = st.lists(st.one_of(st.floats(0, 100), st.just(math.nan), st.just(math.inf)), min_size=2, max_size=20)


@given(LOSSES, st.floats(0, 1), st.one_of(st.just(math.nan), st.floats(0, 100)))
@settings(max_examples=100, deadline=None)
def test_a_choice_is_near_the_best_and_a_range_holds_it(losses: list[float], error: float, level: float) -> None:
    if not any(map(math.isfinite, losses)):
        losses[0] = 1.0
    rates = np.exp(np.linspace(*BRACKET, len(losses) + 2))[1:-1]
    found = seen(losses, rates=rates, errors=error, level=level)
    low, high = narrow(found, BRACKET, DEFAULT)
    assert BRACKET[0] <= low < math.log(rates[found.best]) < high <= BRACKET[1]
    verdict = choose(found, len(losses), DEFAULT)
    assert rates[0] * (1 - 1e-9) <= verdict.rate <= rates[-1] * (1 + 1e-9)
    finite = np.isfinite(found.losses)
    used = np.abs(np.log(rates) - math.log(verdict.rate)).argmin()
    assert finite[used] or finite[max(used - 1, 0) : used + 2].any()
