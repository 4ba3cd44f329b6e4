"""A torch scheduler beside an HDET scheduler: both write the learning rates, which is said, and nothing else is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules

import hdet_kernels as hk
from tests.schedule.cases import Place, adam, advance
from tests.schedule.scout_runs import PHASE, StackRun

RIVALS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda optimizer: schedules.StepLR(optimizer, 2),
    "CosineAnnealingLR": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 20),
    "LambdaLR": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: schedules.OneCycleLR(optimizer, 0.5, 20),
}


def one_cycle(optimizer: Optimizer) -> hk.HDETOneCycleLR:
    return hk.HDETOneCycleLR(optimizer, 0.1, 20, sync_every=5, ensemble=Place(2), auto_lr=False)


def wrapped(base: schedules.LRScheduler) -> hk.HDETScheduler:
    return hk.HDETScheduler(base, sync_every=5, ensemble=Place(2), auto_lr=False)


@pytest.mark.parametrize("order", ["before", "after"], ids=["built before", "built after"])
@pytest.mark.parametrize("stepped", ["first", "last"], ids=["stepped first", "stepped last"])
@pytest.mark.parametrize("name", RIVALS)
def test_a_scheduler_beside_it_is_named_once(name: str, order: str, stepped: str, caplog: Any) -> None:
    optimizer = adam()
    rival = RIVALS[name](optimizer) if order == "before" else None
    scheduler = one_cycle(optimizer)
    rival = RIVALS[name](optimizer) if rival is None else rival
    for _ in range(6):
        advance(optimizer, rival if stepped == "first" else scheduler)
        (scheduler if stepped == "first" else rival).step()
    said = [record.getMessage() for record in caplog.records if "writes them too" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"{name} wrote the learning rates")
    assert "hk.HDETScheduler(base_scheduler)" in said[0]


def _restarted(optimizer: Optimizer) -> Any:
    old = one_cycle(optimizer)
    for _ in range(3):
        advance(optimizer, old)
    return old, one_cycle(optimizer)


def _sequential(optimizer: Optimizer) -> schedules.LRScheduler:
    parts = [schedules.LinearLR(optimizer, total_iters=3), schedules.CosineAnnealingLR(optimizer, 17)]
    return schedules.SequentialLR(optimizer, parts, milestones=[3])


QUIET: dict[str, Callable[[Optimizer], Any]] = {
    "alone": one_cycle,
    "wrapped": lambda optimizer: wrapped(schedules.CosineAnnealingLR(optimizer, 20)),
    "warm restarts": lambda optimizer: wrapped(schedules.CosineAnnealingWarmRestarts(optimizer, 4)),
    "a sequence": lambda optimizer: wrapped(_sequential(optimizer)),
    "chained": lambda optimizer: wrapped(
        schedules.ChainedScheduler([schedules.ConstantLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)])
    ),
    "built again": _restarted,
    "one that is never stepped": lambda optimizer: (schedules.StepLR(optimizer, 2), one_cycle(optimizer)),
}


@pytest.mark.parametrize("by_hand", [False, True], ids=["", "learning rates by hand"])
@pytest.mark.parametrize("name", QUIET)
def test_no_other_message(name: str, by_hand: bool, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    optimizer = adam()
    built = QUIET[name](optimizer)
    scheduler = built[-1] if isinstance(built, tuple) else built
    for _ in range(8):
        advance(optimizer, scheduler, 1.0)
        if by_hand:
            optimizer.param_groups[0]["lr"] *= 0.9
    assert not [record for record in caplog.records if "writes them too" in record.getMessage()]


def test_a_loaded_optimizer_is_no_rival(caplog: Any) -> None:
    optimizer = adam()
    base = schedules.CosineAnnealingLR(optimizer, 20)
    scheduler = wrapped(base)
    saved = [optimizer.state_dict(), scheduler.state_dict()]
    for _ in range(3):
        advance(optimizer, scheduler)
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    advance(optimizer, scheduler)
    assert not [record for record in caplog.records if "writes them too" in record.getMessage()]


def test_the_miniatures_of_a_search_are_no_rivals(caplog: Any) -> None:
    StackRun().train(PHASE + 3)
    assert not [record for record in caplog.records if "writes them too" in record.getMessage()]


def test_tensors_as_learning_rates(caplog: Any) -> None:
    optimizer = adam(lr=torch.tensor(0.1))
    scheduler = one_cycle(optimizer)
    rival = schedules.ExponentialLR(optimizer, 0.9)
    for _ in range(3):
        advance(optimizer, scheduler)
        rival.step()
    assert [record for record in caplog.records if "ExponentialLR wrote" in record.getMessage()]
