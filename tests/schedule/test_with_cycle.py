"""The methods that schedulers have beside torch's own."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import hdet_kernels as hk
from hdet_kernels.controller.protocol import Run
from hdet_kernels.schedule.with_cycle import WithCycle
from tests.ranks import run_ranks
from tests.schedule.scout_runs import PHASE, QUICK, REPLICAS, StackRun
from tests.training import batch, loss_of, network, same


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


def _probed(stack: hk.ReplicaStack) -> Any:
    return lambda: stack.losses(loss_of, *batch(0, 1000), same_batch=True)


@pytest.mark.parametrize("max_lr", [0.01, None])
def test_a_probe_that_is_given_later_is_one_from_the_start(max_lr: float | None) -> None:
    later = StackRun(max_lr, gradients="local")
    given = StackRun(max_lr, gradients="local")
    later.scheduler.use_probe(_probed(later.stack))
    options = {"scout": QUICK} if max_lr is None else {}
    given.scheduler = hk.HDETOneCycleLR(
        given.optimizer, max_lr, 50, ensemble=given.stack.ensemble, probe=_probed(given.stack), **options
    )
    ends = []
    for run in (later, given):
        run.train(50)
        ends.append([{**record.to_dict(), "seconds": 0} for record in run.scheduler.history])
        with pytest.raises(RuntimeError, match=r"use_probe\(\) after the first step"):
            run.scheduler.use_probe(_probed(run.stack))
    assert same(ends[0], ends[1])
    assert ends[0][0]["probes"] is not None
    assert same([p.detach() for p in later.stack.parameters()], [p.detach() for p in given.stack.parameters()])


def test_a_probe_around_another_schedule() -> None:
    stack = hk.ReplicaStack(network(), 2, gradients="local")
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.01)
    scheduler = hk.HDETScheduler(CosineAnnealingLR(optimizer, 80), ensemble=stack.ensemble)
    assert (scheduler.sync_every, scheduler.cycle.config["probe"]) == (2, False)
    scheduler.use_probe(_probed(stack))
    assert (scheduler.sync_every, scheduler.cycle.config["probe"]) == (1, True)
    stack.backward(loss_of, *batch(0, 0))
    optimizer.step()
    scheduler.step([1.0, 1.0])
    assert scheduler.history[0].probes is not None


class Refuses(hk.RegressionController):
    """A controller that cannot work with a probe."""

    def prepare(self, run: Run) -> Run:
        if run.probed:
            raise ValueError("no probe, please")
        return super().prepare(run)


@pytest.mark.parametrize("max_lr", [0.01, None])
def test_a_probe_that_is_refused_changes_nothing(max_lr: float | None) -> None:
    run, plain = (StackRun(max_lr, gradients="local", auto_lr=Refuses()) for _ in range(2))
    with pytest.raises(ValueError, match="no probe, please"):
        run.scheduler.use_probe(_probed(run.stack))
    for each in (run, plain):
        each.train(30)
    assert same([p.detach() for p in run.stack.parameters()], [p.detach() for p in plain.stack.parameters()])


def accumulated(rank: int, how: str) -> list[list[float]]:
    """Return the losses of every sync of a run whose batches are divided into 4 micro-batches, or 2 at every third."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = hk.HDETOneCycleLR(optimizer, 1e-3, 12, sync_every=3, trust=1.0)
    for step in range(12):
        x, y = batch(rank, step)
        k = 1 if how == "whole" else 2 if step % 3 == 2 else 4
        pieces = list(zip(x.chunk(k), y.chunk(k), strict=True))
        for number, piece in enumerate(pieces):
            last = number == k - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = loss_of(model, *piece)
                (loss / k).backward()
            if how == "divided":
                scheduler.record_loss(loss.detach() / k, divided_by=k)
            elif how == "forgotten":
                scheduler.record_loss(loss.detach() / k)
            else:
                scheduler.record_loss(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [record.losses for record in scheduler.history]


def each_way(rank: int) -> dict[str, list[list[float]]]:
    return {how: accumulated(rank, how) for how in ("whole", "divided", "forgotten")}


def test_losses_that_were_divided_by_the_number_of_micro_batches_are_told_apart() -> None:
    for found in run_ranks(2, each_way):
        whole, divided, forgotten = (torch.tensor(found[how]) for how in ("whole", "divided", "forgotten"))
        torch.testing.assert_close(divided, whole, rtol=1e-5, atol=0)
        assert (forgotten < 0.5 * whole).all()
