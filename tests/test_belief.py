"""What is believed of the right peak, from evidence written out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet_kernels import belief
from hdet_kernels.belief import (
    GREEDY,
    GRID,
    JITTER,
    SLACK,
    TOO_HIGH,
    TOO_LOW,
    WHOLE,
    WRONG,
    heard,
    opposed,
    turning_point,
)

PROPERTY = settings(deadline=None, max_examples=80)
SURE = 1 - 2 * WRONG

EVIDENCE = st.lists(st.tuples(st.floats(-8, 8), st.floats(-SURE, SURE)), max_size=12)


def median(evidence: Sequence[tuple[float, float]], cycle: float) -> float:
    """After pairs of a turning point and what was heard."""
    logs: list[float] = []
    for turn, said in evidence:
        logs = belief.updated(logs, turn, said, cycle)
    return belief.median(logs)


class TestMedian:
    def test_nothing_is_believed_without_evidence(self) -> None:
        assert median([], WHOLE) == 0.0

    def test_what_says_nothing_changes_nothing(self) -> None:
        assert median([(turn, 0.0) for turn in (-3.0, 0.1, 5.0)], WHOLE) == pytest.approx(0, abs=1e-12)

    @pytest.mark.parametrize("turn", [0.5, 1.0, 2.0])
    def test_falls_further_than_it_rises(self, turn: float) -> None:
        """A start that is too high may be further off than one that is too low."""
        assert -median([(-turn, SURE)], WHOLE) > 1.2 * median([(turn, -SURE)], WHOLE)

    @PROPERTY
    @given(EVIDENCE)
    def test_the_order_of_evidence_means_nothing(self, evidence: list[tuple[float, float]]) -> None:
        assert median(evidence[::-1], WHOLE) == pytest.approx(median(evidence, WHOLE), abs=1e-9)

    @PROPERTY
    @given(EVIDENCE, st.floats(-5, 5), st.floats(0.01, SURE))
    def test_too_high_lowers_it_and_too_low_raises_it(
        self, evidence: list[tuple[float, float]], turn: float, said: float
    ) -> None:
        before = median(evidence, WHOLE)
        assert median([*evidence, (turn, said)], WHOLE) < before + 1e-9
        assert median([*evidence, (turn, -said)], WHOLE) > before - 1e-9

    @pytest.mark.parametrize("turn", [-4.0, -1.0, 0.0, 1.0, 4.0])
    def test_the_surer_the_further(self, turn: float) -> None:
        found = [median([(turn, said)], WHOLE) for said in (0.0, 0.3, 0.6, SURE)]
        assert found == sorted(found, reverse=True)
        assert len(set(found)) == 4

    @pytest.mark.parametrize(
        ("turn", "moved"), [(4.0, 0.06), (2.0, 0.35), (0.0, 1.52), (-2.0, 3.14), (-4.0, 4.36)], ids=str
    )
    def test_what_was_expected_moves_little_and_a_surprise_much(self, turn: float, moved: float) -> None:
        """Too high, at a learning rate that would be right if the peak were e^turn times higher."""
        assert median([(turn, SURE)], WHOLE) == pytest.approx(-moved, abs=0.01)

    def test_what_was_heard_at_a_place_is_no_news_there(self) -> None:
        """A hundred signs tell that the task turns above, which three do: but for what each may be off by itself."""
        few, many = (median([(1.0, -SURE)] * count, WHOLE) for count in (3, 100))
        assert 0 < many - few < 1.05 * JITTER * math.log(100 / 3)

    @pytest.mark.parametrize("right", [-3.0, -1.0, 0.0, 0.7, 3.0])
    def test_finds_what_all_signs_agree_on(self, right: float) -> None:
        """Looked for from both sides, the median ends within two fifths of the slack, nearer to the start."""
        turns = np.linspace(right - 2, right + 2, 40)
        evidence = [(turn, math.copysign(SURE, turn - right)) for turn in turns.tolist()]
        assert median(evidence, WHOLE) == pytest.approx(right, abs=0.4 * SLACK)

    def test_one_wrong_sign_is_outvoted(self) -> None:
        """Six signs say that the peak is at least e^1; a seventh, however sure, that it is far below."""
        right = [(1.0, -SURE)] * 6
        assert median([*right, (-3.0, SURE)], WHOLE) > 0.9
        assert median(right, WHOLE) > 1

    @PROPERTY
    @given(EVIDENCE, st.integers(1, 8))
    def test_many_short_cycles_tell_what_a_few_long_ones_do(
        self, evidence: list[tuple[float, float]], parts: int
    ) -> None:
        found = median([pair for pair in evidence for _ in range(parts)], WHOLE / parts)
        assert found == pytest.approx(median(evidence, WHOLE), abs=1e-9)

    def test_long_cycles_count_once_each(self) -> None:
        evidence = [(1.0, -0.8), (2.0, 0.5)]
        assert median(evidence, 8 * WHOLE) == median(evidence, WHOLE) != median(evidence, WHOLE / 2)

    def test_is_half_of_what_is_believed(self) -> None:
        """By summing over a grid ten times as fine."""
        evidence, fine = [(0.5, -0.7), (1.5, 0.4), (-1.0, -0.2)], np.linspace(-6, 6, 2401)
        turns = np.ones_like(fine)
        for turn, said in evidence:
            too_high = 1 / (1 + np.exp((fine - turn) / JITTER))
            turns *= (1 + said) / 2 * too_high + (1 - said) / 2 * (1 - too_high)
        lower, higher = np.exp(fine / TOO_HIGH) * (fine < 0), np.exp(-fine / TOO_LOW) * (fine > 0)
        at_first = lower / lower.sum() + higher / higher.sum()
        weights = at_first * (np.exp(-0.5 * ((fine[:, None] - fine) / SLACK) ** 2) @ turns)
        expected = fine[np.searchsorted(np.cumsum(weights), 0.5 * weights.sum())]
        assert median(evidence, WHOLE) == pytest.approx(expected, abs=0.03)

    @pytest.mark.parametrize("turn", [-690.0, -1e6, 1e6])
    @pytest.mark.parametrize("said", [-SURE, SURE])
    @pytest.mark.filterwarnings("error")
    def test_a_learning_rate_of_next_to_nothing_tells_nothing(self, turn: float, said: float) -> None:
        assert median([(turn, said)], WHOLE) == pytest.approx(0, abs=1e-6)

    @pytest.mark.parametrize("said", [-SURE, SURE])
    @pytest.mark.filterwarnings("error")
    def test_ten_thousand_signs_stay_on_the_grid(self, said: float) -> None:
        found = median([(0.0, said)] * 10_000, WHOLE)
        assert math.isfinite(found)
        assert GRID[0] <= found <= GRID[-1]
        assert found * said < 0


class TestOpposed:
    @pytest.mark.parametrize(
        ("evidence", "expected"),
        [
            ([], False),
            ([(0.0, -SURE)] * 9, False),
            ([(0.0, 0.2)], False),
            ([(0.0, 0.5)], True),
            ([(3.0, -SURE), (5.0, SURE), (4.0, -SURE)], True),
            ([(0.0, 0.2)] * 3, True),
        ],
        ids=["nothing", "only up", "hardly", "down", "down once", "down a little, often"],
    )
    def test_is_whether_a_smaller_one_was_ever_better(
        self, evidence: list[tuple[float, float]], expected: bool
    ) -> None:
        logs: list[float] = []
        for turn, said in evidence:
            logs = belief.updated(logs, turn, said, WHOLE)
        assert opposed(logs) is expected


class TestTurningPoint:
    @pytest.mark.parametrize("factor", [1e-3, 0.5, 1.0, 2.0, 30.0])
    @pytest.mark.parametrize(("step", "sync_every", "total"), [(50, 50, 2000), (600, 50, 2000), (10, 10, 10**6)])
    def test_is_where_the_law_would_be_met(self, factor: float, step: int, sync_every: int, total: int) -> None:
        greedy = GREEDY * (80 * sync_every / total) ** 0.8 * total ** (2 / 3) / (step + sync_every)
        assert turning_point(factor * greedy, step, sync_every, total) == pytest.approx(math.log(factor), abs=1e-12)

    def test_of_a_learning_rate_of_zero_is_finite(self) -> None:
        """A warm-up may begin there."""
        assert turning_point(0.0, 10, 10, 1000) < -600


class TestAhead:
    @pytest.mark.parametrize("x", [0.19, 0.3, 0.5, 0.9, 1.0])
    def test_is_exact_for_a_parabola(self, x: float) -> None:
        """Gains x − x²/2: what they grow by for each e-fold of x, over themselves."""
        elasticity = (x - x**2) / (x - x**2 / 2)
        assert belief.ahead(elasticity) == pytest.approx(-math.log(x), abs=1e-12)

    @pytest.mark.parametrize("elasticity", [0.9, 0.95, 1.0, 30.0, math.inf])
    def test_has_a_bound(self, elasticity: float) -> None:
        assert belief.ahead(elasticity) == pytest.approx(math.log(5.5))

    @pytest.mark.parametrize("elasticity", [-math.inf, -3.0, -1e-9, 0.0])
    def test_is_nothing_where_a_smaller_one_would_gain_more(self, elasticity: float) -> None:
        assert belief.ahead(elasticity) == 0.0


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
