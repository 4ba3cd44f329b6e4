"""Callbacks after every sync: which records they get, when, and what happens where one raises."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import hdet_kernels as hk
from hdet_kernels.schedule.history import SyncRecord
from tests.ranks import run_ranks
from tests.schedule.cases import adam, advance
from tests.schedule.scout_runs import PHASE, ROUNDS, StackRun
from tests.schedule.undo_runs import Scripted, script
from tests.training import Trainer, same


def _told(rank: int) -> dict[str, Any]:
    """Return the records that callbacks got in runs of every kind, and how the run looked then."""
    found: dict[str, Any] = {}
    kinds: dict[str, dict[str, Any]] = {
        "shared": {"total_steps": 40, "ddp": True},
        "local, ends between syncs": {"total_steps": 10, "auto_lr": False},
        "overlap": {"auto_lr": False, "overlap_steps": 3},
        "undone": {"auto_lr": Scripted(script(s4="sound", s8="broken"), last=99)},
    }
    for name, options in kinds.items():
        trainer = Trainer(rank, **{"ddp": False, **options})
        told: list[SyncRecord] = []
        states: list[tuple[Any, Any]] = []
        first: list[int] = []
        scheduler = trainer.scheduler
        scheduler.on_sync(told.append)
        scheduler.on_sync(lambda record, first=first: first.append(record.step), every_process=False)
        scheduler.on_sync(
            lambda record, states=states, scheduler=scheduler: states.append(copy.deepcopy(scheduler.state_dict()))
        )
        after: list[Any] = []
        for _ in range(10):
            trainer.train(1)
            after += [copy.deepcopy(scheduler.state_dict())] * (len(states) - len(after))
        scheduler.converge()
        found[name] = {
            "told": [record.to_dict() for record in told],
            "history": [record.to_dict() for record in scheduler.history],
            "first": first,
            "consistent": same(states[: len(after)], after),
        }
    return found


def test_every_sync_of_every_kind_is_told_in_every_process_once_the_state_is_consistent() -> None:
    results = run_ranks(2, _told)
    for found in results:
        for name, case in found.items():
            assert same(case["told"], case["history"]), name
            assert case["consistent"], f"{name}: the state in a callback is that after step()"
    for name, case in results[0].items():
        assert case["first"] == [record["step"] for record in case["told"]], name
        assert results[1][name]["first"] == [], "in the first process alone"
    first = results[0]
    assert [record["kind"] for record in first["local, ends between syncs"]["told"]] == [
        "sync",
        "sync",
        "last",
        "manual",
    ]
    assert [(r["step"], r["landed"]) for r in first["overlap"]["told"]] == [(4, 7), (8, 10), (10, 10)]
    assert [record["undone"] for record in first["undone"]["told"]] == [None, 4, None]


def test_scouting_rounds_are_told_and_callbacks_outlive_them() -> None:
    run = StackRun()
    told: list[SyncRecord] = []
    found: list[float | None] = []
    run.scheduler.on_sync(told.append)
    run.scheduler.on_sync(lambda _: found.append(run.scheduler.scouted))
    run.train(PHASE)
    assert [(record.kind, record.step) for record in told] == [("scout", ROUNDS[0]), ("scout", PHASE)]
    assert found == [None, run.scheduler.scouted], "when the last round is told, the run is in place"
    assert found[-1] is not None
    run.train(run.scheduler.sync_every)
    assert told == run.scheduler.history
    assert told[-1].kind == "sync"


@pytest.fixture
def run() -> tuple[torch.optim.Adam, hk.HDETOneCycleLR]:
    optimizer = adam()
    return optimizer, hk.HDETOneCycleLR(optimizer, 0.1, 20, sync_every=2, auto_lr=False)


def test_a_handle_removes_its_callback_alone(run: tuple[Any, hk.HDETOneCycleLR]) -> None:
    optimizer, scheduler = run
    steps: list[list[int]] = [[], []]
    handles = [scheduler.on_sync(lambda record, own=own: own.append(record.step)) for own in steps]
    for _ in range(2):
        advance(optimizer, scheduler, 1.0)
    handles[0].remove()
    handles[0].remove()
    for _ in range(2):
        advance(optimizer, scheduler, 1.0)
    assert steps == [[2], [2, 4]]


def test_an_exception_comes_after_the_sync_is_complete_and_training_can_go_on(
    run: tuple[Any, hk.HDETOneCycleLR],
) -> None:
    optimizer, scheduler = run
    calm = adam()
    other = hk.HDETOneCycleLR(calm, 0.1, 20, sync_every=2, auto_lr=False)
    later: list[int] = []

    def fails(record: SyncRecord) -> None:
        raise ZeroDivisionError(f"at {record.step}")

    handles = [scheduler.on_sync(fails), scheduler.on_sync(lambda record: later.append(record.step))]
    advance(optimizer, scheduler, 1.0)
    with pytest.raises(ZeroDivisionError, match="at 2"):
        advance(optimizer, scheduler, 1.0)
    assert later == [2], "those behind it are called too"
    with pytest.raises(ZeroDivisionError, match="at 2"):
        scheduler.converge()
    scheduler.on_sync(fails)
    advance(optimizer, scheduler, 1.0)
    with pytest.raises(ExceptionGroup, match="several callbacks") as several:
        advance(optimizer, scheduler, 1.0)
    assert len(several.value.exceptions) == 2
    handles[0].remove()
    for step in range(4):
        advance(calm, other, 1.0)
        if step == 1:
            other.converge()
    untimed = [[{**record.to_dict(), "seconds": 0} for record in each.history] for each in (scheduler, other)]
    assert same(*untimed), "the run is as if no callback had raised"
    assert scheduler.get_last_lr() == other.get_last_lr()
    assert same(optimizer.state_dict(), calm.state_dict())


@pytest.mark.parametrize("method", ["step", "converge"])
def test_a_callback_cannot_sync_again(run: tuple[Any, hk.HDETOneCycleLR], method: str) -> None:
    optimizer, scheduler = run
    scheduler.on_sync(lambda _: getattr(scheduler, method)())
    with pytest.raises(RuntimeError, match=rf"scheduler.{method}\(\) inside a callback of on_sync"):
        scheduler.converge()
    advance(optimizer, scheduler, 1.0)
    assert scheduler.last_epoch == 1


def test_callbacks_are_no_part_of_a_checkpoint(run: tuple[Any, hk.HDETOneCycleLR]) -> None:
    optimizer, scheduler = run
    before = scheduler.state_dict().keys()
    told: list[int] = []
    scheduler.on_sync(lambda record: told.append(record.step))
    assert scheduler.state_dict().keys() == before
    for _ in range(2):
        advance(optimizer, scheduler, 1.0)
    state = scheduler.state_dict()
    scheduler.load_state_dict(state)
    assert told == [2], "records of a checkpoint are not told again"
    for _ in range(2):
        advance(optimizer, scheduler, 1.0)
    assert told == [2, 4]


def test_a_wrapped_schedule_tells_too() -> None:
    optimizer = adam()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scheduler = hk.HDETScheduler(cosine, sync_every=5, auto_lr=False)
    told: list[SyncRecord] = []
    scheduler.on_sync(told.append)
    for _ in range(10):
        advance(optimizer, scheduler, 1.0)
    assert told == scheduler.history
    assert scheduler.metrics()["hdet/base/lr"] == pytest.approx(0.0, abs=1e-12)


def test_what_is_no_callback_is_refused(run: tuple[Any, hk.HDETOneCycleLR]) -> None:
    _, scheduler = run
    with pytest.raises(TypeError, match=r"callback must be callable as callback\(record\)"):
        scheduler.on_sync("print")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every_process must be True or False, got 'no'"):
        scheduler.on_sync(print, every_process="no")  # type: ignore[arg-type]
    assert not math.isnan(scheduler.metrics()["hdet/base/lr"])
