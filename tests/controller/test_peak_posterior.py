"""The posterior over the right peak, from evidence that is written out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_kernels.controller import peak_posterior
from hdet_kernels.controller.peak_posterior import evidence, grid, path_length, prior, shifted, turning_point
from tests.controller.cases import PROPERTY, SETTINGS

GRID = grid(SETTINGS)
#: The strongest evidence that a slope can be.
STRONGEST = 1 - 2 * SETTINGS.sign_error

EVIDENCE = st.lists(st.tuples(st.floats(-8, 8), st.floats(-STRONGEST, STRONGEST)), max_size=12)


def updated(
    before: Sequence[float], turn: float, found: float, cycle: float, elasticity: float | None = None
) -> list[float]:
    return peak_posterior.updated(before, turn, found, cycle, elasticity, SETTINGS)


def chosen_after(log_likelihood: Sequence[float]) -> float:
    return peak_posterior.chosen(log_likelihood, SETTINGS)


def chosen(several: Sequence[tuple[float, float]], cycle: float = SETTINGS.reference_cycle) -> float:
    """Return the chosen log θ after pairs of a turning point and evidence."""
    logs: list[float] = []
    for turn, found in several:
        logs = updated(logs, turn, found, cycle)
    return chosen_after(logs)


def after(turn: float, elasticity: float, found: float = -STRONGEST) -> float:
    """Return the chosen log θ after one observation with an elasticity."""
    return chosen_after(updated([], turn, found, SETTINGS.reference_cycle, elasticity))


class TestChosen:
    def test_is_zero_without_evidence(self) -> None:
        assert chosen([]) == 0.0

    def test_evidence_of_zero_changes_nothing(self) -> None:
        assert chosen([(turn, 0.0) for turn in (-3.0, 0.1, 5.0)]) == pytest.approx(0, abs=1e-12)

    @pytest.mark.parametrize("turn", [0.5, 1.0, 2.0])
    def test_falls_further_than_it_rises(self, turn: float) -> None:
        """A peak that is too high costs more than one that is too low."""
        assert -chosen([(-turn, STRONGEST)]) > 1.2 * chosen([(turn, -STRONGEST)]) > 0

    @pytest.mark.parametrize("found", [-1e-6, 1e-6])
    def test_weak_evidence_moves_it_little(self, found: float) -> None:
        """The prior is made so that the cautious quantile of it is the given learning rate."""
        assert chosen([(0.0, found)]) == pytest.approx(0, abs=1e-4)

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

    @pytest.mark.parametrize("turn", [-4.0, -1.0, 0.0, 1.0, 4.0])
    def test_stronger_evidence_moves_it_further(self, turn: float) -> None:
        ends = [chosen([(turn, found)]) for found in (0.0, 0.3, 0.6, STRONGEST)]
        assert ends == sorted(ends, reverse=True)
        assert len(set(ends)) == 4

    def test_a_surprise_moves_it_more_than_what_was_expected(self) -> None:
        """Evidence for a smaller learning rate, at turning points from far above to far below."""
        moved = [-chosen([(turn, STRONGEST)]) for turn in (4.0, 2.0, 0.0, -2.0, -4.0)]
        assert moved == pytest.approx([0.22, 0.66, 1.79, 3.31, 4.36], abs=0.01)

    def test_repeated_signs_at_one_turning_point_add_little(self) -> None:
        """Three signs show that the turning point is above; a hundred add only what the scale of signs allows."""
        few, many = (chosen([(1.0, -STRONGEST)] * count) for count in (3, 100))
        assert 0 < many - few < 1.05 * SETTINGS.sign_scale * math.log(100 / 3)

    @pytest.mark.parametrize("right", [-3.0, -1.0, 0.0, 0.7, 3.0])
    def test_finds_the_peak_that_all_signs_agree_on(self, right: float) -> None:
        """From both sides. The quantile is below it by 0.39 of the deviation between tasks, and nearer to the start."""
        turns = np.linspace(right - 2, right + 2, 40)
        several = [(turn, math.copysign(STRONGEST, turn - right)) for turn in turns.tolist()]
        assert right - 0.6 * SETTINGS.task_deviation < chosen(several) < right

    def test_one_wrong_sign_is_outvoted(self) -> None:
        """Six signs put the peak above e^1; a seventh of full strength puts it far below."""
        right = [(1.0, -STRONGEST)] * 6
        assert chosen([*right, (-3.0, STRONGEST)]) > 0.9
        assert chosen(right) > 1

    @PROPERTY
    @given(EVIDENCE, st.integers(1, 8))
    def test_short_cycles_count_by_their_length(self, several: list[tuple[float, float]], parts: int) -> None:
        found = chosen([pair for pair in several for _ in range(parts)], SETTINGS.reference_cycle / parts)
        assert found == pytest.approx(chosen(several), abs=1e-9)

    def test_cycles_above_the_reference_count_once(self) -> None:
        several = [(1.0, -0.8), (2.0, 0.5)]
        whole = SETTINGS.reference_cycle
        assert chosen(several, 8 * whole) == chosen(several) != chosen(several, whole / 2)

    def test_is_the_35_percent_quantile_of_the_posterior(self) -> None:
        """The reference sums over a grid ten times as fine."""
        several, fine = [(0.5, -0.7), (1.5, 0.4), (-1.0, -0.2)], np.linspace(-6, 6, 2401)
        turns = np.ones_like(fine)
        for turn, found in several:
            too_high = 1 / (1 + np.exp((fine - turn) / SETTINGS.sign_scale))
            turns *= (1 + found) / 2 * too_high + (1 - found) / 2 * (1 - too_high)
        lower, higher = np.exp(fine / 2.0) * (fine < 0), np.exp(-fine / 3.0) * (fine > 0)
        at_first = 0.35 * lower / lower.sum() + 0.65 * higher / higher.sum()
        weights = at_first * (np.exp(-0.5 * ((fine[:, None] - fine) / SETTINGS.task_deviation) ** 2) @ turns)
        expected = fine[np.searchsorted(np.cumsum(weights), 0.35 * weights.sum())]
        assert chosen(several) == pytest.approx(expected, abs=0.03)

    @pytest.mark.parametrize("turn", [-690.0, -1e6, 1e6])
    @pytest.mark.parametrize("found", [-STRONGEST, STRONGEST])
    @pytest.mark.filterwarnings("error")
    def test_turning_points_off_the_grid_change_nothing(self, turn: float, found: float) -> None:
        assert chosen([(turn, found)]) == pytest.approx(0, abs=1e-6)

    @pytest.mark.parametrize("found", [-STRONGEST, STRONGEST])
    @pytest.mark.filterwarnings("error")
    def test_ten_thousand_signs_stay_on_the_grid(self, found: float) -> None:
        end = chosen([(0.0, found)] * 10_000)
        assert math.isfinite(end)
        assert GRID[0] <= end <= GRID[-1]
        assert end * found < 0


class TestElasticity:
    """The distance to the turning point, from the relative change of a cycle's gain with the learning rate."""

    @pytest.mark.parametrize("turn", [-3.0, -1.0, 1.0, 3.0])
    @pytest.mark.parametrize("elasticity", [-0.74, -0.5, -0.2, 0.0, 0.1, 0.3, 0.59])
    def test_gives_the_distance_to_the_turning_point(self, turn: float, elasticity: float) -> None:
        logs = updated([], turn, -STRONGEST, SETTINGS.reference_cycle, elasticity)
        expected = turn + (SETTINGS.distance_ahead if elasticity > 0 else SETTINGS.distance_behind) * elasticity
        assert GRID[int(np.argmax(logs))] == pytest.approx(expected, abs=0.026)
        around = np.interp([expected - SETTINGS.distance_deviation, expected + SETTINGS.distance_deviation], GRID, logs)
        assert np.exp(around) == pytest.approx((1 - STRONGEST) / 2 + STRONGEST * math.exp(-0.5), rel=0.1)

    @pytest.mark.parametrize("elasticity", [SETTINGS.far_elasticity, 0.9, 1.0, 1.25])
    def test_a_large_one_bounds_the_distance_ahead_from_below(self, elasticity: float) -> None:
        logs = updated([], -1.0, -STRONGEST, SETTINGS.reference_cycle, elasticity)
        likely = np.exp(logs)
        assert likely[SETTINGS.far_distance - 1 < GRID] == pytest.approx(1, abs=1e-3)
        assert (likely[SETTINGS.far_distance - 1 - 4 * SETTINGS.distance_deviation > GRID] < 0.05).all()

    @pytest.mark.parametrize("elasticity", [1.26, 3.0, math.inf])
    def test_gains_that_grow_faster_than_the_learning_rate_are_ignored(self, elasticity: float) -> None:
        before = updated([], 0.3, 0.5, SETTINGS.reference_cycle)
        assert updated(before, 1.0, -STRONGEST, SETTINGS.reference_cycle, elasticity) == before

    @pytest.mark.parametrize("elasticity", [SETTINGS.past_elasticity, -5.0, -1e12, -math.inf])
    @pytest.mark.filterwarnings("error")
    def test_a_very_negative_one_bounds_the_distance_behind(self, elasticity: float) -> None:
        """With hardly any gain the relative change of it is noise."""
        likely = np.exp(updated([], 1.0, STRONGEST, SETTINGS.reference_cycle, elasticity))
        assert likely[1 + SETTINGS.past_elasticity > GRID] == pytest.approx(1, abs=1e-3)
        assert (likely[1 + SETTINGS.past_elasticity + 4 * SETTINGS.distance_deviation < GRID] < 0.05).all()

    def test_a_near_turning_point_bounds_the_rise(self) -> None:
        """The sign alone only shows that the turning point is above; an elasticity near 0 shows that it is near."""
        assert 0 < after(1.0, 0.01) < 0.6 * chosen([(1.0, -STRONGEST)])

    @PROPERTY
    @given(st.floats(-4, 3), st.floats(-0.5, 0.59), st.floats(0.001, 0.05))
    def test_a_larger_one_chooses_a_higher_peak(self, turn: float, elasticity: float, more: float) -> None:
        """Up to turning points that the prior finds less likely than a wrong sign."""
        assert after(turn, elasticity) <= after(turn, min(elasticity + more, 0.5999)) + 1e-9

    @pytest.mark.parametrize("turn", [-690.0, 1e6])
    @pytest.mark.filterwarnings("error")
    def test_extreme_turning_points_stay_finite(self, turn: float) -> None:
        assert math.isfinite(after(turn, 0.2))


