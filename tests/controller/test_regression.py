"""The regression controller sync by sync, on losses that are written out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_kernels import RegressionController, multipliers
from hdet_kernels.controller.protocol import Observation, Run
from hdet_kernels.fanout.multipliers import pairs
from tests.controller.cases import INF, NAN, PROPERTY, RUN, fan, observe, significance


class TestInPairs:
    """Eight replicas in pairs: six depart from the base values, each in one of two hyperparameters."""

    RUN = dataclasses.replace(RUN, in_pairs=True, peaks=(None, None))

    def observe(self, function: Callable[[Any, Any], Any], look: int = 0, error: float = 0.0) -> Observation:
        rho = pairs(8, [(0.3, "linear")] * 2, seed=0, sync=look)
        losses = function(*np.log(rho)) + error * np.random.default_rng(look).normal(size=8)
        return observe(losses, rho)

    def test_each_slope_comes_from_its_own_pairs(self) -> None:
        """The first has a large and nonlinear effect, the second a thousandth of it, which is as significant."""
        controller = RegressionController(rate=0.1)
        seen = self.observe(lambda x, y: 2 + x + 30 * x**2 + 1e-3 * y)
        state = controller.update(self.RUN, controller.start(2), seen)
        assert state["mu"][1] == pytest.approx(-0.1, rel=0.1)
        jointly = controller.update(dataclasses.replace(self.RUN, in_pairs=False), controller.start(2), seen)
        assert jointly["mu"][1] == pytest.approx(0, abs=0.01)

    def test_entries_of_hyperparameters_that_are_not_explored_stay(self) -> None:
        controller = RegressionController(rate=0.1)
        rho = pairs(4, [(0.3, "linear")] * 2, seed=0, sync=0)
        explored = np.ptp(rho, axis=1) > 0
        assert explored.sum() == 1
        state = controller.update(self.RUN, controller.start(2), observe(2 + np.log(rho).sum(axis=0), rho))
        for name in ("mu", "m", "q", "s", "observations", "updates"):
            assert (np.array(state[name]) != 0).tolist() == explored.tolist(), name

    def test_a_noisy_probe_moves_little(self) -> None:
        """Noise drawn for every replica: without it, the same slopes move μ by 0.1 at every sync."""
        exact = noisy = RegressionController(rate=0.1).start(2)
        for look in range(20):
            for error in (0.0, 1.0):
                seen = self.observe(lambda x, y: 20 + 0.01 * x + 0.01 * y, look, error)
                state = RegressionController(rate=0.1).update(self.RUN, noisy if error else exact, seen)
                exact, noisy = (exact, state) if error else (state, noisy)
        assert exact["mu"] == pytest.approx([-2.0, -2.0], rel=0.1)
        assert np.abs(noisy["mu"]).max() < 0.5

    def test_a_bad_replica_lowers_the_hyperparameter_in_which_it_departs(self) -> None:
        rho = pairs(8, [(0.3, "linear")] * 2, seed=0, sync=0)
        worst = int(rho[0].argmax())
        losses = np.where(np.arange(8) == worst, NAN, 2.0)
        state = RegressionController(rate=0.1).update(self.RUN, RegressionController().start(2), observe(losses, rho))
        assert state["mu"][0] < 0
        assert state["mu"][1] == 0

    def test_non_finite_losses_of_all_replicas_move_nothing(self) -> None:
        rho, controller = pairs(8, [(0.3, "linear")] * 2, seed=0, sync=0), RegressionController()
        assert controller.update(self.RUN, controller.start(2), observe([NAN] * 8, rho))["mu"] == [0.0, 0.0]


class TestRegressionController:
    @pytest.mark.parametrize("n", [1, 2, 4, 8])
    @pytest.mark.parametrize("loss", [0.0, 0.1, -3.7, 1e6])
    def test_equal_losses_give_no_movement(self, n: int, loss: float) -> None:
        controller = RegressionController(rate=1.0)
        state = controller.start(2)
        for cycle in range(5):
            state = controller.update(RUN, state, observe([loss] * n, fan(n, 2, cycle)))
        assert state["mu"] == pytest.approx([0, 0], abs=1e-6)

    @pytest.mark.parametrize("loss", [1.0, NAN])
    def test_a_single_replica_gives_no_movement(self, loss: float) -> None:
        controller = RegressionController(rate=1.0)
        assert controller.update(RUN, controller.start(1), observe([loss], [[1.0]]))["mu"] == [0.0]

    def test_a_diverged_replica_does_not_raise_its_value(self) -> None:
        """It does not lower it much either: one replica of eight is hardly more significant than noise."""
        controller = RegressionController(rate=0.5)
        losses = [1, 1.02, 1, 1.02, 1, 1.02, 1, NAN]
        state = controller.update(RUN, controller.start(1), observe(losses, [multipliers(8, 0.3)]))
        assert -0.05 < state["mu"][0] < 0

    @pytest.mark.parametrize("n", [2, 3])
    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_few_replicas_use_the_persistence_of_signs(self, n: int, sign: float) -> None:
        """Errors are not known. The first sign moves nothing; an equal second one counts as 1.34 standard errors."""
        controller, rho = RegressionController(rate=0.5), [multipliers(n, 0.3)]
        state = controller.update(RUN, controller.start(1), observe(sign * np.log(rho[0]), rho))
        assert state["mu"] == pytest.approx([0.0], abs=1e-12)
        state = controller.update(RUN, state, observe(sign * np.log(rho[0]), rho))
        found = math.sqrt(9 / 5)  # a mean with weights 1/3 and 2/3, whose squares add up to 5/9
        mean, square = (0.09 + 0.1 * found) / 0.19, (0.09 + 0.1 * found**2) / 0.19
        assert state["mu"] == pytest.approx([-sign * 0.5 * (1 - 1 / square) * mean / math.sqrt(square)], rel=1e-6)
        moved = state["mu"][0]
        state = controller.update(RUN, state, observe(-sign * np.log(rho[0]), rho))
        assert abs(state["mu"][0] - moved) < 0.1  # the other sign has no significance

    def test_regresses_on_the_logarithm_of_the_multipliers(self) -> None:
        rho, controller = multipliers(8, 3.0, "log"), RegressionController()
        slopes = controller._joint_slopes(observe(2 * np.log(rho), [rho]), np.log([rho]))
        assert slopes.values == pytest.approx([2], rel=1e-3)
        assert slopes.significance == pytest.approx([significance(RegressionController, 1)], rel=1e-3)

    @pytest.mark.parametrize(("options", "ridge"), [({}, 1e-3), ({"ridge": 1.0}, 1.0)], ids=["default", "given"])
    def test_ridge_is_used(self, options: dict[str, float], ridge: float) -> None:
        rho, controller = multipliers(2, 0.3), RegressionController(**options)
        slopes = controller._joint_slopes(observe(2 * np.log(rho), [rho]), np.log([rho]))
        assert slopes.values == pytest.approx([2 / (1 + ridge)], rel=1e-10)

    def test_slopes_count_by_their_significance_not_their_size(self) -> None:
        """While losses fall fast, their noise is a thousand times larger."""
        controller, random = RegressionController(rate=0.1), np.random.default_rng(1)
        for direction in (1, -1):
            state = controller.start(1)
            for cycle in range(20):
                rho = fan(8, 1, cycle)
                size = 10.0 if cycle < 6 else 0.01
                losses = 2 + 0.01 * direction * np.log(rho[0]) + 1e-3 * size * random.normal(size=8)
                state = controller.update(RUN, state, observe(losses, rho))
            assert -direction * state["mu"][0] > 0.8

    @pytest.mark.parametrize(
        ("options", "first", "last"),
        [({}, 300, 900), ({"stop_at": 0.6}, 200, 600), ({"start_at": 0.0}, 0, 900), ({"start_at": 0.95}, 950, 900)],
        ids=["default", "stop_at", "start_at", "never"],
    )
    def test_other_scalars_move_in_their_own_part_of_the_run(
        self, options: dict[str, float], first: int, last: int
    ) -> None:
        controller, run = RegressionController(**options), dataclasses.replace(RUN, peaks=(0.1, None))
        assert controller.slope_steps(run) == pytest.approx((first, last))
        rates, others = controller.prepare(run).departs
        assert rates == (None if first > last else (0, min(last, 600) if "stop_at" in options else 300))
        assert others == (None if first > last else (max(first - 25, 0), last))
        alone = dataclasses.replace(run, peaks=(None, None))
        active = [step for step in range(25, 1001, 25) if controller.active(alone, step)]
        assert active == list(range(max(first, 25), last + 1, 25))
        assert not any(
            controller.active(dataclasses.replace(alone, others=False), step) for step in range(25, 1001, 25)
        )

    @PROPERTY
    @given(st.data(), st.sampled_from([3, 4, 8]))
    def test_the_order_of_replicas_does_not_matter(self, data: st.DataObject, n: int) -> None:
        controller = RegressionController(rate=0.3)
        here, there = controller.start(1), controller.start(1)
        for cycle in range(3):
            # A real slope: near 0 rounding errors would decide the direction.
            noise = np.array(data.draw(st.lists(st.floats(-0.1, 0.1), min_size=n, max_size=n)))
            order = np.array(data.draw(st.permutations(range(n))))
            rho = fan(n, 1, cycle)
            losses = 2 * np.log(rho[0]) + noise
            here = controller.update(RUN, here, observe(losses, rho))
            there = controller.update(RUN, there, observe(losses[order], rho[:, order]))
        assert there["mu"] == pytest.approx(here["mu"], rel=1e-9)

    def test_unit_and_offset_of_the_loss_do_not_matter(self) -> None:
        controller = RegressionController(rate=0.3)
        states = [controller.start(2) for _ in range(2)]
        random = np.random.default_rng(4)
        for cycle in range(6):
            losses, rho = random.normal(2, 1, 8), fan(8, 2, cycle)
            states[0] = controller.update(RUN, states[0], observe(losses, rho))
            states[1] = controller.update(RUN, states[1], observe(1000 * losses - 77, rho))
        assert states[1]["mu"] == pytest.approx(states[0]["mu"], rel=1e-8)

    @pytest.mark.parametrize("n", [4, 8])
    @pytest.mark.parametrize(
        "start",
        [[0.1], [10.0], [0.1, 10.0], [10.0, 0.1]],
        ids=["10x too low", "10x too high", "low and high", "high and low"],
    )
    def test_finds_a_known_optimum_through_noise(self, n: int, start: list[float]) -> None:
        """Replica r's loss is ½·Σ_j (log η_{j,r} − log η*_j)² plus noise, with optimum 1 for each. Two slopes of four
        replicas are hardly significant, so these get less far."""
        run = Run(total_steps=4000, sync_every=20, peak=0.3, floors=(None,) * len(start), others=True)
        controller = RegressionController()
        state = controller.start(len(start))
        random = np.random.default_rng(0)
        for step in range(20, 4001, 20):
            if controller.active(run, step):
                base = np.array([controller.base(state, j, value) for j, value in enumerate(start)])
                rho = fan(n, len(start), step // 20)
                losses = 0.5 * (np.log(base[:, None] * rho) ** 2).sum(axis=0) + random.normal(0, 0.03, n)
                state = controller.update(run, state, observe(losses, rho, base, step=step))
        final = [controller.base(state, j, value) for j, value in enumerate(start)]
        assert np.abs(np.log(final)).max() < math.log(1.5 if n == 8 or len(start) == 1 else 1.8), f"ended at {final}"


@pytest.mark.parametrize("ridge", [0.0, -1e-3, NAN, INF])
def test_a_bad_ridge_raises(ridge: float) -> None:
    with pytest.raises(ValueError, match=f"ridge must be a positive number, got {ridge}"):
        RegressionController(ridge=ridge)
