"""How the regression controller moves learning rates: when, how far at one sync, and from which evidence."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from typing import Any

import numpy as np
import pytest
import torch

from hdet_kernels import RegressionController
from hdet_kernels.controller.protocol import Observation, Run
from hdet_kernels.controller.regression import Soundness
from hdet_kernels.controller.settings import RegressionSettings
from hdet_kernels.fanout.explore import Hyperparameter
from hdet_kernels.fanout.spread import Spread
from tests.controller.cases import NAN, SETTINGS
from tests.controller.scripted import DISTRUSTING, REGRESSION, TOTAL, N, Scripted, T, fan, one_cycle

RUN = REGRESSION.prepare(Run(TOTAL, T, 0.3, (None,), (1.0,), probed=False, gradients="shared"))


def measured(slope: float, error: float, *, step: int = 300, level: float = 1.0, base: float = 1.0) -> Observation:
    """Return a sync with a slope that was measured from gradients."""
    rho = fan(1, step // T)
    return Observation(np.full(N, level), rho, np.array([base]), step, np.array([slope]), np.array([error]))


def after(controller: RegressionController, *several: Observation, run: Run = RUN) -> Any:
    state = controller.start(1, run)
    for seen in several:
        state = controller.update(run, state, seen)
    return state


class TestPrepare:
    def test_slopes_are_measured_where_gradients_are_shared(self) -> None:
        for gradients, overlaps, peaks, trust, expected in (
            ("shared", False, (1.0,), 3.0, True),
            ("auto", False, (1.0,), 3.0, True),
            ("local", False, (1.0,), 3.0, False),
            ("shared", True, (1.0,), 3.0, False),
            ("shared", False, (None,), 3.0, False),
            ("shared", False, (1.0,), 1.0, False),
        ):
            run: Any = Run(TOTAL, T, 0.3, (None,), peaks, gradients=gradients, overlaps=overlaps)
            assert RegressionController(trust=trust).prepare(run).slopes is expected

    @pytest.mark.parametrize("trust", [3.0, 10.0, None])
    def test_learning_rates_differ_to_the_peak(self, trust: float | None) -> None:
        run = RegressionController(trust=trust).prepare(Run(TOTAL, T, 0.3, (None,), (1.0,)))
        assert (run.departs, run.in_pairs, run.early) == (((0, 600),), True, ())

    def test_full_trust_leaves_the_run_as_it_is(self) -> None:
        run = Run(TOTAL, T, 0.3, (None,), (1.0,))
        controller = RegressionController(trust=1)
        assert controller.prepare(run) == dataclasses.replace(run, departs=(None,))
        assert not any(controller.active(run, step) for step in range(T, TOTAL + 1, T))
        assert controller.undo == 0, "a return lowers the learning rate"


class TestPartOfTheRun:
    @pytest.mark.parametrize(
        ("sync_every", "options", "expected"),
        [
            (10, {}, range(10, 301, 10)),
            (100, {}, [100, 200, 300]),
            (250, {}, [250]),
            (400, {}, []),
            (50, {"start_at": 0.15}, range(150, 301, 50)),
            (50, {"stop_at": 0.12}, [50, 100]),
            (50, {"stop_at": 0.5}, range(50, 501, 50)),
        ],
        ids=["short cycles", "long", "one", "none", "start_at", "stop_at", "later stop_at"],
    )
    def test_every_sync_up_to_the_peak_is_evidence(
        self, sync_every: int, options: dict[str, float], expected: list[int]
    ) -> None:
        controller = RegressionController(trust=None, **options)
        run = controller.prepare(Run(1000, sync_every, 0.3, (None,), (1.0,), probed=False, gradients="local"))
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

    @pytest.mark.parametrize(
        ("options", "last"),
        [
            ({}, 1200),
            ({"settings": RegressionSettings(watch_until=0.5)}, 1000),
            ({"settings": RegressionSettings(watch_until=0.1)}, 600),
            ({"stop_at": 0.4}, 800),
            ({"stop_at": 0.7}, 1400),
            ({"trust": 1.0}, 0),
        ],
        ids=["default", "half", "to the peak", "stop_at", "later stop_at", "trust 1"],
    )
    def test_levels_are_judged_longer(self, options: dict[str, Any], last: int) -> None:
        """A break after the peak is undone, and nothing else is moved there."""
        controller = RegressionController(**options)
        state = controller.start(1, RUN) | {"soundness": Soundness(3.0, 1.0, 9.0, (0.1,)).state_dict()}
        for step in (T, 600, 625, last or T, last + T):
            seen = measured(1.0, 1.0, step=step, level=9.0)
            assert controller.broke(RUN, state, seen) is controller.active(RUN, step) is (step <= last)
            assert controller.update(RUN, state, seen)["mu"] == [0.0]


class TestBroke:
    def test_the_first_level_tells_nothing(self) -> None:
        state = REGRESSION.start(1, RUN)
        for level in (1.0, 1e9, NAN):
            assert not REGRESSION.broke(RUN, state, measured(0.0, 1.0, level=level))

    def test_later_ones_are_judged_by_the_course(self) -> None:
        state = REGRESSION.start(1, RUN) | {"soundness": Soundness(3.0, 1.0, 9.0, (0.1,)).state_dict()}
        for level, expected in ((0.9, False), (1.2, False), (9.0, True), (NAN, True)):
            assert REGRESSION.broke(RUN, state, measured(0.0, 1.0, level=level)) is expected


class TestBegunAnew:
    RUN = Run(TOTAL, T, 0.3, (None,) * 3, (1.0, None, 0.1), others=True, gradients="shared")

    @pytest.mark.parametrize("trust", [3.0, None])
    def test_lowers_all_learning_rates_and_keeps_other_scalars(self, trust: float | None) -> None:
        """All else is as before the first sync of a run over the steps that remain."""
        controller = RegressionController(trust=trust)
        run = controller.prepare(self.RUN)
        course = Soundness(3.0, 1.0, 9.0, (0.1,), 3.0, (0.5,), 7.0, 3, 0.02)
        state = controller.start(3, run) | {"mu": [0.5, 0.7, -0.2], "soundness": course.state_dict()}
        state |= {"path_length": [9.0] * 3, "signs": [1.0] * 3, "noise": [1.0, 5], "observations": [3] * 3}
        seen = Observation(np.full(N, NAN), fan(3, 0), np.ones(3), 300)
        new = controller.begun_anew(run, state, seen)
        cut = math.log(SETTINGS.cut)
        assert new["mu"] == pytest.approx([0.5 - cut, 0.7, -0.2 - cut])
        assert new["ceiling"] == [new["mu"][0], None, new["mu"][2]]
        fresh = controller.start(3, run.rest(300))
        assert {name: new[name] for name in new.keys() - {"mu", "ceiling"}} == {
            name: fresh[name] for name in fresh.keys() - {"mu", "ceiling"}
        }

    def test_goes_below_the_limit_by_as_much_as_all_returns_lower(self) -> None:
        controller = RegressionController(limit=1.0)
        state: Any = controller.start(1, RUN) | {"mu": [-1.0]}
        for _ in range(controller.undo):
            state = controller.begun_anew(RUN, state, measured(0.0, 1.0))
        assert state["mu"] == state["ceiling"] == pytest.approx([controller.lowest])

    def test_signs_raise_nothing_above_it(self) -> None:
        """Slopes ask for more, sync after sync."""
        controller = RegressionController(trust=None, limit=1.0)
        state = controller.begun_anew(RUN, controller.start(1, RUN), measured(0.0, 1.0, step=T))
        run, ceiling = controller.prepare(RUN.rest(T)), state["ceiling"]
        for step in range(T, 9 * T, T):
            state = controller.update(run, state, measured(-1.0, 1e-3, step=step, base=0.01))
            assert (state["mu"], state["ceiling"]) == (ceiling, ceiling)


class TestFirstSlopes:
    """Slopes over their errors, at a base that has the path end where they are judged."""

    BASE = 0.999 * SETTINGS.turned_until * TOTAL / (4 * T)
    HIGH = 2 * SETTINGS.turned_mean

    def broke(self, *slopes: float) -> list[bool]:
        state, found = REGRESSION.start(1, RUN), []
        for index, slope in enumerate([math.nan, *slopes]):
            error = math.inf if math.isnan(slope) else 1.0
            # The level falls, much faster than slopes cost.
            seen = measured(slope, error, step=T * (index + 1), base=self.BASE, level=1e3 / (index + 1))
            found.append(REGRESSION.broke(RUN, state, seen))
            state = REGRESSION.update(RUN, state, seen)
        return found

    def test_that_ask_for_less_tell_that_it_is_too_high(self) -> None:
        first, *later = self.broke(*[self.HIGH] * 3)
        assert not first
        assert any(later)

    @pytest.mark.parametrize("slopes", [(-HIGH,) * 5, (0.0,) * 5, (NAN,) * 5], ids=["more", "nothing", "unknown"])
    def test_others_tell_nothing(self, slopes: tuple[float, ...]) -> None:
        assert not any(self.broke(*slopes))

    def test_are_not_judged_where_losses_are_compared(self) -> None:
        """Slopes of losses are of other examples, or of few replicas."""
        run = REGRESSION.prepare(dataclasses.replace(RUN, gradients="local"))
        state = REGRESSION.start(1, run)
        for step in range(T, 5 * T, T):
            rho = fan(1, step // T)
            seen = Observation(1e3 / step + np.log(rho[0]), rho, np.full(1, self.BASE), step)
            assert not REGRESSION.broke(run, state, seen)
            state = REGRESSION.update(run, state, seen)
        assert state["soundness"]["count"] == 0


class TestWhereSlopesAreNotKnown:
    def test_the_first_two_cycles_have_none(self) -> None:
        """Nothing is known of a cycle's displacement yet, and losses do not stand in for it."""
        for gradients in ("shared", "auto"):
            run = dataclasses.replace(RUN, gradients=gradients)
            state = DISTRUSTING.start(1, run)
            for step in (T, 2 * T):
                rho = fan(1, step // T)
                seen = Observation(4 - step / T + np.log(rho[0]), rho, np.ones(1), step)
                state = DISTRUSTING.update(run, state, seen)
            assert state["log_likelihood"] == [[]]

    def test_gradients_that_turn_out_local_are_compared_by_losses(self) -> None:
        run = dataclasses.replace(RUN, gradients="auto")
        state = DISTRUSTING.start(1, run)
        for step in range(T, 9 * T, T):
            rho = fan(1, step // T)
            state = DISTRUSTING.update(run, state, Observation(2 / step + np.log(rho[0]), rho, np.ones(1), step))
        assert state["mu"][0] < 0


class TestDoubt:
    """A level that falls as 400 over the step, and slopes of one size, whose error is 1."""

    @staticmethod
    def doubts(
        slope: float = 1.0, *, levels: float = 400.0, known_from: int = 0, sync_every: int = T, **options: Any
    ) -> list[int]:
        """Return the steps after which the learning rate is in doubt; nothing is tried there."""
        own = {name: options.pop(name) for name in ("trust", "stop_at", "gradients") if name in options}
        gradients = own.pop("gradients", "shared")
        controller = RegressionController(settings=RegressionSettings(**options), **own)
        run = controller.prepare(dataclasses.replace(RUN, sync_every=sync_every, gradients=gradients))
        state, found = controller.start(1, run), []
        for step in range(sync_every, TOTAL + 1, sync_every):
            if controller.active(run, step):
                seen = measured(slope, 1.0, step=step, level=levels / step if levels else 3.0)
                if gradients == "local" or step < known_from:
                    losses = seen.losses + np.log(fan(1, 0)[0])
                    seen = dataclasses.replace(seen, slopes=None, errors=None, losses=losses)
                found += [step] if controller.doubts(run, state, seen) else []
                state = controller.update(run, state, seen)
        return found

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, [275]),
            ({"doubt_at": 0.1375}, [275]),
            ({"doubt_at": 0.138}, [300]),
            ({"slope": 1.01 * SETTINGS.doubt_mean}, [275]),
            ({"slope": 0.99 * SETTINGS.doubt_mean}, []),
            ({"slope": -1.0}, []),
            ({"slope": 1.45 * SETTINGS.doubt_mean, "known_from": 225}, [275]),
            ({"slope": 1.35 * SETTINGS.doubt_mean, "known_from": 225}, []),
            ({"levels": 0.0}, []),
            ({"levels": -400.0}, []),
            ({"known_from": 300}, []),
            ({"gradients": "local"}, []),
            ({"trust": 1.0}, []),
            ({"trust": None}, [275]),
            ({"stop_at": 0.1}, []),
            ({"doubt_at": 0.22, "sync_every": 50}, [450]),
            ({"doubt_at": 0.24, "sync_every": 50}, []),
        ],
        ids=[
            *("default", "share", "next sync", "mean", "low mean", "larger", "few, clear", "few", "plateau", "no gain"),
            *("unknown", "local", "trust 1", "no trust", "stop_at", "can just end", "cannot end before the peak"),
        ],
    )
    def test_is_raised_once_by_a_table(self, given: dict[str, Any], expected: list[int]) -> None:
        assert self.doubts(**given) == expected


