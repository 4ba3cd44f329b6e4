"""The course of losses and slopes, and the signs that a learning rate is too high."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from hdet_kernels.controller.regression import BENDS, CHANGES, Soundness
from hdet_kernels.controller.settings import RegressionSettings

#: Constants of these cases; the rules are the same with any others.
SETTINGS = RegressionSettings(fall_share=0.3, fall_noise=8.0)
#: A fall from 3 to 1 in steps of 0.2.
FALLING = [3.0 - 0.2 * step for step in range(11)]


def course(levels: Sequence[float], signs: Sequence[float | None] = ()) -> Soundness:
    """Return the course of these levels; the means of slopes over their errors, if any, are those of the last syncs."""
    found = Soundness.at(levels[0])
    several = [None] * (len(levels) - 1 - len(signs)) + list(signs)
    for level, sign in zip(levels[1:], several, strict=True):
        found = found.after(level, sign=sign, path=0.0)
    return found


def turning(means: Sequence[float | None], path: float) -> Soundness:
    """Return a course with these means of slopes over their errors, after a path of this length."""
    found = Soundness.at(3.0)
    for mean in means:
        found = found.after(3.0, sign=mean, path=path / len(means))
    return found


class TestCourse:
    def test_follows_the_levels(self) -> None:
        found = course([3.0, 2.0, 2.5, 1.0])
        assert found == Soundness(3.0, 1.0, 1.0, (1.0, 0.5, 1.5), 2.5, (0.75, 1.0))
        assert found.gain == 2.0
        assert (found.recent, found.noise) == (1.75, 0.875)
        assert (Soundness.at(3.0).recent, course([3.0, 2.0]).noise) == (3.0, math.inf), "before there are enough"

    def test_remembers_the_last_changes_and_bends(self) -> None:
        found = course([3.0 - 0.1 * step for step in range(20)])
        assert found.changes == pytest.approx([0.1] * CHANGES)
        assert found.bends == pytest.approx([0.0] * BENDS), "a trend is no noise"
        assert course([3.0, 2.0] * 9).bends == (1.0,) * BENDS

    def test_adds_up_slopes_that_are_known_and_the_path(self) -> None:
        found = turning([2.0, None, -0.5], path=0.3)
        assert (found.count, found.mean_slope) == (2, 0.75)
        assert found.path == pytest.approx(0.3)
        assert math.isnan(turning([None], path=0.1).mean_slope)

    def test_survives_json(self) -> None:
        found = course([3.0, 2.0, 1.7], [0.1, None]).after(1.5, sign=0.7, path=0.01)
        assert Soundness.of(json.loads(json.dumps(found.state_dict()))) == found


class TestFellBack:
    @pytest.mark.parametrize(
        ("levels", "level", "expected"),
        [
            ([3.0], 100.0, False),
            (FALLING, 0.8, False),
            (FALLING, 9.0, False),
            ([*FALLING, 3.0], 1.0, False),
            ([*FALLING, 3.0], 2.5, False),
            ([*FALLING, 3.0], 3.0, True),
            ([*FALLING, 1.7], 1.7, False),
        ],
        ids=["first", "lower", "one jump", "back again", "within the noise", "two high levels", "lost little"],
    )
    def test_by_a_table(self, levels: list[float], level: float, expected: bool) -> None:
        assert course(levels).fell_back(level, SETTINGS) is expected

    def test_levels_that_change_much_hide_it(self) -> None:
        """Both levels are far above the lowest, but no further than levels jump anyway."""
        assert not course([3.0, 1.0, 2.5, 1.0, 2.6, 1.1, 2.5]).fell_back(2.6, SETTINGS)


class TestTurned:
    FROM, UNTIL, MOST = SETTINGS.turned_from, SETTINGS.turned_until, SETTINGS.turned_mean
    ENOUGH = SETTINGS.turned_count

    @pytest.mark.parametrize(
        ("path", "means", "expected"),
        [
            (FROM, [1.1 * MOST] * ENOUGH, True),
            (UNTIL, [1.1 * MOST] * ENOUGH, True),
            (UNTIL, [0.0, 2.2 * MOST] * ENOUGH, True),
            (UNTIL, [0.5 * MOST, 3 * MOST, -MOST] * ENOUGH, False),
            (UNTIL, [1.1 * MOST] * (ENOUGH // 2), False),
            (UNTIL, [1.5 * MOST] * (ENOUGH // 2), True),
            (UNTIL, [-2 * MOST] * ENOUGH, False),
            (0.9 * FROM, [2 * MOST] * ENOUGH, False),
            (1.1 * UNTIL, [2 * MOST] * ENOUGH, False),
            (UNTIL, [None, None], False),
        ],
        ids=["first", "last", "mean", "low mean", "few", "few, clear", "larger", "too early", "too late", "unknown"],
    )
    def test_is_the_mean_of_the_first_slopes(self, path: float, means: list[float | None], expected: bool) -> None:
        assert turning(means, path).turned(SETTINGS) is expected


class TestSign:
    """Which sign is told, and with which numbers."""

    def told(
        self, before: Soundness, level: float | None, *, sign: float | None = None, path: float = 0.0
    ) -> str | None:
        after = before if level is None else before.after(level, sign=sign, path=path)
        return before.sign(level, after, SETTINGS)

    def test_none_at_a_good_level(self) -> None:
        assert self.told(course(FALLING), 0.9, sign=0.1) is None

    def test_no_finite_replica(self) -> None:
        assert self.told(course(FALLING), None) == "no replica is finite"

    def test_losses_that_fell_back(self) -> None:
        found = self.told(course([*FALLING, 3.0]), 3.5) or ""
        assert found.startswith("training fell back (mean loss 3.5 after 3; lowest 1, gain so far 2, usual change 0.2")

    def test_the_first_slopes(self) -> None:
        mean, path = 3 * SETTINGS.turned_mean, SETTINGS.turned_from
        found = self.told(Soundness.at(3.0), 2.9, sign=mean, path=path) or ""
        assert found.startswith(f"the first slopes ask for a smaller learning rate (by {mean:.2g} standard errors in")
        assert f"{SETTINGS.turned_mean:.2g} is allowed; mean loss 2.9" in found


class TestDoubtful:
    ENOUGH, MEAN = SETTINGS.turned_count, SETTINGS.doubt_mean

    @pytest.mark.parametrize(
        ("means", "expected"),
        [
            ([1.1 * MEAN] * ENOUGH, True),
            ([0.9 * MEAN] * ENOUGH, False),
            ([0.0, 2.2 * MEAN] * (ENOUGH // 2), True),
            ([None, *[1.1 * MEAN] * ENOUGH, None], True),
            ([1.1 * MEAN] * (ENOUGH // 2), False),
            ([1.5 * MEAN] * (ENOUGH // 2), True),
            ([-9.0] * ENOUGH, False),
            ([None] * ENOUGH, False),
        ],
        ids=["above", "below", "mean", "some unknown", "few", "few, clear", "larger", "unknown"],
    )
    def test_is_the_mean_of_the_first_slopes(self, means: list[float | None], expected: bool) -> None:
        assert course(FALLING, means).doubtful(SETTINGS) is expected

    @pytest.mark.parametrize(
        ("levels", "expected"),
        [
            ([3.0] * 11, False),
            ([3.0, 3.1] * 5, False),
            ([3.0, *[2.9, 2.8] * 5], False),
            ([3.0, 2.0, *[2.05, 2.0] * 5], True),
            ([3.0 + 0.1 * step for step in range(11)], False),
        ],
        ids=["plateau", "noise", "within the usual change", "gained", "lost"],
    )
    def test_on_a_plateau_slopes_tell_nothing(self, levels: list[float], expected: bool) -> None:
        assert course(levels, [9.0] * self.ENOUGH).doubtful(SETTINGS) is expected
