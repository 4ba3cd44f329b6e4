"""The methods that schedulers have beside torch's own."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import hdet_kernels as hk
from hdet_kernels.controller.protocol import Run
from tests.ranks import Cases, run_ranks
from tests.schedule.checkpoints import Logged
from tests.schedule.scout_runs import PHASE, QUICK, REPLICAS, RUN, StackRun
from tests.training import Trainer, batch, loss_of, network, same


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


def _coupled(params: Any, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr, momentum=0.9, weight_decay=0.1)


LONG = {"total_steps": 40, "sync_every": 4}
#: With shared gradients replicas are equal from the peak of the schedule on, which is at step 12.
IN_SYNC = Cases(
    2,
    _in_sync,
    {
        "shared": ({**LONG},),
        "coupled decay": ({**LONG, "make_optimizer": _coupled},),
        "state left alone": ({**LONG, "make_optimizer": _coupled, "average_state": False},),
        "local": ({**LONG, "ddp": False, "auto_lr": False},),
        "overlapped": ({**LONG, "ddp": False, "auto_lr": False, "overlap_steps": 2},),
    },
)


@pytest.mark.parametrize(
    ("kind", "synced"),
    [
        ("shared", 2 + 2 + 18),
        ("coupled decay", 2 + 2 + 18),
        ("state left alone", 2 + 2 + 4),
        ("local", 2 + 2 + 4),
        ("overlapped", 2 + 1),
    ],
)
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


def _saves(rank: int, kind: str) -> dict[str, Any]:
    """Return how often a ``state_dict()`` of the model warned, by moment, and whether copies of the model are whole."""
    module = network()
    wrapped = {
        "ddp": DistributedDataParallel,
        "compiled": lambda module: torch.compile(module, backend="eager"),
        "compiled ddp": lambda module: torch.compile(DistributedDataParallel(module), backend="eager"),
        "sharded": lambda module: fully_shard(
            module, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        ),
    }
    model: Any = wrapped.get(kind, lambda module: module)(module)
    options = {"spread": 0.0 if kind == "no spread" else 0.5, "auto_lr": False, "sync_every": 3, "model": model}
    optimizer = hk.FusedAdamW(model.parameters(), lr=0.01)
    schedulers = [hk.HDETOneCycleLR(optimizer, 0.05, 12, **options)]
    found: dict[str, Any] = {}

    def save(moment: str) -> None:
        for saved in (model, module):
            with Logged() as texts:
                saved.state_dict()
            found[moment] = found.get(moment, 0) + sum("scheduler.consensus()" in text for text in texts)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, *batch(rank, 0))
            loss.backward()
            if kind == "no spread":
                for param in model.parameters():
                    dist.all_reduce(param.grad)
            optimizer.step()
            schedulers[0].step(loss)

    save("start")
    train(1)
    with schedulers[0].consensus():
        save("consensus")
    train(2)
    save("sync")
    train(1)
    save("between")
    save("again")
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))) if kind == "plain" else ():
        with Logged() as texts:
            assert same(copied.state_dict(), module.state_dict())
            copied.load_state_dict(module.state_dict())
        assert not texts
        assert not any("hdet" in type(hook).__module__ for hook in copied._state_dict_pre_hooks.values())
    schedulers.clear()
    gc.collect()
    found["hooks"] = len(module._state_dict_pre_hooks)
    return found


SAVES = Cases(
    2,
    _saves,
    {kind: (kind,) for kind in ("plain", "ddp", "no spread")},
    full={kind: (kind,) for kind in ("compiled", "compiled ddp", "sharded")},
)


@pytest.mark.parametrize("kind", SAVES.params())
def test_a_model_that_is_saved_between_two_syncs_is_named_once(kind: str) -> None:
    for found in SAVES[kind]:
        told = {moment for moment, count in found.items() if count}
        assert told == (set() if kind == "no spread" else {"between"})
        assert found["between"] <= 1


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
    other = Trainer(rank, auto_lr=False, total_steps=20)
    with Logged() as texts:
        other.scheduler.load_state_dict(states[0])
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


def _moved(rank: int) -> list[dict[str, Any]]:
    """Return two runs: the model is converted before, and after, optimizer and scheduler are built."""
    found = []
    for later in (False, True):
        model = network()
        if not later:
            model.double()
        optimizer = hk.FusedAdamW(model.parameters(), lr=0.01)
        scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 16, sync_every=4)
        if later:
            model.double()
        trained = DistributedDataParallel(model)
        for step in range(16):
            x, y = batch(rank, step)
            loss = loss_of(trained, x.double(), y.double())
            loss.backward()
            optimizer.step()
            scheduler.step(loss)
            optimizer.zero_grad()
        records = [{**record.to_dict(), "seconds": 0} for record in scheduler.history]
        found.append({"params": [param.detach() for param in model.parameters()], "history": records})
    return found


def test_a_model_that_is_converted_before_the_first_step_is_followed() -> None:
    """As by Accelerate's prepare(), which moves the model of an optimizer to its device."""
    for before, after in run_ranks(2, _moved):
        assert before["params"][0].dtype == torch.float64
        assert same(before, after)
