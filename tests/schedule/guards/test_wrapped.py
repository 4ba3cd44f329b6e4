"""Optimizers in wrappers: Accelerate's own, hand-written ones, chains of them, and what is none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import hdet_kernels as hk
from hdet_kernels.schedule import release
from hdet_kernels.schedule.attachment import outermost, unwrapped
from tests.schedule.cases import Place, adam, groups_of, parameters
from tests.training import same


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
    release(optimizer)
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
    "None": None,
    "a number": 0.1,
    "a module": nn.Linear(1, 1),
    "parameters": [Tensor()],
    "a class": torch.optim.SGD,
    "a scheduler": lr_scheduler.ConstantLR(adam()),
    "a trainer": Trainer(),
    "a wrapper around nothing": Wrapper(None),
    "a wrapper around nonsense": Wrapper("sgd"),
}


@pytest.mark.parametrize("given", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_raises_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got"):
        hk.HDETOneCycleLR(given, 0.1, 10)
