"""The course of the losses: what counts as sound, as broken, and as the edge of stability."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from hdet_kernels.controller.protocol import Judgement
from hdet_kernels.controller.regression import CHANGES, Soundness
from hdet_kernels.controller.settings import RegressionSettings

#: Constants of these cases; the rules are the same with any others.
SETTINGS = RegressionSettings(edge_cost=0.15, edge_cycles=3, break_share=0.3, break_noise=8.0)
#: A fall from 3 to 1 in steps of 0.2.
FALLING = [3.0 - 0.2 * step for step in range(11)]


def course(levels: Sequence[float], slopes: Sequence[float | None] = ()) -> Soundness:
    """Return the course of these levels; the slopes, if any, are those of the last syncs."""
    found = Soundness.at(levels[0])
    several = [None] * (len(levels) - 1 - len(slopes)) + list(slopes)
    for level, slope in zip(levels[1:], several, strict=True):
        found = found.after(level, slope, SETTINGS)
    return found


class TestCourse:
    def test_follows_the_levels(self) -> None:
        found = course([3.0, 2.0, 2.5, 1.0])
        assert found == Soundness(3.0, 1.0, 1.0, (1.0, 0.5, 1.5))
        assert found.gain == 2.0

    def test_remembers_the_last_changes_and_costs(self) -> None:
        found = course([3.0 - 0.1 * step for step in range(20)], [0.1 * step for step in range(1, 6)])
        assert found.changes == pytest.approx([0.1] * CHANGES)
        assert found.costs == pytest.approx([0.3 / 1.7, 0.4 / 1.8, 0.5 / 1.9])

    @pytest.mark.parametrize(
        ("level", "slope"), [(2.0, None), (3.0, 1.0), (4.0, 1.0)], ids=["no slope", "no gain", "a loss"]
    )
    def test_a_cost_needs_a_slope_and_a_gain(self, level: float, slope: float | None) -> None:
        assert course([3.0, level], [slope]).costs == ()

    def test_begins_anew_from_the_lowest_level_without_costs(self) -> None:
        found = course([3.0, 1.0, 2.0], [0.5, 0.5]).begun_anew()
        assert found == Soundness(3.0, 1.0, 1.0, (2.0, 1.0))

    def test_survives_json(self) -> None:
        found = course([3.0, 2.0, 1.7], [0.1, None])
        assert Soundness.of(json.loads(json.dumps(found.state_dict()))) == found


class TestJudge:
    @pytest.mark.parametrize(
        ("levels", "level", "expected"),
        [
            ([3.0], 100.0, "sound"),
            (FALLING, 0.8, "sound"),
            (FALLING, 1.15, "sound"),
            (FALLING, 1.25, "unclear"),
            (FALLING, 9.0, "unclear"),
            ([*FALLING, 3.0], 1.0, "sound"),
            ([*FALLING, 3.0], 2.5, "unclear"),
            ([*FALLING, 3.0], 3.0, "broken"),
            ([*FALLING, 1.7], 1.7, "unclear"),
        ],
        ids=["first", "lower", "within the usual change", "above", "one jump", "back again", "within the noise",
             "two high levels", "lost little"],
    )  # fmt: skip
    def test_by_a_table(self, levels: list[float], level: float, expected: Judgement) -> None:
        assert course(levels).judge(level, SETTINGS) == expected

    def test_no_finite_replica_is_broken(self) -> None:
        assert course(FALLING).judge(None, SETTINGS) == "broken"

    def test_levels_that_change_much_hide_a_break(self) -> None:
        """Both levels are far above the lowest, but no further than levels jump anyway."""
        levels = [3.0, 1.0, 2.5, 1.0, 2.6, 1.1, 2.5]
        assert course(levels).judge(2.6, SETTINGS) == "unclear"

    def test_near_the_edge_nothing_is_sound(self) -> None:
        assert course(FALLING, [0.5] * 3).judge(0.9, SETTINGS) == "unclear"
        assert course(FALLING, [0.2] * 3).judge(0.9, SETTINGS) == "sound"


class TestNearEdge:
    @pytest.mark.parametrize(
        ("slopes", "expected"),
        [
            ([0.4, 0.4], False),
            ([0.4, 0.4, 0.4], True),
            ([9.0, 0.1, 0.1], False),
            ([0.1, 0.4, 0.4], True),
            ([-0.4, -0.4, -0.4], False),
            ([0.4, 0.4, 0.4, 0.0, 0.0], False),
        ],
        ids=["too few", "three", "one of three", "two of three", "larger is better", "passed"],
    )
    def test_is_the_median_of_three_costs(self, slopes: list[float], expected: bool) -> None:
        """The gain is 1.6 to 2.0, so that the edge is at slopes of 0.24 to 0.3."""
        assert course(FALLING, slopes).near_edge(SETTINGS) is expected

    def test_a_gain_within_the_usual_change_tells_nothing(self) -> None:
        """The level jumps up and down by 2, and is lower than the first one by 0.5."""
        jumping = [3.0, 5.0, 3.0, 5.0, 3.0, 2.5, 4.5, 2.5]
        assert not course(jumping, [9.0] * 3).near_edge(SETTINGS)
        assert course([*FALLING, 1.0, 1.0], [9.0] * 3).near_edge(SETTINGS)

    def test_the_lowest_of_many_levels_on_a_plateau_is_no_gain(self) -> None:
        """The lowest of 24 noisy levels is mostly below the first one by a usual change, and rarely by four."""
        found = [course(levels, [9.0] * 3) for levels in 2.3 + 0.01 * np.random.default_rng(0).normal(size=(100, 24))]
        assert sum(each.gain > each.usual_change for each in found) > 75
        assert sum(each.near_edge(RegressionSettings()) for each in found) < 15

    def test_is_passed_once_learning_rates_were_lowered(self) -> None:
        assert not course(FALLING, [0.5] * 3).begun_anew().near_edge(SETTINGS)
