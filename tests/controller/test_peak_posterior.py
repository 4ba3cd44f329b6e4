"""The posterior over the right peak, from evidence that is written out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_kernels.controller.regression import (
    chosen_peak,
    evidence,
    grid,
    path_length,
    prior,
    turning_point,
    updated_likelihood,
)
from hdet_kernels.controller.settings import RegressionSettings
from tests.controller.cases import PROPERTY

GRID = grid()
#: Constants of these cases; the rule is the same with any others.
SETTINGS = RegressionSettings(turning_length=0.3, task_deviation=1.5, sign_error=0.05, quantile=0.25)
#: The strongest evidence that a slope can be.
STRONGEST = 1 - 2 * SETTINGS.sign_error

EVIDENCE = st.lists(st.tuples(st.floats(-8, 8), st.floats(-STRONGEST, STRONGEST)), max_size=12)


def chosen(several: Sequence[tuple[float, float]], trust: float | None = None) -> float:
    """Return the chosen log θ after pairs of a turning point and evidence."""
    logs: list[float] = []
    for turn, found in several:
        logs = updated_likelihood(logs, turn, found)
    return chosen_peak(logs, trust, SETTINGS)


class TestPrior:
    @pytest.mark.parametrize("trust", [1.0, 2.0, 3.0])
    def test_there_is_none_where_slopes_cannot_tell_more_than_the_user(self, trust: float) -> None:
        assert prior(trust, SETTINGS) is None
        assert chosen([(1.0, -STRONGEST)] * 9, trust) == 0.0

    @pytest.mark.parametrize("trust", [3.01, 10.0, 1000.0, None])
    def test_a_quarter_of_it_is_below_the_given_learning_rate(self, trust: float | None) -> None:
        weights = prior(trust, SETTINGS)
        assert weights is not None
        assert weights.sum() == pytest.approx(1)
        assert weights[GRID < -1e-9].sum() == pytest.approx(0.25)

    def test_is_normal_on_both_sides_and_flat_without_trust(self) -> None:
        weights, flat = prior(30.0, SETTINGS), prior(None, SETTINGS)
        assert weights is not None
        assert flat is not None
        deviation = math.log(10)
        for side in (-1, 1):
            one, two = np.interp([side * 1.0, side * 2.0], GRID, weights)
            assert math.log(one / two) == pytest.approx(1.5 / deviation**2)
            assert np.ptp(flat[np.sign(GRID) == side]) == pytest.approx(0, abs=1e-15)


class TestChosen:
    @pytest.mark.parametrize("trust", [3.0, 10.0, None])
    def test_is_zero_without_evidence(self, trust: float | None) -> None:
        assert chosen([], trust) == 0.0
        assert chosen([(turn, 0.0) for turn in (-3.0, 0.1, 5.0)], trust) == pytest.approx(0, abs=0.06)

    @PROPERTY
    @given(EVIDENCE)
    def test_the_order_of_observations_does_not_matter(self, several: list[tuple[float, float]]) -> None:
        assert chosen(several[::-1]) == pytest.approx(chosen(several), abs=1e-9)

    @PROPERTY
    @given(EVIDENCE, st.floats(-5, 5), st.floats(0.01, STRONGEST))
    def test_falls_if_too_high_and_rises_if_too_low(
        self, several: list[tuple[float, float]], turn: float, found: float
    ) -> None:
        before = chosen(several)
        assert chosen([*several, (turn, found)]) < before + 1e-9
        assert chosen([*several, (turn, -found)]) > before - 1e-9

    @pytest.mark.parametrize("turn", [-2.0, 0.0, 2.0])
    def test_stronger_evidence_moves_it_further(self, turn: float) -> None:
        ends = [chosen([(turn, found)]) for found in (0.0, 0.3, 0.6, STRONGEST)]
        assert ends == sorted(ends, reverse=True)
        assert len(set(ends)) == 4

    @pytest.mark.parametrize("right", [-2.0, 0.0, 2.0])
    def test_less_trust_moves_it_further(self, right: float) -> None:
        """All signs agree on a peak; the quantile is below it by about the deviation between tasks."""
        turns = np.linspace(right - 2, right + 2, 40).tolist()
        several = [(turn, math.copysign(STRONGEST, turn - right)) for turn in turns]
        little, more, most = (chosen(several, trust) for trust in (4.0, 30.0, None))
        assert abs(little) < 0.5
        assert right - 1.2 * SETTINGS.task_deviation < most <= right + 1e-9
        assert min(little, most) - 1e-9 <= more <= max(little, most) + 1e-9

    def test_is_the_quantile_of_the_blurred_posterior(self) -> None:
        several = [(0.5, -0.7), (1.5, 0.4), (-1.0, -0.2)]
        likely = np.ones(len(GRID))
        for turn, found in several:
            likely *= 0.5 + 0.5 * found * np.where(turn > GRID, 1, -1)
        blur = np.exp(-0.5 * ((GRID[:, None] - GRID) / SETTINGS.task_deviation) ** 2)
        weights = prior(10.0, SETTINGS)
        assert weights is not None
        share = np.cumsum(weights * (blur / blur.sum(axis=1, keepdims=True) @ likely))
        end = chosen(several, 10.0)
        assert np.interp(end, GRID, share / share[-1]) == pytest.approx(SETTINGS.quantile, abs=0.03)

    @pytest.mark.parametrize("turn", [-690.0, -1e6, 1e6])
    @pytest.mark.parametrize("found", [-STRONGEST, STRONGEST])
    @pytest.mark.filterwarnings("error")
    def test_turning_points_off_the_grid_change_nothing(self, turn: float, found: float) -> None:
        assert chosen([(turn, found)]) == pytest.approx(chosen([(0.0, 0.0)]), abs=1e-6)

    @pytest.mark.parametrize("found", [-STRONGEST, STRONGEST])
    @pytest.mark.filterwarnings("error")
    def test_ten_thousand_signs_stay_on_the_grid(self, found: float) -> None:
        end = chosen([(0.0, found)] * 10_000)
        assert GRID[0] <= end <= GRID[-1]
        assert end * found < 0


class TestPathLength:
    def test_is_the_sum_of_rising_learning_rates(self) -> None:
        length, step = 0.0, 0
        for value, to in [(1.0, 5), (2.0, 10), (2.5, 20), (7.0, 40)]:
            length, step = path_length(length, value, to, to - step), to
        assert length == 1.0 * 5 + 2.0 * 5 + 2.5 * 10 + 7.0 * 20

    def test_earlier_steps_count_with_the_current_rate_if_theirs_was_higher(self) -> None:
        assert path_length(1000.0, 0.5, 30, 10) == 0.5 * 30
        assert path_length(4.0, 0.5, 30, 10) == 4.0 + 0.5 * 10


class TestTurningPoint:
    @pytest.mark.parametrize("factor", [1e-3, 0.5, 1.0, 30.0])
    @pytest.mark.parametrize("total", [300, 2000, 10**6])
    def test_is_the_log_ratio_to_the_turning_length(self, factor: float, total: int) -> None:
        assert turning_point(factor * 0.3 * math.sqrt(total), total, SETTINGS) == pytest.approx(math.log(factor))

    def test_is_finite_for_a_learning_rate_of_zero(self) -> None:
        """A warm-up may begin at 0."""
        assert turning_point(0.0, 1000, SETTINGS) < -600


@pytest.mark.parametrize(
    ("slope", "significance", "expected"),
    [
        (1e-9, 2.0, 0.75 * STRONGEST),
        (-1e9, 2.0, -0.75 * STRONGEST),
        (1.0, math.inf, STRONGEST),
        (1.0, 1.0, 0.0),
        (-1.0, 0.0, 0.0),
        (0.0, 0.0, 0.0),
    ],
    ids=["positive", "negative", "strongest", "noise", "not significant", "no slope"],
)
def test_evidence_by_a_table(slope: float, significance: float, expected: float) -> None:
    assert evidence(slope, significance, SETTINGS) == pytest.approx(expected)


def test_the_grid_reaches_from_minus_six_to_six() -> None:
    assert (len(GRID), GRID[0], GRID[60], GRID[-1]) == (121, -6.0, 0.0, 6.0)
