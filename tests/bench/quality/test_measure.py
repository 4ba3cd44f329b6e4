"""What the runs of one task measure."""

from __future__ import annotations

import math

import pytest

from bench.quality.measure import AT_BEST, BREAK_SHARES, TEN_HIGH, TEN_LOW, measure, played, turn_of
from hdet_kernels.controller.settings import RegressionSettings
from tests.bench.quality.scripted_runs import scripted

SETTINGS = RegressionSettings()


@pytest.mark.parametrize("turning_length", [0.2, 0.5])
def test_turn_is_where_the_signs_change(turning_length: float) -> None:
    seen = scripted(turning_length=turning_length, too_low=2.0, too_high=2.0)
    for run in seen.near(0.0, 1.7):
        turn, wrong = turn_of(seen, run, SETTINGS)
        assert turn == pytest.approx(math.log(turning_length), abs=0.2)  # path lengths of syncs are that far apart
        assert wrong == 0


def test_clear_signs_on_the_wrong_side_are_counted() -> None:
    seen = scripted()
    run = seen.near(0.0, 0.5)[0]
    seen.slope[3, run] *= -1  # one of 23 slopes
    turn, wrong = turn_of(seen, run, SETTINGS)
    assert wrong == pytest.approx(1 / 23)
    assert turn == pytest.approx(turn_of(scripted(), run, SETTINGS)[0])
    seen.error[3, run] = abs(seen.slope[3, run])  # no longer clear
    assert turn_of(seen, run, SETTINGS)[1] == 0


def test_costs_breaks_and_edges() -> None:
    found = measure(scripted(too_low=3.0, too_high=3.0, edge_cost=0.08, breaks_from=8.0), SETTINGS)
    assert (found.too_high, found.too_low) == (pytest.approx(4.5, rel=1e-2), pytest.approx(4.5, rel=1e-2))
    certain = 1 - (2 * 0.1) ** 2  # of slopes with a standard error of a tenth
    assert max(found.edge_costs) == pytest.approx(0.08 * certain, rel=1e-6)
    small, large = BREAK_SHARES.index(0.3), BREAK_SHARES.index(0.6)
    assert found.broken[TEN_HIGH][:, small, 1].all()
    assert not found.broken[TEN_HIGH][:, large, 1].any()
    assert not found.broken[AT_BEST].any()
    assert not found.broken[TEN_LOW].any()


def test_a_loss_that_is_not_finite_is_broken() -> None:
    seen = scripted()
    run = seen.near(TEN_HIGH, 0.5)[0]
    seen.level[7, run] = math.nan
    assert len(played(seen, run, probe=False)) == 7
    assert measure(seen, SETTINGS).broken[TEN_HIGH][1].all()
