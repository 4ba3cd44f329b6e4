"""The paper's controller against its equations, written out in plain Python floats."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_kernels import HDETOneCycleLR, SoftmaxController, multipliers, paper_settings
from hdet_kernels.controller.protocol import Run
from hdet_kernels.controller.softmax import decay_to_floor, published_decay, softmax_weights
from tests.controller.cases import INF, NAN, PROPERTY, RUN, fan, observe


class SoftmaxByHand:
    """The paper's equations, computed for one replica and one hyperparameter at a time."""

    def __init__(self, base: list[float], gamma: list[float], scale: float, rate: float, beta: float) -> None:
        self.eta, self.gamma, self.velocity = list(base), gamma, [0.0] * len(base)
        self.scale, self.rate, self.beta = scale, rate, beta

    def sync(self, losses: list[float], rho: list[list[float]]) -> None:
        n = len(losses)
        mean = sum(losses) / n
        powers = [math.exp((mean - loss) / self.scale) for loss in losses]
        weights = [power / sum(powers) for power in powers]
        for j, eta in enumerate(self.eta):
            values = [eta * multiplier for multiplier in rho[j]]
            delta = sum(w * v for w, v in zip(weights, values, strict=True)) - sum(values) / n
            self.velocity[j] = self.beta * self.velocity[j] + (1 - self.beta) * delta
            self.eta[j] = eta * (1 - self.gamma[j]) + self.rate * self.velocity[j]


