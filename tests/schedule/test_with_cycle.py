"""The methods that schedulers have beside torch's own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hdet_kernels.schedule.with_cycle import WithCycle
from tests.schedule.scout_runs import PHASE, REPLICAS, StackRun


def test_a_scheduler_that_is_being_built_has_no_cycle() -> None:
    with pytest.raises(RuntimeError, match="still being built"):
        _ = WithCycle().cycle


def test_a_scheduler_is_neither_copied_nor_pickled() -> None:
    scheduler = StackRun().scheduler
    for use in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled: save its state_dict"):
            use(scheduler)


def test_losses_are_recorded_where_they_are_compared() -> None:
    run = StackRun()
    run.scheduler.record_loss(torch.ones(REPLICAS))
    phase = run.scheduler._phase
    assert phase is not None
    assert (phase.losses.first.count, run.scheduler.cycle.window.count) == (1, 0)
    run.train(PHASE)
    run.scheduler.record_loss(torch.ones(REPLICAS))
    assert run.scheduler.cycle.window.count == 1
