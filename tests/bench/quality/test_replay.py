"""Controllers that are tried on recorded runs."""

from __future__ import annotations

import math

import pytest

from bench.quality.replay import excesses, replay, replay_table
from hdet_kernels.controller import RegressionController
from tests.bench.quality.scripted_runs import scripted

SEEN = scripted(breaks_from=8.0, too_low=2.0, too_high=8.0)


def test_a_good_learning_rate_is_kept_and_what_breaks_is_lowered() -> None:
    controller = RegressionController()
    best = 2.0**SEEN.best
    for factor in (0.01 / best, 0.001 / best):
        assert replay(SEEN, controller, factor, 0, probe=True) == pytest.approx(math.log2(factor))
    lowered = replay(SEEN, controller, 16 * 0.01 / best, 0, probe=False)
    assert lowered == pytest.approx(math.log2(16 * 0.01 / best / controller.settings.break_cut))
    without = RegressionController(undo=0)
    assert replay(SEEN, without, 16 * 0.01 / best, 0, probe=False) == pytest.approx(math.log2(16 * 0.01 / best))


def test_excess_beside_plain_training() -> None:
    own, plain = excesses({"census": SEEN}, {"census": RegressionController()}, 10.0, probe=True)["census"]
    assert own < plain
    assert excesses({"census": SEEN}, {"census": RegressionController()}, 1000.0, probe=True) == {}


def test_table_has_every_start_in_both_modes() -> None:
    lines = replay_table({"census": SEEN}, {"census": RegressionController()}).splitlines()
    assert len(lines) == 2 + 2 * 7
    assert lines[2].startswith("| 0.0333 | probe | 1 |")
