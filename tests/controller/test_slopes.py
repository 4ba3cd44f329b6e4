"""The movement of μ against slopes, for both controllers that use it, against the equations in plain Python floats."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from hdet_kernels import RegressionController
from hdet_kernels.controller.hypergradient import bias_correction, noise_gate, usable_slopes
from hdet_kernels.controller.protocol import Run
from tests.controller.cases import (
    INF,
    NAN,
    OBSERVERS,
    RUN,
    SETTINGS,
    WITH_SLOPES,
    gate,
    signals,
    slopes_seen,
)


class MuByHand:
    """The μ update, one hyperparameter at a time, where all slopes are equally significant."""

    def __init__(self, count: int, beta: float, rate: float, limit: float) -> None:
        self.m, self.q, self.mu = [0.0] * count, [0.0] * count, [0.0] * count
        self.beta, self.rate, self.limit, self.updates = beta, rate, limit, 0

    def sync(self, slopes: list[float]) -> None:
        self.updates += 1
        for j, b in enumerate(slopes):
            self.m[j] = self.beta * self.m[j] + (1 - self.beta) * b
            self.q[j] = 0.9 * self.q[j] + 0.1 * b * b
            m = self.m[j] / (1 - self.beta**self.updates)
            q = self.q[j] / (1 - 0.9**self.updates)
            step = max(-1.0, min(1.0, m / (math.sqrt(q) + 1e-12)))
            self.mu[j] = max(-self.limit, min(self.limit, self.mu[j] - self.rate * step))


@pytest.mark.parametrize("kind", WITH_SLOPES)
class TestMu:
    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize(
        ("beta", "rate", "limit"),
        [(0.9, 0.2, 4.0), (0.0, 0.3, 4.0), (0.5, 0.7, 1.0)],
        ids=["defaults", "no momentum", "low limit"],
    )
    def test_follows_the_equations_over_several_syncs(
        self, kind: Any, count: int, beta: float, rate: float, limit: float
    ) -> None:
        controller = kind(beta=beta, rate=rate, limit=limit)
        by_hand, state = MuByHand(count, beta, gate(kind, count) * rate, limit), controller.start(count)
        random = np.random.default_rng(2)
        for cycle in range(12):
            slopes = (random.normal(0.5, 1, count) * 10.0 ** random.integers(-2, 2)).tolist()
            state = controller.update(RUN, state, OBSERVERS[kind](slopes, cycle))
            by_hand.sync(signals(kind, slopes))
            assert state["mu"] == pytest.approx(by_hand.mu, rel=1e-8, abs=1e-9)
            assert state["m"] == pytest.approx(by_hand.m, rel=1e-8)
            assert state["q"] == pytest.approx(by_hand.q, rel=1e-8)

    @pytest.mark.parametrize("slope", [1e-3, 1.0, 1e3])
    def test_the_first_update_moves_by_the_gated_rate_against_the_slope(self, kind: Any, slope: float) -> None:
        """Without bias correction it would be √10/10 of it."""
        controller = kind(rate=0.25)
        state = controller.update(RUN, controller.start(2), OBSERVERS[kind]([slope, -slope], 0))
        assert state["mu"] == pytest.approx([-0.25 * gate(kind, 2), 0.25 * gate(kind, 2)], rel=1e-6)

    def test_a_constant_slope_moves_by_the_gated_rate_every_time(self, kind: Any) -> None:
        controller = kind(rate=0.1)
        state = controller.start(1)
        for cycle in range(1, 8):
            state = controller.update(RUN, state, OBSERVERS[kind]([0.5], cycle))
            assert state["mu"] == pytest.approx([-0.1 * gate(kind, 1) * cycle], rel=1e-6)

    def test_a_sudden_large_slope_moves_by_the_rate_at_most(self, kind: Any) -> None:
        """Without momentum b/√q is 1.38 here, and is clipped to 1."""
        controller = kind(rate=0.1, beta=0.0)
        state = controller.start(1)
        for cycle, slope in enumerate([1e-6, 1.0]):
            state = controller.update(RUN, state, OBSERVERS[kind]([slope], cycle))
        assert state["mu"] == pytest.approx([-0.2 * gate(kind, 1)], rel=1e-4)

    @pytest.mark.parametrize("limit", [4.0, 1.0])
    @pytest.mark.parametrize("slope", [1.0, -1.0])
    def test_stops_at_the_limit_and_returns_from_it(self, kind: Any, limit: float, slope: float) -> None:
        controller = kind(rate=0.75 * limit / gate(kind, 1), limit=limit, beta=0.0)
        state = controller.start(1)
        for cycle in range(4):
            state = controller.update(RUN, state, OBSERVERS[kind]([slope], cycle))
        assert state["mu"] == [-math.copysign(limit, slope)]
        state = controller.update(RUN, state, OBSERVERS[kind]([-slope], 4))
        assert state["mu"] == pytest.approx([-math.copysign(limit / 4, slope)], rel=1e-6)

    def test_default_limit_is_four(self, kind: Any) -> None:
        controller = kind(rate=100)
        assert controller.update(RUN, controller.start(1), OBSERVERS[kind]([1.0], 0))["mu"] == [-4.0]

    @pytest.mark.parametrize(
        ("run", "options", "syncs", "for_others"),
        [
            (RUN, {}, 11, 25),
            (Run(1000, 25, 0.3, ()), {"start_at": 0.0}, 12, 36),
            (Run(1000, 25, 0.5, ()), {}, 19, 25),
            (Run(1000, 25, 0.5, ()), {"stop_at": 0.2}, 7, 6),
            (Run(100, 7, 0.3, ()), {}, 4, 8),
            (Run(100, 95, 0.3, ()), {}, 1, 1),
        ],
        ids=["default", "from the start", "later peak", "stop_at", "odd interval", "no active sync"],
    )
    def test_default_rate_is_three_over_the_active_syncs_and_at_most_three_quarters(
        self, kind: Any, run: Run, options: dict[str, float], syncs: int, for_others: int
    ) -> None:
        controller = kind(**options)
        syncs = for_others if kind is RegressionController else syncs
        assert max(run.syncs(*controller.slope_steps(run)), 1) == syncs
        state = controller.update(run, controller.start(1), OBSERVERS[kind]([1.0], 0))
        assert state["mu"] == pytest.approx([-min(3 / syncs, 0.75) * gate(kind, 1)], rel=1e-9)

    @pytest.mark.parametrize("step", [25, 50, 299, 300, 301, 600, 601, 1000])
    def test_active_from_the_first_sync_to_the_peak(self, kind: Any, step: int) -> None:
        """The default controller watches losses for breaks after that."""
        last = 600 if kind is RegressionController else 300
        assert kind().active(dataclasses.replace(RUN, peaks=(0.1,), others=False), step) is (step <= last)

    @pytest.mark.parametrize(("step", "expected"), [(74, False), (75, True), (400, True), (401, False)])
    def test_start_and_stop_can_be_set(self, kind: Any, step: int, expected: bool) -> None:
        run = dataclasses.replace(RUN, peaks=(0.1,))
        assert kind(start_at=0.1, stop_at=0.4).active(run, step) is expected

    def test_slopes_no_larger_than_their_errors_move_nothing(self, kind: Any) -> None:
        """The gate is 1 − 1/s, with the running mean s of squared significances, not that of a single sync."""
        controller = kind(rate=0.5)
        for last, expected in [(2.0, 0.0), (4.0, 1 - 0.19 / (0.09 * 0.9**2 + 0.1 * 4.0**2))]:
            state = controller.start(1)
            for significance in (0.9, last if last > 2 else 0.9):
                before = state
                state = controller._moved(
                    RUN, state, np.ones(1), np.full(1, significance), np.ones(1, bool), slopes_seen([1.0])
                )
            assert before["mu"] == [0.0]
            assert state["mu"][0] == pytest.approx(-0.5 * expected, rel=1e-9)

    def test_the_steps_of_learning_rates_scale_with_the_run_and_its_peak(self, kind: Any) -> None:
        first = 0 if kind is RegressionController else 1000
        assert kind().rate_steps(Run(20_000, 500, 0.4, ())) == pytest.approx((first, 8000))

    @pytest.mark.parametrize("slope", [1.0, -1.0])
    def test_mu_stays_within_bounds_and_leaves_them_at_once(self, kind: Any, slope: float) -> None:
        """A μ beyond the bounds would have to return to them first."""
        controller, state = kind(rate=0.5, beta=0.0), kind().start(2)
        run = dataclasses.replace(RUN, reach=((-0.7, 0.6), (-INF, INF)))
        for cycle in range(4):
            state = controller.update(run, state, OBSERVERS[kind]([slope, slope], cycle))
        assert state["mu"] == pytest.approx([-0.7 if slope > 0 else 0.6, -2.0 * slope * gate(kind, 2)], rel=1e-6)
        back = controller.update(run, state, OBSERVERS[kind]([-slope, slope], 4))
        assert abs(back["mu"][0] - state["mu"][0]) == pytest.approx(0.5 * gate(kind, 2), rel=1e-6)

    def test_the_base_is_the_schedule_times_exp_mu(self, kind: Any) -> None:
        state = kind().start(2) | {"mu": [0.0, -0.5]}
        assert kind().base(state, 0, 0.1) == 0.1
        assert kind().base(state, 1, 0.1) == pytest.approx(0.1 * math.exp(-0.5), rel=1e-15)
        assert kind().base(state, 1, 0.2) == pytest.approx(0.2 * math.exp(-0.5), rel=1e-15)

    def test_needs_the_length_of_the_run(self, kind: Any) -> None:
        assert kind().prepare(RUN).total_steps == RUN.total_steps
        with pytest.raises(ValueError, match=rf"{kind.__name__} .* needs its length: pass total_steps="):
            kind().prepare(dataclasses.replace(RUN, total_steps=None))

    @pytest.mark.parametrize("zero", [0.0, -0.0])
    def test_no_slope_gives_no_movement(self, kind: Any, zero: float) -> None:
        controller = kind(rate=1.0)
        state = controller.update(RUN, controller.start(1), slopes_seen([zero]))
        assert state["mu"] == [0.0]


BAD = [
    ({"beta": 1.0}, r"beta must lie between 0 and 1 \(excluded\), got 1.0"),
    ({"beta": -0.1}, "beta must lie between 0 and 1"),
    ({"beta": NAN}, "beta must lie between 0 and 1"),
    ({"rate": 0.0}, "rate must be a positive number, got 0.0"),
    ({"rate": -1}, "rate must be a positive number, got -1"),
    ({"rate": INF}, "rate must be a positive number, got inf"),
    ({"rate": NAN}, "rate must be a positive number, got nan"),
    ({"start_at": 1.1}, "start_at must lie between 0 and 1, got 1.1"),
    ({"start_at": -0.1}, "start_at must lie between 0 and 1"),
    ({"stop_at": 1.5}, "stop_at must lie between 0 and 1, got 1.5"),
    ({"stop_at": 0.0}, "stop_at=0.0 must be greater than start_at=0.0"),
    ({"start_at": 0.5, "stop_at": 0.4}, "stop_at=0.4 must be greater than start_at=0.5"),
    ({"limit": 0}, "limit must be a positive number, got 0"),
    ({"limit": NAN}, "limit must be a positive number, got nan"),
]


@pytest.mark.parametrize("kind", WITH_SLOPES)
@pytest.mark.parametrize(("constants", "message"), BAD, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_bad_arguments_raise(kind: Any, constants: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**constants)


def test_bias_correction_is_the_sum_of_the_weights() -> None:
    weights = [0.1 * 0.9**age for age in range(7)]
    assert bias_correction(np.array([0, 1, 7]), 0.1) == pytest.approx([0.0, 0.1, sum(weights)], rel=1e-12)


@pytest.mark.parametrize(("mean", "expected"), [(0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (2.0, 0.5), (4.0, 0.75)])
def test_noise_gate_by_a_table(mean: float, expected: float) -> None:
    """One observation of weight 0.1: the bias-corrected mean is ``mean``."""
    found = noise_gate(np.array([0.1 * mean]), np.array([1]), 0.1)
    assert found == pytest.approx([expected], abs=1e-12)


def test_usable_slopes_are_finite_and_clipped() -> None:
    found = usable_slopes(np.array([1.0, NAN, INF, -INF, 1e200, -1e200]), SETTINGS)
    assert found.tolist() == [1.0, 0.0, 0.0, 0.0, 1e150, -1e150]
