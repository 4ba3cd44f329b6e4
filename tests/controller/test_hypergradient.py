"""The hypergradient controller: slopes that are given, and no losses."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from hdet_kernels import HypergradientController
from hdet_kernels.controller.protocol import Observation, Run
from tests.controller.cases import INF, NAN, RUN, fan, gate, observe, slopes_seen


class TestHypergradientController:
    def test_reads_the_slopes_and_not_the_losses(self) -> None:
        controller = HypergradientController(rate=0.5)
        seen = observe([1, 2, 3, 4], fan(4, 1), slopes=[-2.0])
        assert controller.update(RUN, controller.start(1), seen)["mu"] == pytest.approx(
            [0.5 * gate(HypergradientController, 1)], rel=1e-9
        )

    def test_syncs_in_the_first_twentieth_update_the_mean_square_only(self) -> None:
        """A slope of 2 is small after one of 100; without that one it would count fully."""
        controller = HypergradientController()
        early = dataclasses.replace(slopes_seen([-100.0]), step=25)
        late = dataclasses.replace(slopes_seen([2.0]), step=50)
        state = controller.update(RUN, controller.start(1), early)
        assert (state["mu"], state["m"], state["updates"], state["observations"]) == ([0.0], [0.0], [0], [1])
        moved = controller.update(RUN, state, late)["mu"][0]
        size = math.sqrt((0.09 * 100**2 + 0.1 * 2**2) / (1 - 0.9**2))
        assert moved == pytest.approx(-3 / 11 * gate(HypergradientController, 1) * 2 / size, rel=1e-6)

    def test_a_sync_without_slopes_changes_nothing(self) -> None:
        controller = HypergradientController(rate=0.5)
        state = controller.update(RUN, controller.start(1), slopes_seen([1.0]))
        assert controller.update(RUN, state, observe([1, 2, 3, 4], fan(4, 1))) == state

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_a_non_finite_slope_counts_as_zero(self, bad: float) -> None:
        """Under a GradScaler a fused optimizer also sees overflowed gradients."""
        controller = HypergradientController(rate=0.25)
        with np.errstate(invalid="ignore"):
            state = controller.update(RUN, controller.start(2), slopes_seen([1.0, bad]))
            assert state["mu"][0] == pytest.approx(-0.25 * gate(HypergradientController, 1), rel=1e-9)
            assert math.isfinite(state["mu"][1])
            for _ in range(10):
                state = controller.update(RUN, state, slopes_seen([1.0, 1.0]))
        assert state["mu"][1] < -0.25


@pytest.mark.parametrize("size", [1e-300, 1e300])
@pytest.mark.parametrize("peak", [1.0, None], ids=["learning rate", "other scalar"])
@pytest.mark.filterwarnings("error")
def test_slopes_of_any_size_give_finite_states(size: float, peak: float | None) -> None:
    controller, run = HypergradientController(), Run(2000, 25, 0.3, (None,), (peak,))
    state = controller.start(1, run)
    for step in range(50, 601, 25):
        seen = Observation(np.ones(1), np.ones((1, 1)), np.ones(1), step, np.array([-size]))
        state = controller.update(run, state, seen)
        assert all(math.isfinite(state[name][0]) for name in ("mu", "m", "q"))
    assert state["mu"][0] == pytest.approx(3.0 * (1 - 1 / 16) if size > 1 else 0.0, abs=1e-9)
