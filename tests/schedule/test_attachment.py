"""One scheduler for an optimizer at a time: hooks, and the values that the user gave."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import hdet_kernels as hk
from hdet_kernels.schedule import release
from tests.schedule.cases import Place, adam, advance, groups_of

EXPLORE = [hk.Explore("weight_decay", spread=0.5)]


def one_cycle(optimizer: Any, **options: Any) -> hk.HDETOneCycleLR:
    return hk.HDETOneCycleLR(optimizer, 0.1, 20, ensemble=Place(4, 2), auto_lr=False, **options)


def cosine(optimizer: Any) -> hk.HDETScheduler:
    base = lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return hk.HDETScheduler(base, ensemble=Place(4, 2), auto_lr=False, sync_every=5)


def hooks(optimizer: torch.optim.Optimizer) -> int:
    steps = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return steps + len(optimizer._optimizer_load_state_dict_post_hooks)


@pytest.mark.parametrize("keep", [True, False], ids=["replaced", "collected"])
def test_many_schedulers_leave_the_hooks_of_one(keep: bool) -> None:
    optimizer = adam()
    kept = []
    for _ in range(50):
        scheduler = one_cycle(optimizer)
        kept.append(scheduler if keep else None)
    assert hooks(optimizer) == 3
    del scheduler
    kept.clear()
    gc.collect()
    assert hooks(optimizer) == 0


def test_a_second_scheduler_explores_around_the_users_values() -> None:
    optimizer = adam(weight_decay=0.3)
    first = one_cycle(optimizer, explore=EXPLORE)
    for _ in range(7):
        advance(optimizer, first, 1.0)
    assert optimizer.param_groups[0]["weight_decay"] != 0.3
    fresh = adam(weight_decay=0.3)
    expected = one_cycle(fresh, explore=EXPLORE)
    second = one_cycle(optimizer, explore=EXPLORE)
    assert groups_of(optimizer) == groups_of(fresh)
    assert second.cycle.spread.config() == expected.cycle.spread.config()
    third = one_cycle(optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == 0.3, "it is not explored any more"
    assert third.get_base_lr() == expected.get_base_lr()


def test_a_value_that_the_user_gave_in_between_is_the_new_base() -> None:
    optimizer = adam(weight_decay=0.3)
    one_cycle(optimizer, explore=EXPLORE)
    optimizer.param_groups[0]["weight_decay"] = 0.7
    second = one_cycle(optimizer, explore=EXPLORE)
    assert second.cycle.spread.config()[1]["base"] == 0.7


def test_the_first_scheduler_refuses_to_step() -> None:
    optimizer = adam()
    first, second = one_cycle(optimizer), one_cycle(optimizer)
    advance(optimizer, second, 1.0)
    before = groups_of(optimizer)
    with pytest.raises(RuntimeError, match="has another HDET scheduler now"):
        first.step(1.0)
    assert groups_of(optimizer) == before


def test_a_refused_second_scheduler_leaves_the_first() -> None:
    optimizer = adam(weight_decay=0.3)
    first = one_cycle(optimizer, explore=EXPLORE)
    before = groups_of(optimizer)
    with pytest.raises(ValueError, match="sync_every"):
        one_cycle(optimizer, sync_every=-1)
    assert groups_of(optimizer) == before
    assert hooks(optimizer) == 3
    advance(optimizer, first, 1.0)


def test_a_schedule_built_on_spread_learning_rates_is_refused_until_they_are_released() -> None:
    optimizer = adam()
    first = cosine(optimizer)
    assert optimizer.param_groups[0]["lr"] != 0.1
    with pytest.raises(ValueError, match=r"Call hdet_kernels\.schedule\.release\(optimizer\) before you build"):
        cosine(optimizer)
    release(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    second = cosine(optimizer)
    assert second.get_base_lr() == [0.1]
    with pytest.raises(RuntimeError, match="was released from this one"):
        first.step(1.0)


def test_the_same_schedule_can_be_wrapped_again() -> None:
    optimizer = adam()
    first = cosine(optimizer)
    for _ in range(3):
        advance(optimizer, first, 1.0)
    base = first.get_base_lr()
    second = hk.HDETScheduler(first.base_scheduler, ensemble=Place(4, 2), auto_lr=False, sync_every=5)
    assert second.get_base_lr() == base


def test_a_stack_has_its_values_back() -> None:
    stack = hk.ReplicaStack(torch.nn.Linear(2, 1), 2)
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.1, weight_decay=0.3)
    before = groups_of(optimizer)
    hk.HDETOneCycleLR(optimizer, 0.1, 20, ensemble=stack.ensemble, explore=EXPLORE)
    release(optimizer)
    (group,) = groups_of(optimizer)
    assert "per_replica" not in group
    assert group["weight_decay"] == before[0]["weight_decay"]
    release(optimizer)
