"""Checkpoints of a run with a stack: a resumed run equals the uninterrupted one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR

import hdet_kernels as hk
from tests.schedule.undo_runs import Early
from tests.stack.trainer import DECAY, SHORT, StackTrainer, learning_rates, probed_trainer, two_groups
from tests.training import same


def check_resumes(make: Any, options: dict[str, Any], steps: tuple[int, ...], end: int) -> StackTrainer:
    """Check that runs resumed at each of ``steps`` equal the uninterrupted one at step ``end``, and return that."""
    straight, saved = make(**options), {}
    for at in steps:
        saved[at] = straight.train(at - straight.scheduler.last_epoch).save()
    straight.train(end - straight.scheduler.last_epoch)
    for at, file in saved.items():
        resumed = make(**options).load(file).train(end - at)
        assert torch.equal(resumed.parameters(), straight.parameters()), at
        assert all(map(torch.equal, resumed.stack.buffers(), straight.stack.buffers())), at
        assert same(dict(resumed.stack.hyper), dict(straight.stack.hyper)), at
        assert same(*([r.to_dict() | {"seconds": 0} for r in each.scheduler.history] for each in (resumed, straight)))
        assert resumed.scheduler.cycle.spread.controller_state == straight.scheduler.cycle.spread.controller_state, at
        assert learning_rates(resumed) == learning_rates(straight), at
    return straight  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("optimizer", "gradients", "steps"),
    [
        (hk.FusedAdamW, "shared", (10,)),
        (hk.FusedSGD, "local", (8,)),
        pytest.param(hk.FusedAdamW, "shared", (8,), marks=pytest.mark.full),
        pytest.param(hk.FusedAdamW, "local", (8, 10), marks=pytest.mark.full),
        pytest.param(hk.FusedSGD, "shared", (8,), marks=pytest.mark.full),
        pytest.param(hk.FusedAdam, "shared", (10,), marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    optimizer: Any, gradients: str, steps: tuple[int, ...]
) -> None:
    explore = [hk.Explore("shift", base=0.5)]
    options = {"gradients": gradients, "make_optimizer": optimizer, "batch_norm": True, "explore": explore, **SHORT}
    check_resumes(StackTrainer, options, steps, 20)


MOVED: dict[str, Any] = {"total_steps": 80, "sync_every": 2, "max_lr": 1e-4}


def constant(optimizer: Any, **options: Any) -> hk.HDETScheduler:
    return hk.HDETScheduler(ConstantLR(optimizer, 1.0, 0), total_steps=80, sync_every=2, **options)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (MOVED, (8, 26)),
        pytest.param(MOVED, (1, 3, 4, 7, 11, 18), marks=pytest.mark.full),
        pytest.param({"make_scheduler": constant}, (1, 4, 7, 11, 18, 26), marks=pytest.mark.full),
    ],
    ids=["onecycle", "onecycle-more-steps", "constant"],
)
def test_while_the_controller_moves_the_learning_rate(options: dict[str, Any], steps: tuple[int, ...]) -> None:
    """Before and at the first sync, between and at later ones, and after the last at which it is moved."""
    straight = check_resumes(StackTrainer, options, steps, 40)
    assert all(straight.scheduler.cycle.spread.controller_state["q"]), "the controller has seen slopes"


@pytest.mark.parametrize(
    ("options", "steps", "end"),
    [
        # Five replicas make one pair, which moves to another group at every sync.
        ({"replicas": 5, "make_optimizer": two_groups, "tie_groups": False}, (3, 8, 20), 24),
        (SHORT, (11, 12, 13, 15), 18),
        # Weight decay is explored from step 8 to 36, the learning rate to step 12.
        (DECAY, (8, 36), 38),
        pytest.param(DECAY, (7, 12), 38, marks=pytest.mark.full),
    ],
    ids=["pairs change groups", "end of fan-out", "phases", "phases-more-steps"],
)
def test_with_a_probe(options: dict[str, Any], steps: tuple[int, ...], end: int) -> None:
    check_resumes(probed_trainer, options, steps, end)


@pytest.mark.parametrize("steps", [(1, 2, 7, 16), pytest.param((3, 4, 8, 12, 20), marks=pytest.mark.full)])
def test_around_early_syncs(steps: tuple[int, ...]) -> None:
    straight = check_resumes(probed_trainer, {"auto_lr": Early()}, steps, 24)
    assert [record.step for record in straight.scheduler.history] == [2, 4, 8, 16]


@pytest.mark.parametrize(
    ("replicas", "gradients"),
    [
        (2, "shared"),
        (6, "local"),
        *(pytest.param(replicas, "shared", marks=pytest.mark.full) for replicas in (1, 6)),
        *(pytest.param(replicas, "local", marks=pytest.mark.full) for replicas in (1, 2)),
    ],
)
def test_another_number_of_replicas_can_resume_at_a_sync(replicas: int, gradients: str) -> None:
    trainer = StackTrainer(gradients=gradients).train(8)
    scheduler, optimizer = copy.deepcopy(trainer.scheduler.state_dict()), copy.deepcopy(trainer.optimizer.state_dict())
    other = StackTrainer(replicas=replicas, gradients=gradients)
    other.stack.load_state_dict(trainer.stack.module().state_dict())
    other.optimizer.load_state_dict(optimizer)
    other.scheduler.load_state_dict(scheduler)
    for param, old in zip(other.stack.parameters(), trainer.stack.parameters(), strict=True):
        here, there = other.optimizer.state[param], trainer.optimizer.state[old]
        moment, before = here["exp_avg"].expand_as(param), there["exp_avg"].expand_as(old)
        assert torch.equal(moment, before[:1].expand_as(param)), "averaged at the sync, and so the same in all replicas"
        assert (here["step"] == 8).all()
    other.train(4)
    assert [len(record.losses) for record in other.scheduler.history] == [4, 4, replicas]


def test_another_number_of_replicas_cannot_resume_within_a_cycle() -> None:
    # Without a controller replicas differ to the end; with one they are equal again after its last sync.
    state = StackTrainer(auto_lr=False).train(6).scheduler.state_dict()
    with pytest.raises(ValueError, match="has 4 replicas, 4 in a process, and was saved 2 steps into a cycle"):
        StackTrainer(replicas=2, auto_lr=False).scheduler.load_state_dict(state)