class TestPathLength:
    def test_is_the_sum_of_rising_learning_rates(self) -> None:
        length, values = None, [(1.0, 5), (2.0, 10), (2.5, 20), (7.0, 40)]
        step = 0
        for value, to in values:
            length, step = path_length(length, value, to, to - step), to
        assert length == 1.0 * 5 + 2.0 * 5 + 2.5 * 10 + 7.0 * 20

    def test_earlier_steps_count_with_the_current_rate_if_theirs_was_higher(self) -> None:
        assert path_length(1000.0, 0.5, 30, 10) == 0.5 * 30
        assert path_length(4.0, 0.5, 30, 10) == 4.0 + 0.5 * 10

    def test_the_first_sync_counts_all_steps_with_the_current_rate(self) -> None:
        assert path_length(None, 0.5, 30, 10) == 0.5 * 30


class TestTurningPoint:
    @pytest.mark.parametrize("factor", [1e-3, 0.5, 1.0, 2.0, 30.0])
    @pytest.mark.parametrize(("cycle", "total"), [(50, 2000), (25, 2000), (10, 10**6)])
    def test_is_the_log_ratio_to_the_turning_length(self, factor: float, cycle: int, total: int) -> None:
        turning_length = 0.18 * total**0.5 * max(total / 2000, 1) ** 0.5 * (80 * cycle / total) ** 0.8
        value = 0.1 * factor * turning_length / cycle
        length = 0.9 * factor * turning_length
        assert turning_point(length, value, cycle, total, SETTINGS) == pytest.approx(math.log(factor), abs=1e-12)

    def test_is_finite_for_a_learning_rate_of_zero(self) -> None:
        """A warm-up may begin at 0."""
        assert turning_point(0.0, 0.0, 10, 1000, SETTINGS) < -600