class TestSoftmax:
    @pytest.mark.parametrize("n", [1, 2, 4, 8])
    @pytest.mark.parametrize("count", [1, 3])
    @pytest.mark.parametrize(
        ("scale", "rate", "beta", "decay"),
        [(0.1, 0.5, 0.9, 0.0), (0.5, 0.25, 0.5, 0.05), (2.0, 1.0, 0.0, -0.1)],
        ids=["paper", "slower", "growing"],
    )
    def test_follows_the_papers_equations_over_several_syncs(
        self, n: int, count: int, scale: float, rate: float, beta: float, decay: float
    ) -> None:
        controller = SoftmaxController(warmup_steps=0, scale=scale, rate=rate, beta=beta, decay=decay)
        base = [0.1 * 3**j for j in range(count)]
        by_hand = SoftmaxByHand(base, [decay] * count, scale, rate, beta)
        state = controller.start(count)
        assert [controller.base(state, j, base[j]) for j in range(count)] == base
        random = np.random.default_rng(1)
        for cycle in range(6):
            # Clipped as by bounds, so that the mean of the multipliers is not 1.
            losses, rho = random.normal(2, 0.3, n), fan(n, count, cycle, spread=1 / 9).clip(max=1.05)
            state = controller.update(RUN, state, observe(losses, rho, by_hand.eta))
            by_hand.sync(losses.tolist(), rho.tolist())
            assert state["velocity"] == pytest.approx(by_hand.velocity, rel=1e-10, abs=1e-18)
            assert [controller.base(state, j, 999.0) for j in range(count)] == pytest.approx(by_hand.eta, rel=1e-12)

    def test_moves_towards_the_value_of_the_best_replica(self) -> None:
        controller = SoftmaxController(warmup_steps=0, decay=0.0)
        rho = [[0.7, 0.9, 1.1, 1.3], [1.3, 1.1, 0.9, 0.7]]
        up, down = controller.update(RUN, controller.start(2), observe([4, 3, 2, 1], rho, [0.1, 0.1]))["eta"]
        assert up > 0.1 > down

    def test_the_largest_move_of_a_sync_is_rate_times_spread(self) -> None:
        """λ·α = 0.5/9, or 5.6 %, is reached without momentum when all the weight is on the highest value."""
        controller = SoftmaxController(warmup_steps=0, decay=0.0, beta=0.0, scale=1e-6)
        eta = controller.update(RUN, controller.start(1), observe([3, 2, 1], [multipliers(3, 1 / 9)], [0.1]))["eta"]
        assert eta == pytest.approx([0.1 * (1 + 0.5 / 9)], rel=1e-12)

    @PROPERTY
    @given(st.lists(st.floats(-10, 10), min_size=1, max_size=8), st.floats(0, 0.99), st.floats(1e-4, 10))
    def test_no_sync_moves_more_than_rate_times_spread(self, losses: list[float], beta: float, scale: float) -> None:
        controller = SoftmaxController(warmup_steps=0, decay=0.0, beta=beta, scale=scale)
        state = controller.start(1)
        for cycle in range(5):
            before = controller.base(state, 0, 0.1)
            state = controller.update(RUN, state, observe(losses, fan(len(losses), 1, cycle, 1 / 9), [before]))
            # The velocity is a mean of displacements, each around a value of at most 1.056⁴ times the current one.
            assert abs(state["eta"][0] / before - 1) <= 0.5 / 9 * (1 + 0.5 / 9) ** 4

    def test_small_scale_does_not_overflow(self) -> None:
        weights = softmax_weights(np.array([1e6, 5.0, 1e6]), 1e-9)
        assert weights.tolist() == [0, 1, 0]

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_a_loss_that_is_not_finite_has_no_weight(self, bad: float) -> None:
        weights = softmax_weights(np.array([2.0, bad, 2.5]), 0.5)
        first, last = (math.exp((2.25 - loss) / 0.5) for loss in (2.0, 2.5))
        assert weights.tolist() == pytest.approx([first / (first + last), 0, last / (first + last)], rel=1e-12)

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_no_finite_loss_gives_no_movement(self, bad: float) -> None:
        controller = SoftmaxController(warmup_steps=0, decay=0.0)
        state = controller.update(RUN, controller.start(1), observe([bad] * 4, fan(4, 1), [0.1]))
        assert state["eta"] == pytest.approx([0.1], rel=1e-15)
        assert state["velocity"] == pytest.approx([0], abs=1e-16)

    def test_velocity_decays_when_losses_become_equal(self) -> None:
        controller = SoftmaxController(warmup_steps=0, decay=0.0)
        rho = [multipliers(4, 1 / 9)]
        state = controller.update(RUN, controller.start(1), observe([4, 3, 2, 1], rho, [0.1]))
        first = state["velocity"][0]
        state = controller.update(RUN, state, observe([1, 1, 1, 1], rho, state["eta"]))
        assert state["velocity"][0] == pytest.approx(0.9 * first, rel=1e-9)

    def test_reaches_the_floor_in_the_remaining_syncs(self) -> None:
        """Two groups and a scalar without a schedule: each has a γ of its own, fixed at the first update."""
        run = Run(total_steps=1000, sync_every=25, peak=0.3, floors=(1e-5, 1e-8, None))
        controller = SoftmaxController(warmup_steps=400)
        state = controller.start(3)
        for step in range(400, 1000, 25):
            assert controller.active(run, step)
            state = controller.update(run, state, observe([1, 1, 1, 1], fan(4, 3), state["eta"] or [0.1, 0.02, 0.3]))
        assert state["eta"] == pytest.approx([1e-5, 1e-8, 0.3], rel=1e-9)
        expected = [1 - 1e-4 ** (1 / 24), 1 - (1e-8 / 0.02) ** (1 / 24), 0]
        assert state["gamma"] == pytest.approx(expected, rel=1e-12)

    def test_published_decay_makes_the_learning_rate_grow(self) -> None:
        run = Run(total_steps=1000, sync_every=10, peak=0.3, floors=(1e-6, None))
        controller = SoftmaxController(warmup_steps=640, decay="published")
        state = controller.start(2)
        for _ in range(36):
            before = state["eta"] or [0.01, 0.3]
            state = controller.update(run, state, observe([1, 1], fan(2, 2), before))
            growth = [now / then for now, then in zip(state["eta"], before, strict=True)]
            assert growth == pytest.approx([1.1811, 1], rel=1e-4)
        assert state["eta"] == pytest.approx([0.01 * 400, 0.3], rel=1e-9)

    def test_published_decay_reads_the_factors(self) -> None:
        run = Run(total_steps=1000, sync_every=10, peak=0.3, floors=(1e-6,))
        controller = SoftmaxController(warmup_steps=640, decay="published", div_factor=200, final_div_factor=2)
        assert controller.update(run, controller.start(1), observe([1], [[1]], [0.1]))["gamma"] == pytest.approx(
            [1 - math.exp(-math.log(100) / 36)], rel=1e-12
        )

    @pytest.mark.parametrize(("step", "expected"), [(0, False), (99, False), (100, True), (125, True), (10**6, True)])
    def test_active_from_the_end_of_warmup_on(self, step: int, expected: bool) -> None:
        assert SoftmaxController(warmup_steps=100).active(RUN, step) is expected

    def test_base_is_the_schedule_before_the_first_update(self) -> None:
        controller = SoftmaxController(warmup_steps=100)
        state = controller.start(2)
        assert [controller.base(state, 1, value) for value in (0.1, 0.2, 0.05)] == [0.1, 0.2, 0.05]

    @pytest.mark.parametrize("decay", ["floor", "published"])
    def test_a_decay_over_the_run_needs_the_length_of_the_run(self, decay: str) -> None:
        unknown = dataclasses.replace(RUN, total_steps=None)
        with pytest.raises(ValueError, match=rf"decay='{decay}'\) needs the length of the run.*total_steps="):
            SoftmaxController(decay=decay).prepare(unknown)
        assert SoftmaxController(decay=decay).prepare(RUN) is RUN
        assert SoftmaxController(decay=0.01).prepare(unknown) is unknown


