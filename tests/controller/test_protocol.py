"""The description of a run, and the properties that every controller has."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet_kernels import HypergradientController, RegressionController, SoftmaxController
from hdet_kernels.controller.protocol import Controller, Observation, Run, check_controller
from hdet_kernels.controller.regression import grid
from tests.controller.cases import NAN, PROPERTY, RUN, fan, observe

ALL = [RegressionController, HypergradientController, SoftmaxController]


class TestRun:
    @PROPERTY
    @given(st.integers(1, 40), st.integers(0, 2000), st.integers(0, 2000))
    def test_counts_the_syncs_between_two_steps(self, sync_every: int, first_quarter: int, last_quarter: int) -> None:
        first, last = first_quarter / 4, last_quarter / 4
        expected = sum(first <= step <= last for step in range(sync_every, 501, sync_every))
        assert Run(500, sync_every, 0.3, ()).syncs(first, last) == expected

    def test_tells_whether_a_controller_acts_later(self) -> None:
        controller = HypergradientController(start_at=0.5, stop_at=0.7)
        run = Run(100, 10, 0.3, (None,), early=(5,))
        assert [run.acts_after(controller, step) for step in (0, 10, 60, 69, 70, 100)] == [True] * 4 + [False] * 2
        always = SoftmaxController(warmup_steps=0, decay=0.0)
        assert run.acts_after(always, 99), "the end of the run has a sync"
        assert not run.acts_after(always, 100)
        assert dataclasses.replace(run, total_steps=None).acts_after(always, 100)

    @PROPERTY
    @given(st.integers(1, 60), st.integers(1, 500))
    def test_cycles_follow_each_other_without_a_gap(self, sync_every: int, total: int) -> None:
        run = Run(total, sync_every, 0.3, (None,), (1.0,))
        run = RegressionController().prepare(run)
        syncs = [step for step in range(1, total + 1) if run.syncs_at(step)]
        assert syncs[-1] == total
        assert [run.steps_since_sync(step) for step in syncs] == np.diff([0, *syncs]).tolist()

    @pytest.mark.parametrize(
        ("first", "last", "count"),
        [(50, 300, 11), (51, 299, 9), (0, 25, 1), (0, 24, 0), (25, 25, 1), (300, 50, 0), (0, 1000, 40)],
    )
    def test_syncs_by_a_table(self, first: float, last: float, count: int) -> None:
        assert RUN.syncs(first, last) == count

    def test_a_share_of_the_run_becomes_its_step_in_spite_of_rounding(self) -> None:
        """The product 0.29·100 is 28.999999999999996."""
        for step in range(1, 100):
            run = Run(100, step, 0.3, (), others=True)
            controller = RegressionController(start_at=0.0, stop_at=step / 100)
            assert controller.active(run, step), step
            assert not controller.active(run, step + 1), step
            assert run.syncs(*controller.slope_steps(run)) == 1, step

    def test_counts_all_syncs_up_to_a_step(self) -> None:
        run = Run(100, 8, 0.3, (), early=(1, 2, 4))
        assert [run.syncs_before(step) for step in (0, 1, 3, 4, 7, 8, 9, 16)] == [0, 1, 2, 3, 3, 4, 4, 5]
        assert [step for step in range(1, 18) if run.syncs_at(step)] == [1, 2, 4, 8, 16]
        assert run.syncs_at(100)
        assert not Run(None, 8, 0.3, ()).syncs_at(100)

    def test_replicas_differ_from_the_first_step_of_departs_to_before_the_last(self) -> None:
        run = Run(100, 8, 0.3, (), departs=((0, 32), (24, 80), None))
        assert run.departs_at(0) == (True, False, True)
        assert run.departs_at(24) == (True, True, True)
        assert run.departs_at(32) == (False, True, True)
        assert run.departs_at(80) == (False, False, True)
        assert Run(100, 8, 0.3, ()).departs_at(0) is None

    def test_the_rest_is_a_run_over_the_steps_that_remain_as_before_it_was_prepared(self) -> None:
        run = Run(100, 8, 0.3, (None,), (0.1,), others=True)
        prepared = RegressionController().prepare(run)
        assert dataclasses.replace(prepared.rest(40), slopes=run.slopes) == dataclasses.replace(run, total_steps=60)
        assert dataclasses.replace(run, total_steps=None).rest(40).total_steps is None

    def test_moves_rates_if_there_is_a_peak(self) -> None:
        assert Run(100, 8, 0.3, (None,) * 2, (None, 0.1)).moves_rates
        assert not Run(100, 8, 0.3, (None,) * 2, (None, None)).moves_rates
        assert not Run(100, 8, 0.3, ()).moves_rates


def observed(kind: Any, cycle: int) -> Observation:
    losses = [2.0 + 0.1 * cycle, 1.5, NAN if cycle == 1 else 1.7, 1.0]
    return observe(losses, fan(4, 2, cycle), [0.1, 0.2], slopes=[0.3 - 0.2 * cycle, -1.0])


def types_in(state: Any) -> list[type]:
    """Return the types of all values in nested dicts and lists."""
    if isinstance(state, dict | list):
        return [kind for part in (state.values() if isinstance(state, dict) else state) for kind in types_in(part)]
    return [type(state)]


@pytest.mark.parametrize("kind", ALL)
class TestEveryController:
    def test_implements_the_protocol(self, kind: Any) -> None:
        assert isinstance(kind(), Controller)
        check_controller(kind())
        assert kind().reads == ("slopes" if kind is HypergradientController else "losses")

    def test_state_before_the_first_update(self, kind: Any) -> None:
        at_start = {"eta": [], "velocity": [0.0] * 3, "gamma": []}
        if kind is not SoftmaxController:
            at_start = {"mu": [0.0] * 3, "m": [0.0] * 3, "q": [0.0] * 3, "s": [0.0] * 3}
            at_start |= {"observations": [0] * 3, "updates": [0] * 3, "caps": []}
        if kind is RegressionController:
            at_start |= {"log_likelihood": [[], [], []], "path_length": [0.0] * 3, "ceiling": [None] * 3}
            at_start |= {"signs": [0.0] * 3, "noise": [0.0, 0], "soundness": None, "trial": None}
        assert kind().start(3) == at_start

    def test_state_is_plain_lists_and_survives_json_bit_for_bit(self, kind: Any) -> None:
        run = dataclasses.replace(RUN, floors=(1e-6, None), peaks=(0.1, None))
        options: dict[Any, Any] = {SoftmaxController: {"warmup_steps": 500}, RegressionController: {"trust": None}}
        controller = kind(**options.get(kind, {}))
        state = controller.start(2)
        loaded = json.loads(json.dumps(state))
        for cycle in range(4):
            state = controller.update(run, state, observed(kind, cycle))
            loaded = json.loads(json.dumps(controller.update(run, loaded, observed(kind, cycle))))
            assert loaded == state
            assert set(types_in(state)) <= {int, float, bool, type(None)}
        if kind is RegressionController:
            assert [len(logs) for logs in state["log_likelihood"]] == [len(grid()), 0]

    def test_update_changes_neither_the_old_state_nor_the_observation(self, kind: Any) -> None:
        run = dataclasses.replace(RUN, floors=(1e-6, None), peaks=(0.1, None))
        controller = kind(warmup_steps=500) if kind is SoftmaxController else kind()
        state = controller.update(run, controller.start(2), observed(kind, 0))
        seen = observed(kind, 1)
        before, seen_before = copy.deepcopy(state), copy.deepcopy(seen)
        after = controller.update(run, state, seen)
        assert after != state
        assert state == before
        for field in dataclasses.fields(seen):
            np.testing.assert_array_equal(getattr(seen, field.name), getattr(seen_before, field.name))

    def test_constants_are_frozen(self, kind: Any) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            kind().rate = 1.0


class TestCheckController:
    def test_a_class_is_refused_with_the_instance_to_pass(self) -> None:
        with pytest.raises(
            TypeError, match=r"auto_lr is the class SoftmaxController: pass an instance, SoftmaxControl"
        ):
            check_controller(SoftmaxController)

    @pytest.mark.parametrize("wrong", ["softmax", 3, None])
    def test_other_objects_are_refused_with_all_that_they_lack(self, wrong: object) -> None:
        expected = f"got {wrong!r}, which has no reads, prepare, active, start, update, base"
        with pytest.raises(TypeError, match=expected):
            check_controller(wrong)

    def test_one_that_undoes_needs_both_methods_and_a_number(self) -> None:
        check_controller(Undoing())
        with pytest.raises(TypeError, match=r"OnlyJudging has undo=1, but no begun_anew: write both methods"):
            check_controller(OnlyJudging())
        for wrong in (-1, 1.5, True, None):
            with pytest.raises(
                ValueError, match=f"undo of Undoing must be a whole number of at least 0, .* got {wrong}"
            ):
                check_controller(Undoing(undo=wrong))


@dataclasses.dataclass(frozen=True)
class OnlyJudging(SoftmaxController):
    undo: Any = 1

    def broke(self, *_: Any) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class Undoing(OnlyJudging):
    def begun_anew(self, run: Any, state: Any, seen: Any) -> Any:
        return state
