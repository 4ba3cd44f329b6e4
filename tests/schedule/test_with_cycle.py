"""The methods that schedulers have beside torch's own."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hdet_kernels.schedule.with_cycle import WithCycle
from tests.ranks import Cases
from tests.schedule.scout_runs import PHASE, REPLICAS, RUN, StackRun
from tests.training import Trainer


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


def _in_sync(rank: int, options: dict[str, Any]) -> list[tuple[str, bool, bool]]:
    """Return what in_sync says at many moments, and whether the parameters of both ranks are equal there."""
    found = []
    trainer = Trainer(rank, **options)

    def look(moment: str) -> None:
        both = [torch.empty(0), torch.empty(0)]
        dist.all_gather_object(both, trainer.parameters())
        found.append((moment, trainer.scheduler.in_sync, torch.equal(*both)))

    look("before the first step")
    for step in range(1, 21):
        trainer.train(1, before_step=lambda _: look("after optimizer.step()"))
        look(f"after step {step}")
        if step == 6:
            with trainer.scheduler.consensus():
                look("inside consensus()")
            look("after consensus()")
            trainer.scheduler.converge()
            look("after converge()")
    return found


LONG = {"total_steps": 40, "sync_every": 4}
#: With shared gradients replicas are equal from the peak of the schedule on, which is at step 12.
IN_SYNC = Cases(
    2,
    _in_sync,
    {
        "shared": ({**LONG},),
        "local": ({**LONG, "ddp": False, "auto_lr": False},),
        "overlapped": ({**LONG, "ddp": False, "auto_lr": False, "overlap_steps": 2},),
    },
)


@pytest.mark.parametrize(("kind", "synced"), [("shared", 2 + 2 + 18), ("local", 2 + 2 + 4), ("overlapped", 2 + 1)])
def test_in_sync_is_true_where_the_replicas_are_equal(kind: str, synced: int) -> None:
    for found in IN_SYNC[kind]:
        wrong = [moment for moment, told, equal in found if told is not equal]
        assert not wrong
        assert len([moment for moment, told, _ in found if told]) == synced, found
        told = {moment: told for moment, told, _ in found}
        assert all(told[moment] for moment in ("before the first step", "inside consensus()", "after converge()"))
        assert not told["after consensus()"]


def test_in_sync_of_a_stack() -> None:
    run = StackRun(0.01, RUN, sync_every=5, auto_lr=False)
    told = []
    for _ in range(10):
        run.train(1)
        told.append(run.scheduler.in_sync)
    assert told == [step % 5 == 0 for step in range(1, 11)]


def test_one_replica_is_always_in_sync() -> None:
    run = StackRun(0.01, RUN, replicas=1, sync_every=5, auto_lr=False)
    run.train(2)
    assert run.scheduler.in_sync


def _loads_of_another(rank: int, how: str) -> list[str]:
    """Return what is logged where both ranks load the state of the first."""
    trainer = Trainer(rank, auto_lr=False, total_steps=20).train(6)
    if how == "converged":
        trainer.scheduler.converge()
    states: list[Any] = [trainer.scheduler.state_dict()]
    if how == "consensus":
        with trainer.scheduler.consensus():
            states = [trainer.scheduler.state_dict()]
    if how != "own":
        dist.broadcast_object_list(states, src=0)
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hdet_kernels").addHandler(handler)
    other = Trainer(rank, auto_lr=False, total_steps=20)
    other.scheduler.load_state_dict(states[0])
    logging.getLogger("hdet_kernels").removeHandler(handler)
    assert other.scheduler.in_sync is (how in ("converged", "consensus"))
    return texts


LOADS = Cases(2, _loads_of_another, [(how,) for how in ("own", "diverged", "converged", "consensus")])


@pytest.mark.parametrize("how", ["own", "diverged", "converged", "consensus"])
def test_a_state_of_another_replica_that_differed_is_named(how: str) -> None:
    first, second = LOADS[(how,)]
    assert not first
    if how == "diverged":
        (text,) = second
        assert text.startswith("the checkpoint was saved by replica 0 at step 6, when the replicas differed, and repl")
    else:
        assert not second
