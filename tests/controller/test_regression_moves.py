"""How the regression controller moves learning rates: when, how far at one sync, and from which evidence."""

from __future__ import annotations

import copy
import dataclasses
import io
import math

import numpy as np
import pytest
import torch

from hdet_kernels import RegressionController
from hdet_kernels.controller.protocol import Observation, Run
from hdet_kernels.fanout.explore import Hyperparameter
from hdet_kernels.fanout.spread import Spread
from tests.controller.cases import NAN, SETTINGS
from tests.controller.scripted import REGRESSION, TOTAL, N, Scripted, T, fan, later, one_cycle


@pytest.mark.parametrize("peak", [1.0, None], ids=["learning rate", "other scalar"])
def test_moves_in_its_part_of_the_run(peak: float | None) -> None:
    """Learning rates move from the first sync to 30 % of the run, other scalars from there to 90 %."""
    run, moved, state = Run(TOTAL, T, 0.3, (None,), (peak,), others=peak is None), {}, REGRESSION.start(1)
    for step in range(T, TOTAL + 1, T):
        if REGRESSION.active(run, step):
            before, rho = state["mu"][0], fan(1, step // T)
            base = np.array([REGRESSION.base(state, 0, one_cycle(step / TOTAL))])
            state = REGRESSION.update(run, state, Observation(-np.log(rho[0]), rho, base, step))
            if state["mu"][0] != before:
                moved[step] = state["mu"][0] - before
    if peak is None:
        most = 12 * (1 - 0.25 / 6) ** 2  # the largest squared significance of eight replicas
        assert moved == {step: pytest.approx(3 / 49 * (1 - 1 / most), rel=1e-9) for step in range(600, 1801, T)}
    else:
        assert min(moved) == T
        assert max(moved.values()) <= SETTINGS.largest_move + 1e-9
        assert state["mu"] == [REGRESSION.limit]


@pytest.mark.parametrize(
    ("sync_every", "options", "expected"),
    [
        (10, {}, range(10, 301, 10)),
        (50, {}, range(50, 301, 50)),
        (100, {}, [100, 200, 300]),
        (250, {}, [250]),
        (400, {}, []),
        (50, {"start_at": 0.15}, range(150, 301, 50)),
        (50, {"stop_at": 0.12}, [50, 100]),
        (50, {"stop_at": 0.5}, range(50, 501, 50)),
    ],
    ids=["short cycles", "ordinary", "long", "one", "none", "start_at", "stop_at", "later stop_at"],
)
def test_every_sync_up_to_the_peak_is_evidence(sync_every: int, options: dict[str, float], expected: list[int]) -> None:
    controller = RegressionController(**options)
    run = Run(1000, sync_every, 0.3, (None,), (1.0,), probed=False)
    state, updated_at = controller.start(1, run), []
    for step in range(sync_every, 1001, sync_every):
        if controller.active(run, step):
            rho, before = fan(1, step // sync_every), state
            state = controller.update(run, state, Observation(-np.log(rho[0]), rho, np.ones(1), step))
            if state["log_likelihood"] != before["log_likelihood"]:
                updated_at.append(step)
            else:
                assert state["mu"] == before["mu"]
    assert updated_at == list(expected)


def rising_then_falling(controller: RegressionController) -> list[float]:
    """Return the moves of μ: six syncs with strong evidence for more, then six for less at a thousandth of the rate."""
    run = Run(TOTAL, 2 * T, 0.3, (None,), (1.0,), probed=False)
    state, moves = controller.start(1), []
    for cycle in range(12):
        rho, rises = fan(1, cycle), cycle < 6
        losses, base = (-0.5 if rises else 0.5) * np.log(rho[0]), np.array([30.0 if rises else 0.03])
        seen = Observation(losses, rho, base, (cycle + 1) * 2 * T)
        before, state = state["mu"][0], controller.update(run, state, seen)
        moves.append(state["mu"][0] - before)
    return moves


def test_rises_by_bounded_steps_and_falls_at_once() -> None:
    """The rises are clipped; one sync makes a fall of several e-folds."""
    moves = rising_then_falling(REGRESSION)
    assert moves[1:5] == pytest.approx([SETTINGS.largest_move] * 4, rel=1e-9)
    assert max(moves) <= SETTINGS.largest_move + 1e-9
    assert min(moves) == pytest.approx(-5.6, abs=0.1)


@pytest.mark.parametrize("sync_every", [25, 50])
def test_rises_slowly_after_a_smaller_rate_was_better(sync_every: int) -> None:
    """Evidence: twice up, once down, and up again far above. Then the rise is 0.2 for each percent of the run."""
    run, moves = Run(TOTAL, sync_every, 0.3, (None,), (1.0,), probed=False), []
    state = REGRESSION.start(1)
    for look, (sign, value) in enumerate([(-1, 9.0), (-1, 9.0), (1, 9.0), (-1, 900.0), (-1, 900.0)]):
        rho, before = fan(1, look), state["mu"][0]
        seen = Observation(sign * np.log(rho[0]), rho, np.array([value]), (look + 1) * sync_every)
        state = REGRESSION.update(run, state, seen)
        moves.append(state["mu"][0] - before)
    assert moves[1] == pytest.approx(SETTINGS.largest_move)
    assert max(moves[2:]) == pytest.approx(SETTINGS.slow_rise * 100 * sync_every / TOTAL)
    assert state["slow"] == [True]


def test_the_elasticity_bounds_the_rise() -> None:
    """The sign shows that the turning point is ahead, an elasticity of 0.05 that it is near."""
    ends = []
    for probed in (True, False):
        run, state = Run(TOTAL, T, 0.3, (None,), (1.0,), probed=probed), REGRESSION.start(1)
        for look in range(3):
            rho = fan(1, look)
            seen = Observation(-0.05 * np.log(rho[0]) - look, rho, np.array([0.2]), (look + 1) * T)
            state = REGRESSION.update(run, state, seen)
        ends.append(state["mu"][0])
    assert 0 < ends[0] < 0.6 * ends[1]


def test_with_several_learning_rates_only_signs_count() -> None:
    """The gain of a cycle is due to all of them."""
    rho = fan(2, 0)
    states = []
    for probed in (True, False):
        run, state = Run(TOTAL, T, 0.3, (None,) * 2, (1.0, 1.0), probed=probed), REGRESSION.start(2)
        for look in range(3):
            losses = -0.05 * np.log(rho).sum(axis=0) - look
            state = REGRESSION.update(run, state, Observation(losses, rho, np.full(2, 0.2), (look + 1) * T))
        states.append(state["log_likelihood"])
    assert states[0] == states[1]


@pytest.mark.parametrize("gain", [0.0, -1.0, NAN], ids=["nothing gained", "worse", "unknown"])
def test_without_a_gain_there_is_no_elasticity(gain: float) -> None:
    run, state = Run(TOTAL, T, 0.3, (None,), (1.0,)), REGRESSION.start(1)
    rho = fan(1, 0)
    for cycle in range(2):
        losses = np.full(N, NAN) if cycle == 0 and math.isnan(gain) else -np.log(rho[0]) - cycle * np.nan_to_num(gain)
        seen = Observation(losses, rho, np.array([30.0]), (cycle + 1) * T)
        unprobed = REGRESSION.update(dataclasses.replace(run, probed=False), state, seen)
        state = REGRESSION.update(run, state, seen)
    assert state | {"stability": None} == unprobed | {"stability": None}  # stability is judged with a probe only
    assert state["level"] == pytest.approx(0.0 if math.isnan(gain) else -gain, abs=0.1)


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_rate_bounds_rises_and_falls(rate: float) -> None:
    moves = rising_then_falling(RegressionController(rate=rate))
    assert max(moves) == pytest.approx(rate, rel=1e-9)
    assert min(moves) == pytest.approx(-rate, rel=1e-9)


def test_bounds_hold_at_every_step() -> None:
    """The best learning rate is far above the bounds."""
    hyper = Hyperparameter("lr/0", 0.3, "linear", (0.005, 0.05), None, 0, "lr")
    script = Scripted([0.03])

    class Place:
        size, replica, rows = N, 0, 1

    spread = Spread([hyper], REGRESSION, Place(), seed=0, scheduled=[0.03], run=script.run)  # type: ignore[arg-type]
    for step in range(1, TOTAL + 1):
        spread.rates([0.03 * one_cycle(step / TOTAL)])
        assert 0.005 <= spread.base(0) <= 0.05
        if step % T == 0:
            placed = spread.placement()
            assert placed.values.min() >= 0.005
            assert placed.values.max() <= 0.05
            if REGRESSION.active(script.run, step):
                past = script.past(placed.base, step)[:, None] + np.log(placed.applied)
                spread.move(script.run, placed, later(script.losses(past), step // T), None, step)
            spread.fan_out(step // T)
    assert spread.controller_state["mu"][0] > 0


def test_the_state_survives_a_file_at_every_sync() -> None:
    straight, stored = (Scripted([0.1, 3.0], "constant") for _ in range(2))
    for step in straight.syncs:
        file = io.BytesIO()
        torch.save(stored.state, file)
        stored.state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert stored.state == straight.state
        straight.sync(step)
        stored.sync(step)
    assert stored.state == straight.state
    assert 0.0 not in straight.mu


def test_a_state_is_not_changed_in_place() -> None:
    run = Scripted([0.1], "constant")
    run.sync(100)
    state, before = run.state, copy.deepcopy(run.state)
    run.sync(150)
    assert state == before
    assert run.state["caps"] != before["caps"]
