"""What is believed of the right peak, from evidence written out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_kernels.controller import peak_posterior as belief
from hdet_kernels.controller.peak_posterior import (
    AHEAD,
    AT_LEAST,
    BEHIND,
    BLUR,
    FAR,
    GRID,
    JITTER,
    PAST,
    SLACK,
    WHOLE,
    WRONG,
    heard,
)

PROPERTY = settings(deadline=None, max_examples=80)
SURE = 1 - 2 * WRONG

EVIDENCE = st.lists(st.tuples(st.floats(-8, 8), st.floats(-SURE, SURE)), max_size=12)


def chosen(evidence: Sequence[tuple[float, float]], cycle: float = WHOLE) -> float:
    """After pairs of a turning point and what was heard."""
    logs: list[float] = []
    for turn, said in evidence:
        logs = belief.updated(logs, turn, said, cycle)
    return belief.chosen(logs)


def after(turn: float, elasticity: float, said: float = -SURE) -> float:
    return belief.chosen(belief.updated([], turn, said, WHOLE, elasticity))


class TestChosen:
    def test_nothing_is_believed_without_evidence(self) -> None:
        assert chosen([]) == 0.0

    def test_what_says_nothing_changes_nothing(self) -> None:
        assert chosen([(turn, 0.0) for turn in (-3.0, 0.1, 5.0)]) == pytest.approx(0, abs=1e-12)

    @pytest.mark.parametrize("turn", [0.5, 1.0, 2.0])
    def test_falls_further_than_it_rises(self, turn: float) -> None:
        """Too high costs more than too low."""
        assert -chosen([(-turn, SURE)]) > 1.2 * chosen([(turn, -SURE)]) > 0

    @pytest.mark.parametrize("said", [-1e-6, 1e-6])
    def test_next_to_nothing_moves_it_next_to_nothing(self, said: float) -> None:
        """A prudent choice is no lower than the start before there is a reason."""
        assert chosen([(0.0, said)]) == pytest.approx(0, abs=1e-4)

    @PROPERTY
    @given(EVIDENCE)
    def test_the_order_of_evidence_means_nothing(self, evidence: list[tuple[float, float]]) -> None:
        assert chosen(evidence[::-1]) == pytest.approx(chosen(evidence), abs=1e-9)

    @PROPERTY
    @given(EVIDENCE, st.floats(-5, 5), st.floats(0.01, SURE))
    def test_too_high_lowers_it_and_too_low_raises_it(
        self, evidence: list[tuple[float, float]], turn: float, said: float
    ) -> None:
        before = chosen(evidence)
        assert chosen([*evidence, (turn, said)]) < before + 1e-9
        assert chosen([*evidence, (turn, -said)]) > before - 1e-9

    @pytest.mark.parametrize("turn", [-4.0, -1.0, 0.0, 1.0, 4.0])
    def test_the_surer_the_further(self, turn: float) -> None:
        found = [chosen([(turn, said)]) for said in (0.0, 0.3, 0.6, SURE)]
        assert found == sorted(found, reverse=True)
        assert len(set(found)) == 4

    def test_what_was_expected_moves_little_and_a_surprise_much(self) -> None:
        """Too high, at a learning rate that would be right if the peak were e^turn times higher."""
        moved = [-chosen([(turn, SURE)]) for turn in (4.0, 2.0, 0.0, -2.0, -4.0)]
        assert moved == pytest.approx([0.22, 0.66, 1.79, 3.31, 4.36], abs=0.01)

    def test_what_was_heard_at_a_place_is_no_news_there(self) -> None:
        """A hundred signs tell that the task turns above, which three do: but for what each may be off by itself."""
        few, many = (chosen([(1.0, -SURE)] * count) for count in (3, 100))
        assert 0 < many - few < 1.05 * JITTER * math.log(100 / 3)

    @pytest.mark.parametrize("right", [-3.0, -1.0, 0.0, 0.7, 3.0])
    def test_finds_what_all_signs_agree_on(self, right: float) -> None:
        """Looked for from both sides: lower than that by 0.39 of the slack, and a little nearer to the start."""
        turns = np.linspace(right - 2, right + 2, 40)
        evidence = [(turn, math.copysign(SURE, turn - right)) for turn in turns.tolist()]
        assert right - 0.6 * SLACK < chosen(evidence) < right

    def test_one_wrong_sign_is_outvoted(self) -> None:
        """Six signs say that the peak is at least e^1; a seventh, however sure, that it is far below."""
        right = [(1.0, -SURE)] * 6
        assert chosen([*right, (-3.0, SURE)]) > 0.9
        assert chosen(right) > 1

    @PROPERTY
    @given(EVIDENCE, st.integers(1, 8))
    def test_many_short_cycles_tell_what_a_few_long_ones_do(
        self, evidence: list[tuple[float, float]], parts: int
    ) -> None:
        found = chosen([pair for pair in evidence for _ in range(parts)], WHOLE / parts)
        assert found == pytest.approx(chosen(evidence), abs=1e-9)

    def test_long_cycles_count_once_each(self) -> None:
        evidence = [(1.0, -0.8), (2.0, 0.5)]
        assert chosen(evidence, 8 * WHOLE) == chosen(evidence) != chosen(evidence, WHOLE / 2)

    def test_is_35_percent_of_what_is_believed(self) -> None:
        """By summing over a grid ten times as fine."""
        evidence, fine = [(0.5, -0.7), (1.5, 0.4), (-1.0, -0.2)], np.linspace(-6, 6, 2401)
        turns = np.ones_like(fine)
        for turn, said in evidence:
            too_high = 1 / (1 + np.exp((fine - turn) / JITTER))
            turns *= (1 + said) / 2 * too_high + (1 - said) / 2 * (1 - too_high)
        lower, higher = np.exp(fine / 2.0) * (fine < 0), np.exp(-fine / 3.0) * (fine > 0)
        at_first = 0.35 * lower / lower.sum() + 0.65 * higher / higher.sum()
        weights = at_first * (np.exp(-0.5 * ((fine[:, None] - fine) / SLACK) ** 2) @ turns)
        expected = fine[np.searchsorted(np.cumsum(weights), 0.35 * weights.sum())]
        assert chosen(evidence) == pytest.approx(expected, abs=0.03)

    @pytest.mark.parametrize("turn", [-690.0, -1e6, 1e6])
    @pytest.mark.parametrize("said", [-SURE, SURE])
    @pytest.mark.filterwarnings("error")
    def test_a_learning_rate_of_next_to_nothing_tells_nothing(self, turn: float, said: float) -> None:
        assert chosen([(turn, said)]) == pytest.approx(0, abs=1e-6)

    @pytest.mark.parametrize("said", [-SURE, SURE])
    @pytest.mark.filterwarnings("error")
    def test_ten_thousand_signs_stay_on_the_grid(self, said: float) -> None:
        found = chosen([(0.0, said)] * 10_000)
        assert math.isfinite(found)
        assert GRID[0] <= found <= GRID[-1]
        assert found * said < 0


class TestElasticity:
    """How far away the turn is, by how what a cycle gained grows with the learning rate."""

    @pytest.mark.parametrize("turn", [-3.0, -1.0, 1.0, 3.0])
    @pytest.mark.parametrize("elasticity", [-0.74, -0.5, -0.2, 0.0, 0.1, 0.3, 0.59])
    def test_the_turn_is_there(self, turn: float, elasticity: float) -> None:
        logs = belief.updated([], turn, -SURE, WHOLE, elasticity)
        expected = turn + (AHEAD if elasticity > 0 else BEHIND) * elasticity
        assert GRID[int(np.argmax(logs))] == pytest.approx(expected, abs=0.026)
        around = np.interp([expected - BLUR, expected + BLUR], GRID, logs)
        assert np.exp(around) == pytest.approx((1 - SURE) / 2 + SURE * math.exp(-0.5), rel=0.1)

    @pytest.mark.parametrize("elasticity", [FAR, 0.9, 1.0, 1.25])
    def test_far_below_it_is_ahead_by_that_at_least(self, elasticity: float) -> None:
        logs = belief.updated([], -1.0, -SURE, WHOLE, elasticity)
        likely = np.exp(logs)
        assert likely[GRID > AT_LEAST - 1] == pytest.approx(1, abs=1e-3)
        assert (likely[GRID < AT_LEAST - 1 - 4 * BLUR] < 0.05).all()

    @pytest.mark.parametrize("elasticity", [1.26, 3.0, math.inf])
    def test_gains_that_grow_faster_than_the_learning_rate_say_nothing(self, elasticity: float) -> None:
        before = belief.updated([], 0.3, 0.5, WHOLE)
        assert belief.updated(before, 1.0, -SURE, WHOLE, elasticity) == before

    @pytest.mark.parametrize("elasticity", [PAST, -5.0, -1e12, -math.inf])
    @pytest.mark.filterwarnings("error")
    def test_far_past_it_is_behind_by_that_at_least(self, elasticity: float) -> None:
        """Where next to nothing is gained, how much less a larger one gains is noise."""
        likely = np.exp(belief.updated([], 1.0, SURE, WHOLE, elasticity))
        assert likely[GRID < 1 + PAST] == pytest.approx(1, abs=1e-3)
        assert (likely[GRID > 1 + PAST + 4 * BLUR] < 0.05).all()

    def test_a_turn_that_is_near_bounds_the_rise(self) -> None:
        """The sign alone says that it is above, as does an elasticity next to 0: but by how much."""
        assert 0 < after(1.0, 0.01) < 0.6 * chosen([(1.0, -SURE)])

    @PROPERTY
    @given(st.floats(-4, 3), st.floats(-0.5, 0.59), st.floats(0.001, 0.05))
    def test_the_further_away_the_further(self, turn: float, elasticity: float, more: float) -> None:
        """A turn at a hundred times the peak is less likely before anything was heard than that this was wrong."""
        assert after(turn, elasticity) <= after(turn, min(elasticity + more, 0.5999)) + 1e-9

    @pytest.mark.parametrize("turn", [-690.0, 1e6])
    @pytest.mark.filterwarnings("error")
    def test_any_turn_is_taken(self, turn: float) -> None:
        assert math.isfinite(after(turn, 0.2))


class TestWay:
    def test_is_the_sum_of_the_learning_rates_while_they_rise(self) -> None:
        gone, values = None, [(1.0, 5), (2.0, 10), (2.5, 20), (7.0, 40)]
        step = 0
        for value, to in values:
            gone, step = belief.way(gone, value, to, to - step), to
        assert gone == 1.0 * 5 + 2.0 * 5 + 2.5 * 10 + 7.0 * 20

    def test_what_was_gone_with_a_higher_one_counts_as_gone_with_this(self) -> None:
        assert belief.way(1000.0, 0.5, 30, 10) == 0.5 * 30
        assert belief.way(4.0, 0.5, 30, 10) == 4.0 + 0.5 * 10

    def test_where_it_is_not_known_the_learning_rate_counts_as_it_was(self) -> None:
        assert belief.way(None, 0.5, 30, 10) == 0.5 * 30


class TestTurningPoint:
    @pytest.mark.parametrize("factor", [1e-3, 0.5, 1.0, 2.0, 30.0])
    @pytest.mark.parametrize(("cycle", "total"), [(50, 2000), (25, 2000), (10, 10**6)])
    def test_is_where_the_law_would_be_met(self, factor: float, cycle: int, total: int) -> None:
        turns_at = 0.18 * total**0.5 * max(total / 2000, 1) ** 0.5 * (80 * cycle / total) ** 0.8
        value = 0.1 * factor * turns_at / cycle
        gone = 0.9 * factor * turns_at
        assert belief.turning_point(gone, value, cycle, total) == pytest.approx(math.log(factor), abs=1e-12)

    def test_of_a_learning_rate_of_zero_is_finite(self) -> None:
        """A warm-up may begin there."""
        assert belief.turning_point(0.0, 0.0, 10, 1000) < -600


class TestHeard:
    @pytest.mark.parametrize(
        ("slope", "significance", "gate", "expected"),
        [
            (1e-9, 1.96, 1.0, 0.95 * SURE),
            (-1e9, 1.96, 1.0, -0.95 * SURE),
            (1.0, 2.576, 0.5, 0.99 * 0.5 * SURE),
            (1.0, 1e9, 1.0, SURE),
            (1.0, 1e9, 0.0, 0.0),
            (1.0, 0.0, 1.0, 0.0),
            (0.0, 0.0, 1.0, 0.0),
        ],
        ids=["up", "down", "half open", "as sure as can be", "closed", "not sure", "no slope"],
    )
    def test_table(self, slope: float, significance: float, gate: float, expected: float) -> None:
        assert heard(slope, significance, gate) == pytest.approx(expected, abs=1e-4)
