"""Where scripted runs move a learning rate whose best peak is known, and that noise moves hardly any."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal

import numpy as np
import pytest

from hdet_kernels import RegressionController
from hdet_kernels.controller.protocol import Observation, Run
from tests.controller.cases import INF, NAN, SETTINGS
from tests.controller.scripted import DISTRUSTING, PATIENT, REGRESSION, SHAPES, TOTAL, N, Scripted, T, fan

CUT = math.log(SETTINGS.cut)
GRADIENTS: Any = pytest.mark.parametrize("gradients", ["shared", "local"])


class Noise(Scripted):
    """A run that learns something, but whose replicas and slopes differ by noise alone.

    The level falls by 1. Losses of replicas have an error of 0.02, and slopes one of 0.02 too.
    """

    def observe(self, step: int) -> Observation:
        seen, gone = super().observe(step), math.exp(-10 * step / TOTAL)
        errors = None if seen.slopes is None else 0.02 * np.sqrt(self.random.chisquare(7, len(self.starts)) / 7)
        slopes = None if seen.slopes is None else self.random.normal(0, 0.02, len(self.starts))
        return dataclasses.replace(seen, losses=self.random.normal(2 + gone, 0.02, N), slopes=slopes, errors=errors)


@GRADIENTS
@pytest.mark.parametrize("probed", [pytest.param(True, id="probe", marks=pytest.mark.full), False])
@pytest.mark.parametrize(
    "shape", ["onecycle", *(pytest.param(shape, marks=pytest.mark.full) for shape in ("cosine", "constant"))]
)
def test_noise_moves_hardly_anything(shape: str, gradients: Literal["shared", "local"], probed: bool) -> None:
    """Twenty-five runs of each kind, with the noise of one half of fifty seeds or the other: 300 in all.

    Of the seeds from 0 to 99 one, which is among these, wins a trial by chance.
    """
    every, tried, moved = 2 * T if gradients == "local" and not probed else T, 0, []
    half = (list(SHAPES).index(shape) + probed) % 2
    for seed in range(50 + 25 * half, 75 + 25 * half):
        run = Noise([1.0], shape, seed=seed, probed=probed, gradients=gradients, sync_every=every).finish()
        assert (run.state["ceiling"][0] is None) == (run.mu == [0.0]), seed
        assert len(run.returns) - len(run.backs) == (run.mu != [0.0]), "a trial, of which most are no better"
        tried += len(run.returns)
        moved += [seed] if run.mu != [0.0] else []
    assert tried < 8
    assert len(moved) <= 1, moved


def jumping_at(first: int, last: int, high: float = 10.0) -> Any:
    """Return a change of observations: all losses are ``high`` at the syncs after steps ``first`` to ``last``."""

    def change(seen: Observation, made: int) -> Observation:
        jumps = first <= made <= last
        return dataclasses.replace(seen, losses=np.full(N, high)) if jumps else seen

    return change


@GRADIENTS
@pytest.mark.parametrize("probed", [True, False], ids=["probe", "training"])
def test_a_level_that_is_lost_for_good_is_undone_once(gradients: Literal["shared", "local"], probed: bool) -> None:
    run = Noise([1.0, 0.3], probed=probed, gradients=gradients).finish(jumping_at(300, 325))
    assert run.returns == [325]
    assert run.mu == pytest.approx([-CUT, -CUT])
    assert run.state["ceiling"] == run.mu


def test_a_level_that_comes_back_is_not_undone() -> None:
    run = Noise([1.0]).finish(jumping_at(300, 300))
    assert (run.returns, run.mu) == ([], [0.0])


@pytest.mark.parametrize("start", [1 / 30, 1 / 3, 1.0, 3.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_trusted_learning_rate_is_kept(start: float, shape: str) -> None:
    """Slopes cost up to a tenth of the gain of all cycles so far."""
    controller = RegressionController(settings=PATIENT)
    assert Scripted([start], shape, steepness=0.05, controller=controller).finish().mu == [0.0]


def test_the_first_slopes_lower_what_is_far_too_high_at_once() -> None:
    run = Scripted([100.0], steepness=1e-3).finish()
    assert run.returns
    assert run.returns[0] <= 0.15 * TOTAL
    assert run.mu == pytest.approx([(len(run.backs) - len(run.returns)) * CUT])


def test_a_run_that_begins_anew_is_judged_from_its_own_start() -> None:
    """The first slopes tell something after as many syncs as the first time at the earliest."""
    run = Scripted([1e6]).finish()
    assert len(run.returns) > 1
    assert min(np.diff([0, *run.returns])) >= 3 * T


class TestTrials:
    """Slopes of two thirds of their errors, which raise a doubt at step 275 and end it after as many more."""

    FIRST = 275

    def played(self, *, again: bool = False, better: float = 0.0, broken: int = 0) -> Scripted:
        """Play a run whose slopes ask for less, in trials if ``again``, and whose losses are ``better`` after 275."""

        def change(seen: Observation, made: int) -> Observation:
            slopes = np.full(2, -1.0 if self.FIRST < made <= 2 * self.FIRST and not again else 1.0)
            seen = dataclasses.replace(seen, slopes=slopes, errors=np.full(2, 1.5))
            level = 9.0 if made in (broken, broken - T) else seen.losses - better * (made > self.FIRST)
            return dataclasses.replace(seen, losses=np.broadcast_to(level, (N,)))

        return Scripted([1.0, 0.3]).finish(change)

    def test_that_are_no_better_change_nothing(self) -> None:
        run = self.played()
        assert (run.returns, run.backs, run.aside) == ([self.FIRST], [2 * self.FIRST], None)
        assert (run.mu, run.state["ceiling"]) == ([0.0, 0.0], [None, None])
        assert (run.origin, run.left, run.share(TOTAL - self.FIRST)) == (self.FIRST, TOTAL - self.FIRST, 1.0)

    @pytest.mark.parametrize("better", [0.5, 5.0])
    def test_that_are_better_go_on(self, better: float) -> None:
        run = self.played(better=better)
        assert (run.returns, run.backs, run.aside) == ([self.FIRST], [], None)
        assert run.mu == run.state["ceiling"] == pytest.approx([-CUT, -CUT])
        assert run.state["trial"] is None

    @pytest.mark.parametrize(("better", "backs"), [(0.5, []), (-0.5, [2 * FIRST])])
    def test_that_are_in_doubt_themselves_end_by_their_losses_and_are_not_doubted_again(
        self, better: float, backs: list[int]
    ) -> None:
        """On a plateau every learning rate is in doubt, and only a loss can tell."""
        run = self.played(again=True, better=better)
        assert (run.returns, run.backs, run.aside) == ([self.FIRST], backs, None)
        assert run.mu == pytest.approx([0.0 if backs else -CUT] * 2)

    def test_do_not_follow_a_return(self) -> None:
        run = self.played(again=True, broken=200)
        assert (run.returns, run.backs) == ([200], [])
        assert run.mu == pytest.approx([-CUT, -CUT])

    def test_that_break_leave_nothing_to_go_back_to(self) -> None:
        run = self.played(broken=500)
        assert (run.returns[:2], run.backs, run.aside) == ([self.FIRST, 500], [], None)
        assert run.mu == pytest.approx([-len(run.returns) * CUT] * 2)

    @pytest.mark.parametrize(("broken", "undone"), [(1300, [1300]), (1325, []), (1800, [])])
    def test_after_one_that_is_no_better_breaks_are_undone_for_60_percent(self, broken: int, undone: list[int]) -> None:
        """Of the 1725 steps of the run that went on at step 275."""
        run = self.played(better=-0.5, broken=broken)
        assert (run.returns, run.backs) == ([self.FIRST, *undone], [2 * self.FIRST])


class TestTrust:
    @pytest.mark.parametrize("start", [1 / 30, 1 / 10, 10.0, 30.0])
    @GRADIENTS
    def test_without_any_it_moves_towards_the_best(self, start: float, gradients: Literal["shared", "local"]) -> None:
        run = Scripted([start], steepness=0.05, controller=DISTRUSTING, gradients=gradients).finish()
        assert (run.mu[0] > 0) == (start < 1)
        assert abs(math.log(run.over_best[0])) < abs(math.log(start))

    @pytest.mark.parametrize("start", [1 / 30, 30.0])
    def test_less_of_it_moves_further(self, start: float) -> None:
        moves = []
        for trust in (1.0, 3.0, 10.0, 100.0, None):
            controller = RegressionController(trust=trust, settings=PATIENT)
            moves.append(abs(Scripted([start], steepness=0.05, controller=controller).finish().mu[0]))
        assert moves[:2] == [0.0, 0.0]
        assert moves[1:] == sorted(moves[1:])
        assert moves[-1] > moves[2] > 0

    def test_several_learning_rates_move_apart(self) -> None:
        run = Scripted([1 / 30, 30.0, 1.0], steepness=0.02, controller=DISTRUSTING).finish()
        assert run.mu[0] > 0.5
        assert run.mu[1] < -0.5
        assert abs(run.mu[2]) < 1

    def test_a_ceiling_holds_what_signs_would_raise(self) -> None:
        free, undone = (Scripted([1 / 30], steepness=0.02, controller=DISTRUSTING) for _ in range(2))
        free.finish()
        undone.finish(jumping_at(300, 325))
        assert undone.returns == [325]
        assert undone.mu[0] == undone.state["ceiling"][0] < free.mu[0] - 1

    @pytest.mark.parametrize("shape", ["cosine", "constant"])
    def test_the_schedule_is_capped_only_where_signs_count(self, shape: str) -> None:
        assert Scripted([1.0], shape).state["caps"] == []
        assert Scripted([1.0], shape, controller=DISTRUSTING).state["caps"] != []


@pytest.mark.parametrize("trust", [3.0, None])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_one_bad_replica_moves_a_learning_rate_no_further_up(trust: float | None, bad: float) -> None:
    def change(seen: Observation, made: int) -> Observation:
        worst = np.arange(N) == seen.multipliers[0].argmax()
        return dataclasses.replace(seen, losses=np.where(worst, bad, seen.losses))

    controller = RegressionController(trust=trust)
    for gradients in ("shared", "local"):
        options: Any = {"controller": controller, "gradients": gradients, "steepness": 0.05}
        plain, run = (Scripted([1.0], **options).finish(*each) for each in ((), (change,)))
        assert run.mu[0] <= plain.mu[0] + 1e-9


def test_losses_of_no_replica_leave_the_state_as_it_is() -> None:
    """The scheduler returns to the start there, if it can."""
    run = Scripted([1.0])
    for step in run.syncs[:10]:
        run.sync(step)
    seen = dataclasses.replace(run.observe(275), losses=np.full(N, NAN))
    assert REGRESSION.broke(run.run, run.state, seen)
    after = REGRESSION.update(run.run, run.state, seen)
    assert (after["mu"], after["soundness"]) == (run.state["mu"], run.state["soundness"])


@pytest.mark.parametrize("controller", [REGRESSION, DISTRUSTING], ids=["trust 3", "no trust"])
@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_a_state_goes_through_json_at_every_sync(controller: RegressionController, gradients: Any) -> None:
    options: Any = {"controller": controller, "gradients": gradients}
    straight, stored = (Scripted([30.0, 3.0], "constant", **options) for _ in range(2))
    for step in straight.syncs:
        stored.state = json.loads(json.dumps(stored.state))
        assert stored.state == straight.state
        for run in (straight, stored):
            run.sync(step, jumping_at(300, 400, high=1e4))
    assert stored.state == straight.state
    assert straight.returns == stored.returns != []


def test_other_scalars_move_as_they_do_alone() -> None:
    """A learning rate beside them, trusted entirely or not, changes nothing; with trust=1 it stays."""
    for trust in (1.0, 3.0):
        controller, ends = RegressionController(trust=trust), []
        for peaks in ((None, 1.0), (None, None)):
            run = Run(TOTAL, T, 0.3, (None,) * 2, peaks, probed=False, gradients="local", others=True)
            run = controller.prepare(run)
            state = controller.start(2, run)
            for step in range(T, TOTAL + 1, T):
                if controller.active(run, step):
                    rho = fan(2, step // T)
                    if peaks[1] is None:
                        rho[1] = 1
                    losses = np.log(rho[0]) + 0.1 * np.random.default_rng(step).normal(size=N)
                    state = controller.update(run, state, Observation(losses, rho, np.ones(2), step))
            ends.append(state["mu"])
        assert ends[0][1] == ends[1][1] == 0.0
        assert ends[0][0] == pytest.approx(ends[1][0], rel=0.1)
        assert ends[0][0] < -1