class TestDecayFactors:
    @PROPERTY
    @given(st.floats(1e-6, 10), st.floats(1e-9, 1), st.integers(1, 200))
    def test_reaches_the_floor_after_all_syncs(self, base: float, share: float, syncs: int) -> None:
        gamma = decay_to_floor(base, base * share, syncs)
        assert 0 <= gamma < 1
        value = base
        for _ in range(syncs):
            value *= 1 - gamma
        assert value == pytest.approx(base * share, rel=1e-9)

    def test_never_grows(self) -> None:
        assert decay_to_floor(0.1, 0.2, 10) == 0

    @pytest.mark.parametrize("syncs", [0, -3, 0.5, 1])
    def test_less_than_one_sync_counts_as_one(self, syncs: float) -> None:
        assert decay_to_floor(0.1, 0.01, syncs) == pytest.approx(0.9)

    @pytest.mark.parametrize(("base", "floor"), [(0.0, 0.1), (0.1, 0.0), (-1.0, 0.1), (NAN, 0.1)])
    def test_needs_positive_numbers(self, base: float, floor: float) -> None:
        with pytest.raises(ValueError, match=f"positive base and floor, got base={base} and floor={floor}"):
            decay_to_floor(base, floor, 10)

    def test_published_formula_at_torchs_defaults(self) -> None:
        """With factors 25 and 1e4 over 36 syncs the learning rate grows by 18 % at every sync."""
        assert published_decay(25, 1e4, 36) == pytest.approx(-0.18108, abs=1e-5)
        assert published_decay(25, 1e4, 36) == pytest.approx(1 - 400 ** (1 / 36), rel=1e-12)

    def test_published_formula_decays_with_the_factors_exchanged(self) -> None:
        assert published_decay(1e4, 25, 36) == pytest.approx(1 - 400 ** (-1 / 36), rel=1e-12)


BAD = [
    ({"warmup_steps": -1}, "warmup_steps must be a whole number of at least 0, got -1"),
    ({"scale": 0.0}, "scale must be a positive number, got 0.0"),
    ({"scale": -0.1}, "scale must be a positive number"),
    ({"scale": NAN}, "scale must be a positive number"),
    ({"rate": 0.0}, "rate must be a positive number"),
    ({"beta": 1.0}, "beta must lie between 0 and 1"),
    ({"div_factor": 0}, "div_factor must be a positive number"),
    ({"final_div_factor": -1}, "final_div_factor must be a positive number"),
    ({"decay": "cosine"}, "decay must be 'floor', 'published' or a number below 1, got 'cosine'"),
    ({"decay": None}, "decay must be .* got None"),
    ({"decay": NAN}, "decay must be .* got nan"),
    ({"decay": INF}, "decay must be .* got inf"),
    ({"decay": -INF}, "decay must be .* got -inf"),
    ({"decay": 1.0}, "decay must be .* a number below 1, got 1.0"),
    ({"decay": True}, "decay must be .* got True"),
]


@pytest.mark.parametrize(("constants", "message"), BAD, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_bad_arguments_raise(constants: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SoftmaxController(**constants)


class TestPaperSettings:
    @pytest.mark.parametrize(
        ("total_steps", "warmup", "sync_every"),
        [(1_000_000, 100_000, 1000), (200_000, 100_000, 1000), (20_000, 10_000, 100), (250, 125, 1), (2, 1, 1)],
    )
    def test_settings_by_a_table(self, total_steps: int, warmup: int, sync_every: int) -> None:
        found = paper_settings(total_steps)
        assert found["spread"] == 1 / 9
        assert found["sync_every"] == sync_every
        controller = found["auto_lr"]
        assert isinstance(controller, SoftmaxController)
        constants = controller.warmup_steps, controller.beta, controller.rate, controller.scale, controller.decay
        assert constants == (warmup, 0.9, 0.5, 0.1, "floor")

    def test_are_keywords_of_the_scheduler(self) -> None:
        assert set(paper_settings(1000)) <= set(inspect.signature(HDETOneCycleLR).parameters)

    @pytest.mark.parametrize("total_steps", [1, 0, -5])
    def test_refuses_a_run_without_two_steps(self, total_steps: int) -> None:
        with pytest.raises(ValueError, match=f"total_steps must be a whole number of at least 2, got {total_steps}"):
            paper_settings(total_steps)


@pytest.mark.parametrize("scale", [0.002, 0.1, 1e300])
def test_losses_near_the_largest_number_have_weights(scale: float) -> None:
    largest = float(np.finfo(np.float64).max)
    for losses in ([1e300, 1.1e300, 1e300], [largest] * 3, [largest, -largest, 0.0], [largest, NAN, largest]):
        weights = softmax_weights(np.array(losses), scale)
        assert np.isfinite(weights).all()
        assert weights.sum() == pytest.approx(1.0)
        assert weights[np.nanargmin(losses)] == weights.max()
    np.testing.assert_array_equal(softmax_weights(np.array([largest] * 2), scale), [0.5, 0.5])
