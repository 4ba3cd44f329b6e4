"""Steps of a cycle in one process: losses, the end of the run, and errors that change nothing."""

from __future__ import annotations

import gc
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import Adam

import hdet_kernels as hk
from tests.schedule.cases import Place, adam, advance, groups_of, parameters


def test_the_last_step_averages_and_no_step_follows() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, sync_every=4)
    for _ in range(10):
        advance(optimizer, scheduler, 1.0)
    assert [(r.step, r.kind) for r in scheduler.history] == [(4, "sync"), (8, "sync"), (10, "last")]
    before = groups_of(optimizer), scheduler.last_epoch
    with pytest.raises(ValueError, match="step 11 is past the end: total_steps is 10"):
        scheduler.step(1.0)
    assert (groups_of(optimizer), scheduler.last_epoch) == before


def test_recorded_losses_are_averaged_over_the_cycle() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, sync_every=2)
    for losses in [
        (1.0, 2.0),
        (torch.tensor(3.0), torch.tensor([4.0], requires_grad=True)),
        (10.0,),
        (np.float32(20.0),),
    ]:
        for loss in losses:
            scheduler.record_loss(loss)
        advance(optimizer, scheduler)
    assert [r.losses for r in scheduler.history] == [[2.5], [15.0]]


def test_a_missing_loss_raises_and_changes_nothing() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10)
    before = groups_of(optimizer)
    with pytest.raises(RuntimeError, match=r"scheduler\.step\(loss\).*record_loss.*auto_lr=False"):
        advance(optimizer, scheduler)
    assert groups_of(optimizer) == before
    assert scheduler.last_epoch == 0
    scheduler.step(1.0)
    assert scheduler.last_epoch == 1


@pytest.mark.parametrize(
    "options", [{"auto_lr": False}, {"spread": 0}, {"probe": lambda: 1.0}, {"auto_lr": hk.HypergradientController()}],
    ids=["off", "no-spread", "probe", "hypergradient"],
)  # fmt: skip
def test_no_loss_is_needed_if_nothing_reads_it(options: dict[str, Any]) -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, **options)
    for _ in range(10):
        advance(optimizer, scheduler)
    assert scheduler.last_epoch == 10


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (torch.ones(3), ValueError),
        (torch.ones(1, dtype=torch.complex64), TypeError),
        ("1.0", TypeError),
        ([1.0], TypeError),
    ],
    ids=["vector", "complex", "text", "list"],
)
def test_a_loss_that_is_not_a_scalar_raises_and_changes_nothing(loss: Any, error: type[Exception]) -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, sync_every=1)
    with pytest.raises(error, match="the loss must be"):
        scheduler.step(loss)
    assert scheduler.last_epoch == 0
    assert scheduler.cycle.window.count == 0
    assert not scheduler.history


def test_a_parameter_group_added_later_raises() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10)
    optimizer.add_param_group({"params": parameters((2,))})
    with pytest.raises(RuntimeError, match="2 parameter groups, the scheduler was built for 1"):
        scheduler.step(1.0)


def test_gradient_accumulation_and_gradscaler() -> None:
    """A skipped optimizer step is still a step of the schedule, as with torch's schedulers."""
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    param = optimizer.param_groups[0]["params"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(8):
            optimizer.zero_grad()
            for micro in range(3):
                loss = (param * (math.inf if step == 5 else 1.0)).sum()
                scaler.scale(loss / 3).backward()
                scheduler.record_loss(float(micro))
            before = param.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            assert torch.equal(param, before) == (step == 5)
    assert [(r.step, r.losses) for r in scheduler.history] == [(s, [1.0]) for s in (2, 4, 6, 8)]


def test_losses_stay_on_their_device_until_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between syncs no value of a tensor is read: .item(), .tolist(), bool() and float() would wait for a GPU."""
    optimizer = Adam(parameters(), lr=torch.tensor(0.1))
    without_early_syncs = hk.RegressionController(start_at=0.01)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 20, sync_every=10, auto_lr=without_early_syncs, ensemble=Place(4, 1))

    def forbidden(*_: Any) -> Any:
        raise AssertionError("a host sync between syncs")

    for _ in range(9):
        optimizer.step()
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
                patch.setattr(Tensor, name, forbidden)
            scheduler.step(torch.tensor(1.0))
    assert scheduler.cycle.window.count == 9


def test_schedule_and_cycle_stay_in_step_if_a_setter_raises() -> None:
    calls: list[float] = []

    def setter(value: float) -> None:
        calls.append(value)
        if len(calls) == 2:
            raise OSError("disk full")

    optimizer = adam()
    explore = [hk.Explore("x", base=1.0, apply=setter)]
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, sync_every=3, auto_lr=False, explore=explore)
    for step in range(1, 7):
        if step == 3:
            with pytest.raises(OSError, match="disk full"):
                advance(optimizer, scheduler)
        else:
            advance(optimizer, scheduler)
        assert (scheduler.last_epoch, scheduler.cycle.step) == (step, step)
    assert [r.step for r in scheduler.history] == [3, 6]


def test_a_deleted_scheduler_leaves_the_optimizer_alone() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10)
    state = optimizer.state_dict()
    del scheduler
    gc.collect()
    state["param_groups"][0]["lr"] = 0.77
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.77


def test_cycles_are_numbered_from_zero() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, sync_every=4, auto_lr=False)
    numbers = []
    for _ in range(10):
        numbers.append(scheduler.cycle.number)
        advance(optimizer, scheduler)
    assert numbers == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_the_first_step_of_the_optimizer_starts_the_cycle() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, auto_lr=False)
    assert not scheduler.cycle.started
    optimizer.step()
    assert scheduler.cycle.started


def test_consensus_is_marked_and_unmarked() -> None:
    scheduler = hk.HDETOneCycleLR(adam(), 0.1, 10, auto_lr=False)
    with scheduler.consensus():
        assert scheduler.cycle.in_consensus
        with pytest.raises(RuntimeError, match=r"scheduler.step\(\) inside scheduler.consensus\(\)"):
            scheduler.step()
    assert not scheduler.cycle.in_consensus
    with pytest.raises(ZeroDivisionError), scheduler.consensus():
        raise ZeroDivisionError
    assert not scheduler.cycle.in_consensus


def test_best_of_replicas_needs_losses() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, auto_lr=False, averaging=hk.Averaging(merge="best"))
    with pytest.raises(RuntimeError, match=r"merge='best' .* none was recorded: .*scheduler.step\(loss\).*probe="):
        advance(optimizer, scheduler)
