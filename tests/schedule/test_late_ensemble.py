"""A scheduler that is built before the process group, and the naming of a single replica."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import hdet_kernels as hk
from hdet_kernels.ensemble import SingleReplica
from hdet_kernels.schedule.guards import LateEnsemble
from tests.ranks import Group, run_ranks
from tests.schedule.cases import Place, adam, advance
from tests.schedule.scout_runs import PHASE, QUICK, STEPS
from tests.schedule.undo_runs import Scripted
from tests.training import batch, loss_of, network, same

STEPPED = 12


def one_cycle(optimizer: Any, model: Any = None) -> Any:
    return hk.HDETOneCycleLR(optimizer, 0.01, STEPPED, sync_every=4)


def wrapped(optimizer: Any, model: Any = None) -> Any:
    return hk.HDETScheduler(
        lr_scheduler.CosineAnnealingLR(optimizer, STEPPED), sync_every=4, averaging=hk.Averaging(outer=hk.Outer())
    )


def exploring(optimizer: Any, model: Any = None) -> Any:
    explore = [hk.Explore("weight_decay", spread=0.5)]
    return hk.HDETOneCycleLR(optimizer, 0.01, STEPPED, sync_every=4, explore=explore, probe=lambda: 1.0)


def published(optimizer: Any, model: Any = None) -> Any:
    return hk.compat.OneCycleAutoLR(
        optimizer, 0.01, STEPPED, ensemble_lr_spread_ratio=0.3, model_sync_interval=4, auto_lr_warmup_steps=2,
        enable_auto_lr=True,
    )  # fmt: skip


def undone(optimizer: Any, model: Any = None) -> Any:
    """The run begins anew after its first sync, from the buffers that the model had before there was a group."""
    return hk.HDETOneCycleLR(optimizer, 0.01, STEPPED, sync_every=4, model=model, auto_lr=Scripted((4,)))


def scouting(optimizer: Any, model: Any = None) -> Any:
    return hk.HDETOneCycleLR(optimizer, None, STEPS, sync_every=4, scout=QUICK, model=model)


def _trained(
    group: Group, make: Callable[..., Any], schedule: Callable[..., Any], late: bool, ddp: bool, steps: int
) -> Any:
    if not late:
        group.begin()
    module = network(batch_norm=True)
    optimizer = make(module.parameters(), lr=0.01)
    scheduler = schedule(optimizer, module)
    built = scheduler._cycle.ensemble.size
    if late:
        group.begin()
    model: nn.Module = DistributedDataParallel(module) if ddp else module
    rates, losses = [], []
    for step in range(steps):
        x, y = batch(group.rank, step)
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        losses.append(float(loss.detach()))
        scheduler.step(loss)
    history = [{**record.to_dict(), "seconds": 0} for record in scheduler.history]
    state = copy.deepcopy(module.state_dict())
    found = [state, rates, losses, history, scheduler.get_last_lr(), getattr(scheduler, "scouted", None)]
    size, replica = scheduler.cycle.ensemble.size, scheduler.cycle.ensemble.replica
    # DDP lets go of the group first. As its last holder it would free it with the interpreter's lock held, for which a
    # thread of gloo may be waiting.
    del model
    group.end()
    return built, size, replica, found


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool, int]] = {
    "one cycle, shared": (torch.optim.AdamW, one_cycle, True, STEPPED),
    "one cycle, fused, local": (hk.FusedAdamW, one_cycle, False, STEPPED),
    "wrapped": (torch.optim.AdamW, wrapped, False, STEPPED),
    "explored": (hk.FusedAdamW, exploring, False, STEPPED),
    "published": (torch.optim.AdamW, published, True, STEPPED),
    "undone": (torch.optim.AdamW, undone, False, STEPPED),
    "without a learning rate": (hk.FusedAdamW, scouting, False, PHASE + 8),
}


def _ranks(rank: int, folder: Path) -> dict[str, Any]:
    group = Group(rank, folder)
    group.end()
    found: dict[str, Any] = {}
    for name, (make, schedule, ddp, steps) in CASES.items():
        os.environ["WORLD_SIZE"] = "2"
        found[name] = [_trained(group, make, schedule, late, ddp, steps) for late in (False, True)]
    found["loaded"] = _loaded(group)
    found["refused"] = _refused(group)
    return found


def _loaded(group: Group) -> list[Any]:
    """Save in the middle of a cycle, and load into a scheduler that was built before the group."""
    group.begin()
    optimizer = adam()
    scheduler = one_cycle(optimizer)
    for _ in range(6):
        advance(optimizer, scheduler, 1.0 + group.rank)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    expected = [optimizer.param_groups[0]["lr"], scheduler.cycle.made, len(scheduler.history)]
    group.end()
    later = adam()
    resumed = one_cycle(later)
    group.begin()
    later.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    found = [later.param_groups[0]["lr"], resumed.cycle.made, len(resumed.history)]
    group.end()
    return [expected, found]


def _refused(group: Group) -> dict[str, str]:
    messages = {}

    def note(name: str, call: Callable[[], object]) -> None:
        with pytest.raises(RuntimeError) as error:
            call()
        messages[name] = str(error.value)

    optimizer = adam()
    for name, use in {
        "optimizer.step": lambda _: optimizer.step(),
        "scheduler.step": lambda s: s.step(1.0),
        "record_loss": lambda s: s.record_loss(1.0),
        "converge": lambda s: s.converge(),
        "consensus": lambda s: s.consensus(),
        "load_state_dict": lambda s: s.load_state_dict(s.state_dict()),
    }.items():
        scheduler = one_cycle(optimizer)
        note(name, lambda use=use, scheduler=scheduler: use(scheduler))  # type: ignore[misc]
    del os.environ["WORLD_SIZE"]
    scheduler = one_cycle(optimizer)
    advance(optimizer, scheduler, 1.0)
    group.begin()
    note("too late", lambda: scheduler.step(1.0))
    alone = hk.HDETOneCycleLR(optimizer, 0.01, STEPPED, sync_every=4, ensemble=SingleReplica())
    advance(optimizer, alone, 1.0)
    group.end()
    return messages


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, _ranks, tmp_path_factory.mktemp("group"))


@pytest.mark.parametrize("case", CASES)
def test_a_group_that_comes_before_the_first_step_is_taken(ranks: list[dict[str, Any]], case: str) -> None:
    for rank, found in enumerate(ranks):
        (early, *at_once, expected), (late, *taken, result) = found[case]
        assert (early, late) == (2, 1)
        assert at_once == taken == [2, rank]
        assert same(expected, result), "bit for bit as if the scheduler had been built after the group"
    assert ranks[0][case][1][3][1] != ranks[1][case][1][3][1], "learning rates differ between the replicas"


def test_a_checkpoint_is_loaded_for_the_processes_that_came(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        expected, result = found["loaded"]
        assert result == expected


def test_a_group_that_is_announced_and_does_not_come_raises(ranks: list[dict[str, Any]]) -> None:
    messages = ranks[0]["refused"]
    assert len(messages) == 7
    too_late = messages.pop("too late")
    for message in messages.values():
        assert "WORLD_SIZE is 2 in the environment, but no process group is initialised" in message
        assert "call torch.distributed.init_process_group() before the first step, or pass ensemble=" in message
    assert "a process group of 2 processes was initialised after the scheduler was first used" in too_late


def test_given_replicas_are_never_replaced() -> None:
    assert not LateEnsemble(SingleReplica(), SingleReplica()).open
    assert not LateEnsemble(None, Place(4)).open
    assert LateEnsemble(None, SingleReplica()).open


@pytest.mark.parametrize("given", [None, SingleReplica()], ids=["found", "given"])
def test_a_single_replica_is_named_once(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 100, ensemble=given)
    assert ("one replica" in caplog.text) is (given is not None), "a group may still come"
    for _ in range(3):
        advance(optimizer, scheduler, 1.0)
    assert caplog.text.count("one replica: plain OneCycleLR, nothing is fanned out or averaged") == 1
    assert "no sync falls" not in caplog.text
    assert len(caplog.records) == 1
    assert caplog.records[0].levelname == "WARNING"


@pytest.mark.parametrize("options", [{"spread": 0.0}, {"auto_lr": hk.HypergradientController()}], ids=str)
def test_one_replica_that_needs_no_others_is_no_warning(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = adam()
    with caplog.at_level("INFO", logger="hdet_kernels"):
        advance(optimizer, hk.HDETOneCycleLR(optimizer, 0.1, 100, **options), 1.0)
    (record,) = [record for record in caplog.records if "one replica" in record.message]
    assert record.levelname == "INFO"
    assert ("HypergradientController moves the base" in record.message) is ("auto_lr" in options)


def test_a_failed_build_with_the_processes_leaves_the_scheduler_open(tmp_path: Path) -> None:
    assert all(run_ranks(2, _failed_build, tmp_path))


def _failed_build(rank: int, folder: Path) -> bool:
    """A setter that raises for the learning rates of several replicas."""
    group = Group(rank, folder)
    group.end()
    values: list[float] = []

    def setter(value: float) -> None:
        if value != 1.0 and len(values) < 3:
            values.append(value)
            raise OSError("the setter cannot")

    optimizer = adam()
    explore = [hk.Explore("x", base=1.0, apply=setter, spread=0.5)]
    scheduler = hk.HDETOneCycleLR(optimizer, 0.01, STEPPED, sync_every=4, explore=explore, auto_lr=False)
    before = optimizer.param_groups[0]["lr"]
    group.begin()
    for _ in range(3):
        with pytest.raises(OSError, match="the setter cannot"):
            advance(optimizer, scheduler, 1.0)
        assert optimizer.param_groups[0]["lr"] == before
    advance(optimizer, scheduler, 1.0)
    return bool(scheduler.cycle.ensemble.size == 2)