class TestEvidence:
    @pytest.mark.parametrize(
        ("slope", "significance", "gate", "expected"),
        [
            (1e-9, 1.96, 1.0, 0.95 * STRONGEST),
            (-1e9, 1.96, 1.0, -0.95 * STRONGEST),
            (1.0, 2.576, 0.5, 0.99 * 0.5 * STRONGEST),
            (1.0, 1e9, 1.0, STRONGEST),
            (1.0, 1e9, 0.0, 0.0),
            (1.0, 0.0, 1.0, 0.0),
            (0.0, 0.0, 1.0, 0.0),
        ],
        ids=["positive", "negative", "half gate", "strongest", "closed gate", "not significant", "no slope"],
    )
    def test_by_a_table(self, slope: float, significance: float, gate: float, expected: float) -> None:
        assert evidence(slope, significance, gate, SETTINGS) == pytest.approx(expected, abs=1e-4)


class TestTables:
    def test_the_grid_reaches_from_minus_six_to_six(self) -> None:
        assert (len(GRID), GRID[0], GRID[-1]) == (241, -6.0, 6.0)
        assert GRID[120] == pytest.approx(0, abs=1e-12)

    def test_the_prior_has_35_percent_below_the_given_learning_rate(self) -> None:
        weights = prior(SETTINGS)
        assert weights.sum() == pytest.approx(1)
        assert weights[GRID < -1e-9].sum() == pytest.approx(0.35)
        below, above = np.interp([-1.0, -2.0], GRID, weights), np.interp([1.0, 2.0], GRID, weights)
        assert np.log(below[0] / below[1]) == pytest.approx(1 / 2.0)
        assert np.log(above[0] / above[1]) == pytest.approx(1 / 3.0)


@PROPERTY
@given(st.floats(-2, 2), st.floats(0.05, 1))
def test_a_shifted_log_likelihood_is_the_same_further_up(turn: float, by: float) -> None:
    before = updated([], turn, 0.9, 0.0125)
    after = shifted(before, by, SETTINGS)
    inside = by - 6.0 < GRID
    assert np.allclose(np.asarray(after)[inside], np.interp(GRID[inside] - by, GRID, before))
    assert chosen_after(before) < chosen_after(after) < chosen_after(before) + by
    assert shifted([], by, SETTINGS) == []
