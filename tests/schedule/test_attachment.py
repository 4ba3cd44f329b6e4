"""Schedulers and optimizers: one at a time, in wrappers, and as before if something raises."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import OneCycleLR

import hdet_kernels as hk
from hdet_kernels.module_hooks import weak_method
from hdet_kernels.schedule.attachment import outermost, untouched_on_error, unwrapped
from tests.schedule.cases import Place, adam, advance, groups_of, parameters
from tests.training import same

EXPLORE = [hk.Explore("weight_decay", spread=0.5)]


def attached(optimizer: Any, **options: Any) -> hk.HDETOneCycleLR:
    return hk.HDETOneCycleLR(optimizer, 0.1, 20, ensemble=Place(4, 2), auto_lr=False, **options)


def attached_cosine(optimizer: Any) -> hk.HDETScheduler:
    base = lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return hk.HDETScheduler(base, ensemble=Place(4, 2), auto_lr=False, sync_every=5)


def hooks(optimizer: torch.optim.Optimizer) -> int:
    steps = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return steps + len(optimizer._optimizer_load_state_dict_post_hooks)


def test_a_method_is_known_as_long_as_its_object_and_nothing_is_called_at_its_end() -> None:
    """The callback of a ``weakref.WeakMethod`` raised while an interpreter ended."""

    class Owner:
        def answer(self) -> int:
            return 7

    owner = Owner()
    found = weak_method(owner.answer)
    assert found()() == 7
    assert [reference.__callback__ for reference in weakref.getweakrefs(owner)] == [None]
    del owner
    assert found() is None


@pytest.mark.parametrize("keep", [True, False], ids=["replaced", "collected"])
def test_many_schedulers_leave_the_hooks_of_one(keep: bool) -> None:
    optimizer = adam()
    kept = []
    for _ in range(50):
        scheduler = attached(optimizer)
        kept.append(scheduler if keep else None)
    assert hooks(optimizer) == 3
    del scheduler
    kept.clear()
    gc.collect()
    assert hooks(optimizer) == 0


def test_a_second_scheduler_explores_around_the_users_values() -> None:
    optimizer = adam(weight_decay=0.3)
    first = attached(optimizer, explore=EXPLORE)
    for _ in range(7):
        advance(optimizer, first, 1.0)
    assert optimizer.param_groups[0]["weight_decay"] != 0.3
    fresh = adam(weight_decay=0.3)
    expected = attached(fresh, explore=EXPLORE)
    second = attached(optimizer, explore=EXPLORE)
    assert groups_of(optimizer) == groups_of(fresh)
    assert second.cycle.spread.config() == expected.cycle.spread.config()
    third = attached(optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == 0.3, "it is not explored any more"
    assert third.get_base_lr() == expected.get_base_lr()


def test_a_value_that_the_user_gave_in_between_is_the_new_base() -> None:
    optimizer = adam(weight_decay=0.3)
    attached(optimizer, explore=EXPLORE)
    optimizer.param_groups[0]["weight_decay"] = 0.7
    second = attached(optimizer, explore=EXPLORE)
    assert second.cycle.spread.config()[1]["base"] == 0.7


def test_the_first_scheduler_refuses_to_step() -> None:
    optimizer = adam()
    first, second = attached(optimizer), attached(optimizer)
    advance(optimizer, second, 1.0)
    before = groups_of(optimizer)
    with pytest.raises(RuntimeError, match="has another HDET scheduler now"):
        first.step(1.0)
    assert groups_of(optimizer) == before


def test_a_refused_second_scheduler_leaves_the_first() -> None:
    optimizer = adam(weight_decay=0.3)
    first = attached(optimizer, explore=EXPLORE)
    before = groups_of(optimizer)
    with pytest.raises(ValueError, match="sync_every"):
        attached(optimizer, sync_every=-1)
    assert groups_of(optimizer) == before
    assert hooks(optimizer) == 3
    advance(optimizer, first, 1.0)


def test_a_schedule_built_on_spread_learning_rates_is_refused_until_they_are_released() -> None:
    optimizer = adam()
    first = attached_cosine(optimizer)
    assert optimizer.param_groups[0]["lr"] != 0.1
    with pytest.raises(ValueError, match=r"Call hdet_kernels\.release\(optimizer\) before you build"):
        attached_cosine(optimizer)
    hk.release(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    second = attached_cosine(optimizer)
    assert second.get_base_lr() == [0.1]
    with pytest.raises(RuntimeError, match="was released from this one"):
        first.step(1.0)


def test_the_same_schedule_can_be_wrapped_again() -> None:
    optimizer = adam()
    first = attached_cosine(optimizer)
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
    hk.release(optimizer)
    (group,) = groups_of(optimizer)
    assert "per_replica" not in group
    assert group["weight_decay"] == before[0]["weight_decay"]
    hk.release(optimizer)


def _state(optimizer: Adam) -> Any:
    return groups_of(optimizer), "step" in vars(optimizer)


def _change(optimizer: Adam) -> None:
    OneCycleLR(optimizer, 0.3, total_steps=10)  # fills learning rates that are tensors, and wraps step()
    optimizer.param_groups[0]["extra"] = 1


def _change_and_raise(optimizer: Adam) -> None:
    before = _state(optimizer)
    _change(optimizer)
    assert all(now != then for now, then in zip(_state(optimizer), before, strict=True))
    raise ZeroDivisionError


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_groups_tensors_and_step_come_back(rate: Any) -> None:
    optimizer = Adam(parameters(), lr=rate)
    own, before = optimizer.param_groups[0]["lr"], _state(optimizer)
    with pytest.raises(ZeroDivisionError), untouched_on_error(optimizer):
        _change_and_raise(optimizer)
    assert _state(optimizer) == before
    assert optimizer.param_groups[0]["lr"] is own
    assert float(own) == pytest.approx(0.1)


def test_without_an_error_the_changes_stay() -> None:
    optimizer = Adam(parameters(), lr=0.1)
    with untouched_on_error(optimizer):
        _change(optimizer)
    assert optimizer.param_groups[0]["extra"] == 1


class Wrapper:
    """An optimizer by its methods alone, which torch's schedulers refuse."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class Subclass(Optimizer):
    """An optimizer for torch, without state or hooks of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)


@pytest.fixture(autouse=True)
def _no_accelerator_is_left() -> Iterator[None]:
    yield
    if "accelerate" in sys.modules:  # its state is one for the whole process
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def accelerated(optimizer: Optimizer) -> Any:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.optimizer import AcceleratedOptimizer

    accelerate.Accelerator(cpu=True)
    return AcceleratedOptimizer(optimizer)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "by its methods": Wrapper,
    "subclass": Subclass,
    "chain": lambda optimizer: Wrapper(Subclass(Wrapper(optimizer))),
    "accelerate": accelerated,
}


def one_cycle(optimizer: Any) -> Any:
    return hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=2, ensemble=Place(4, 2))


def cosine(optimizer: Any) -> Any:
    base = lr_scheduler.CosineAnnealingLR(outermost(optimizer), 8)
    return hk.HDETScheduler(base, sync_every=2, ensemble=Place(4, 2))


def trained(make: Callable[[Any], Any], schedule: Callable[[Any], Any], wrap: Callable[[Any], Any]) -> list[Any]:
    inner = make(parameters(), lr=0.1)
    optimizer = wrap(inner)
    scheduler = schedule(optimizer)
    for step in range(6):
        for param in inner.param_groups[0]["params"]:
            param.grad = torch.full_like(param, 0.1 * (step + 1))
        optimizer.step()
        scheduler.step(float(step))
    assert scheduler.cycle.optimizer is inner
    found = [p.detach().clone() for p in inner.param_groups[0]["params"]]
    return [found, groups_of(inner), scheduler.get_last_lr(), [r.base for r in scheduler.history]]


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("schedule", [one_cycle, cosine])
@pytest.mark.parametrize("make", [torch.optim.AdamW, hk.FusedAdamW])
def test_a_wrapped_optimizer_trains_as_the_bare_one(
    make: Callable[[Any], Any], schedule: Callable[[Any], Any], wrap: Callable[[Any], Any]
) -> None:
    assert same(trained(make, schedule, wrap), trained(make, schedule, lambda optimizer: optimizer))


@pytest.mark.parametrize("wrap", [Subclass, accelerated])
def test_the_scheduler_keeps_the_optimizer_that_it_was_given(wrap: Callable[[Any], Any]) -> None:
    inner = adam()
    optimizer = wrap(inner)
    scheduler = one_cycle(optimizer)
    assert scheduler.optimizer is optimizer
    assert len(inner._optimizer_step_pre_hooks) == 1, "the hooks are where the steps are made"
    hk.release(optimizer)
    assert not inner._optimizer_step_pre_hooks
    assert inner.param_groups[0]["lr"] == pytest.approx(0.1 / 25)


def test_a_wrapper_that_torch_refuses_is_taken_off() -> None:
    inner = adam()
    assert one_cycle(Wrapper(inner)).optimizer is inner


def test_a_refused_scheduler_leaves_a_wrapper_as_it_was() -> None:
    optimizer = Subclass(adam())
    before = groups_of(optimizer.optimizer), list(vars(optimizer))
    with pytest.raises(ValueError, match="pass cycle_momentum=False"):
        hk.HDETOneCycleLR(optimizer, 0.1, 8, explore=[hk.Explore("betas[0]")])
    assert (groups_of(optimizer.optimizer), list(vars(optimizer))) == before


def test_a_wrapper_with_groups_of_its_own_is_an_optimizer() -> None:
    class Own(torch.optim.SGD):
        optimizer = adam()

    optimizer = Own(parameters(), lr=0.1)
    assert unwrapped(optimizer) is optimizer


def test_a_wrapper_around_itself_ends() -> None:
    optimizer = adam()
    optimizer.optimizer = optimizer  # type: ignore[attr-defined]
    assert unwrapped(optimizer) is optimizer


class Trainer:
    """Has an optimizer, and is none."""

    optimizer = adam()


NONSENSE: dict[str, Any] = {
    "a module": nn.Linear(1, 1),
    "a scheduler": lr_scheduler.ConstantLR(adam()),
    "a trainer": Trainer(),
    "a wrapper around nothing": Wrapper(None),
    "a wrapper around nonsense": Wrapper("sgd"),
}


@pytest.mark.parametrize("given", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_raises_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match="optimizer"):
        hk.HDETOneCycleLR(given, 0.1, 10)