class TestComparison:
    """A trial that began after 275 steps, at a level of 2 with a noise of 0.1, and ends at a level near that."""

    RUN = REGRESSION.prepare(RUN.rest(275))

    @pytest.mark.parametrize(
        ("levels", "bend", "mean", "step", "expected"),
        [
            ((1.85, 1.85), 0.05, -1.0, 275, False),
            ((1.95, 1.75), 0.05, -1.0, 275, False),
            ((1.9, 1.9), 0.05, -1.0, 275, True),
            ((2.5, 2.5), 0.05, -1.0, 275, True),
            ((1.85, 1.85), 0.15, -1.0, 275, True),
            ((2.5, 2.5), 0.05, 1.0, 275, True),
            ((2.5, 2.5), 0.05, -1.0, 250, False),
            ((2.5, 2.5), 0.05, -1.0, 300, False),
        ],
        ids=["better", "mean of two", "within noise", "worse", "own noise", "worse, in doubt", "earlier", "later"],
    )
    def test_by_a_table(self, levels: tuple[float, float], bend: float, mean: float, step: int, expected: bool) -> None:
        last, level = levels
        course = Soundness(3.0, 1.7, last, (0.1,), last, (bend,) * 5, 7 * mean, 7).state_dict()
        state = REGRESSION.start(1, self.RUN) | {"soundness": course}
        state["trial"] = {"step": 275, "level": 2.0, "noise": 0.1}
        seen = dataclasses.replace(measured(0.0, 1.0, step=step, level=level), slopes=None, errors=None)
        assert REGRESSION.worse(self.RUN, state, seen) is expected
        assert not REGRESSION.worse(self.RUN, state | {"trial": None}, seen)
        assert (REGRESSION.update(self.RUN, state, seen)["trial"] is None) is (step == 275), "it ends there"


