"""The caps on learning rates under schedules without a warm-up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hdet_kernels import HypergradientController
from hdet_kernels.controller.hypergradient import annealed_peak, caps_at, relative_rate
from hdet_kernels.controller.protocol import Observation, Run
from tests.controller.cases import NAN, SETTINGS
from tests.controller.scripted import DISTRUSTING, TOTAL, N, Scripted, T, fan, one_cycle


@pytest.mark.parametrize("peak", [0.15, 0.3, 0.5])
def test_a_schedule_with_a_warmup_has_no_cap(peak: float) -> None:
    run = Run(TOTAL, T, peak, (None,), (1.0,))
    state = DISTRUSTING.start(1, run)
    for step in range(2 * T, 301, T):
        assert state["caps"] == []
        rho = fan(1, step // T)
        state = DISTRUSTING.update(run, state, Observation(np.ones(N), rho, np.ones(1), step))


QUICK = [(1.0, "constant")]


def test_onecyclelr_is_unchanged_before_the_first_move() -> None:
    """Bit for bit, at every step while μ is 0."""
    state = DISTRUSTING.start(1, Scripted([1.0]).run)
    values = [one_cycle(step / TOTAL) for step in range(TOTAL)]
    assert [DISTRUSTING.base(state, 0, value) for value in values] == values


@pytest.mark.parametrize(
    ("start", "shape"),
    [
        pytest.param(start, shape, marks=() if (start, shape) in QUICK else pytest.mark.full)
        for start in (0.1, 1.0, 10.0)
        for shape in ("cosine", "constant", "half")
    ],
)
def test_other_schedules_climb_under_the_cap(start: float, shape: str) -> None:
    """The cap climbs as OneCycleLR does from its first value, higher where the schedule does not anneal. The base is
    never above schedule·e^μ, and exactly that after learning rates have stopped moving."""
    run = Scripted([start], shape, controller=DISTRUSTING)
    higher = 1 + SETTINGS.constant_factor * run.run.end
    held = []
    for step in range(1, TOTAL + 1):
        own = start * run.schedule(step / TOTAL) * math.exp(run.mu[0])
        base = run.base(step)[0]
        assert base <= own
        held.append(base < own)
        ends = math.ceil(step / T) * T / TOTAL  # share of the run at which the cycle ends
        if step <= 600:
            cap = start * one_cycle(min(ends, 0.3 - 1e-12)) * higher * math.exp(run.mu[0])
            assert base == pytest.approx(min(own, cap), rel=1e-9)
        else:
            assert base == own
        if step in run.syncs:
            run.sync(step)
    assert all(held[:100])
    assert not any(held[600:])
    assert run.state["caps"] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_tensor_learning_rate_is_capped_without_a_host_sync(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is that of a float, and no value is read from the device."""

    def forbidden(*_: Any) -> Any:
        raise AssertionError("a host sync")

    run = Scripted([0.5], "constant", controller=DISTRUSTING)
    (expected,) = run.base(0)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__float__", "__lt__", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, forbidden)
        found = DISTRUSTING.base(run.state, 0, torch.tensor(0.5, dtype=dtype))
    assert found.dtype == dtype
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_other_scalars_and_frozen_groups_have_no_cap() -> None:
    run = Run(TOTAL, T, 0.0, (None,) * 2, (1.0, None), 1.0)
    state = DISTRUSTING.start(2, run)
    assert state["caps"][0] < 1
    assert state["caps"][1] is None
    assert DISTRUSTING.base(state, 1, 5.0) == 5.0


@pytest.mark.parametrize(
    "run", [Run(1000, 400, 0.0, (None,), (1.0,)), Run(None, 10, 0.0, (None,), (1.0,)), None], ids=str
)
def test_no_cap_if_no_sync_would_lift_it(run: Run | None) -> None:
    assert DISTRUSTING.start(1, run)["caps"] == []


@pytest.mark.parametrize("controller", [DISTRUSTING, HypergradientController()], ids=["losses", "slopes"])
@pytest.mark.parametrize("observed", ["nothing", "not finite"])
def test_syncs_without_evidence_still_lift_the_cap(controller: Any, observed: str) -> None:
    run = Run(TOTAL, T, 0.0, (None,), (1.0,), 1.0)
    state = controller.start(1, run)
    for step in range(2 * T, 601, T):
        rho, quiet = fan(1, step // T), step > 200
        losses = np.full(N, NAN) if quiet else -rho[0]
        slopes = None if quiet and observed == "nothing" else np.array([NAN if quiet else -1.0])
        state = controller.update(run, state, Observation(losses, rho, np.ones(1), step, slopes))
    mu = state["mu"][0]
    assert 0 < mu <= 3
    assert [controller.base(state, 0, value) for value in (1.0, 0.5)] == [math.exp(mu), 0.5 * math.exp(mu)]


def test_caps_by_hand() -> None:
    """A constant schedule: its peaks count fourfold, and the cap climbs from 1/25 to 1 of that in 30 % of the run."""
    run = Run(1000, 10, 0.0, (None,) * 2, (0.5, None), 1.0)
    assert annealed_peak(0.5, run, SETTINGS) == 2.0
    for share, part in ((0.0, 0.04), (0.15, 0.52), (0.3, 1.0), (0.9, 1.0)):
        first, second = caps_at(run, share, SETTINGS)
        assert first == pytest.approx(2.0 * part, rel=1e-12)
        assert second is None


@pytest.mark.parametrize(("peak", "capped"), [(0.0, True), (0.1499, True), (0.15, False), (0.3, False)])
def test_only_schedules_that_peak_early_are_capped(peak: float, capped: bool) -> None:
    assert bool(caps_at(Run(1000, 10, peak, (None,), (0.5,)), 0.1, SETTINGS)) is capped


def test_the_relative_rate_is_over_the_annealed_peak() -> None:
    seen = Observation(np.ones(2), np.ones((2, 2)), np.array([0.3, 0.7]), 10)
    run = Run(1000, 10, 0.0, (None,) * 2, (0.5, None), 0.5)
    assert relative_rate(run, seen, 0, SETTINGS) == pytest.approx(0.3 / (0.5 * 2.5), rel=1e-12)
    assert relative_rate(run, seen, 1, SETTINGS) == pytest.approx(0.7 / 2.5, rel=1e-12)