class TestErrorsThatAreNotKnown:
    """A cycle with one gradient measures a slope without an error."""

    @staticmethod
    def end(*slopes: float) -> Any:
        controller = RegressionController(trust=None)
        return after(controller, *[measured(slope, NAN, step=T * (index + 3)) for index, slope in enumerate(slopes)])

    @pytest.mark.parametrize("sign", [-1, 1])
    def test_signs_that_persist_are_evidence(self, sign: int) -> None:
        assert self.end(*[sign * 1e-3] * 9)["mu"][0] * sign < 0

    def test_signs_that_change_and_slopes_that_are_not_finite_are_none(self) -> None:
        for slopes in ([1e-3, -1e-3] * 5, [NAN] * 9):
            state = self.end(*slopes)
            assert abs(state["mu"][0]) < 0.2
            assert np.isfinite(state["log_likelihood"][0]).all()


#: Signs are often wrong, so that six of them against six decide.
WAVERING = RegressionSettings(turning_length=0.3, task_deviation=1.5, sign_error=0.05, quantile=0.25)


def rising_then_falling(controller: RegressionController) -> list[float]:
    """Return the moves of μ: six syncs with strong evidence for more, then six for less at a thousandth of the rate."""
    run = controller.prepare(Run(TOTAL, 2 * T, 0.3, (None,), (1.0,), probed=False, gradients="shared"))
    state, moves = controller.start(1, run), []
    for cycle in range(12):
        rises = cycle < 6
        slope, base = (-1e-6, 30.0) if rises else (1e-6, 0.003)
        seen = measured(slope, 1e-9, step=(cycle + 3) * 2 * T, base=base)
        before, state = state["mu"][0], controller.update(run, state, seen)
        moves.append(state["mu"][0] - before)
    return moves


def test_rises_by_bounded_steps_and_falls_at_once() -> None:
    moves = rising_then_falling(RegressionController(trust=None, settings=WAVERING))
    assert max(moves) == pytest.approx(WAVERING.largest_move)
    assert min(moves) < -WAVERING.largest_move


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_rate_bounds_rises_and_falls(rate: float) -> None:
    moves = rising_then_falling(RegressionController(rate=rate, trust=None, settings=WAVERING))
    assert max(moves) == pytest.approx(rate, rel=1e-9)
    assert min(moves) == pytest.approx(-rate, rel=1e-9)


def test_bounds_hold_at_every_step() -> None:
    """The best learning rate is far above the bounds."""
    hyper = Hyperparameter("lr/0", 0.3, "linear", (0.005, 0.05), None, 0, "lr")
    script = Scripted([0.03], controller=DISTRUSTING)

    class Place:
        size, replica, rows = N, 0, 1

    spread = Spread([hyper], DISTRUSTING, Place(), seed=0, scheduled=[0.03], run=script.run)  # type: ignore[arg-type]
    for step in range(1, TOTAL + 1):
        spread.rates([0.03 * one_cycle(step / TOTAL)])
        assert 0.005 <= spread.base(0) <= 0.05
        if step % T == 0:
            placed = spread.placement()
            assert placed.values.min() >= 0.005
            assert placed.values.max() <= 0.05
            if DISTRUSTING.active(script.run, step):
                seen = dataclasses.replace(script.observe(step), multipliers=placed.applied, base=placed.base)
                spread.controller_state = DISTRUSTING.update(script.run, spread.controller_state, seen)
            spread.fan_out(step // T)
    assert spread.controller_state["mu"][0] > 0


def test_the_state_survives_a_file_at_every_sync() -> None:
    straight, stored = (Scripted([0.1, 3.0], "constant", controller=DISTRUSTING) for _ in range(2))
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
    run = Scripted([30.0], "constant", controller=DISTRUSTING)
    for step in range(T, 9 * T, T):
        state, before = run.state, copy.deepcopy(run.state)
        run.sync(step)
        assert state == before
    state, before = run.state, copy.deepcopy(run.state)
    assert DISTRUSTING.begun_anew(run.run, state, run.observe(9 * T)) != state
    assert state == before
