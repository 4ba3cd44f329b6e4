"""Steps of the scheduler against those of the optimizer: too many raise, too few are said, skipped ones may be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import hdet_kernels as hk
from hdet_kernels.schedule import guards
from hdet_kernels.schedule.guards import MOST_BEHIND, StepCount
from tests.ranks import Cases
from tests.schedule.cases import Place, adam
from tests.schedule.scout_runs import QUICK
from tests.training import Trainer

ONCE = r"rank 0: scheduler.step\(\) was called .*: call scheduler.step\(\) once after each optimizer.step\(\)"


def one_cycle(optimizer: Any, **options: Any) -> Any:
    return hk.HDETOneCycleLR(optimizer, 0.1, 400, ensemble=Place(2), **options)


def wrapped(optimizer: Any) -> Any:
    return hk.HDETScheduler(lr_scheduler.CosineAnnealingLR(optimizer, 400), ensemble=Place(2))


def scouting(optimizer: Any) -> Any:
    return hk.HDETOneCycleLR(optimizer, None, 400, ensemble=Place(2), scout=QUICK, probe=lambda: 1.0)


def backward(optimizer: Any, size: float = 1.0) -> None:
    """Make new gradients, as after ``zero_grad(set_to_none=True)``."""
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.full_like(param, size)


def train(optimizer: Any, scheduler: Any, *counts: int) -> None:
    """Take, before each step of the scheduler, so many of the optimizer."""
    for count in counts:
        for _ in range(count):
            backward(optimizer)
            optimizer.step()
        scheduler.step(1.0)


@pytest.mark.parametrize("schedule", [one_cycle, wrapped, scouting])
def test_a_second_scheduler_step_for_one_gradient_raises_at_once_and_changes_nothing(schedule: Any) -> None:
    optimizer = adam()
    scheduler = schedule(optimizer)
    backward(optimizer)
    if schedule is scouting:
        scheduler._phase.certain = True  # the replicas of Place have one gradient
    optimizer.step()
    scheduler.step(1.0)
    before = copy.deepcopy(scheduler.state_dict())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=ONCE):
            scheduler.step(1.0)
    assert str(scheduler.state_dict()) == str(before)
    train(optimizer, scheduler, 1, 1, 1)
    assert scheduler.last_epoch in (4, scheduler.cycle.step)


@pytest.mark.parametrize(("each", "most"), [(2, 24), (3, 24), (8, 32), (64, 3 * 64)])
def test_several_scheduler_steps_for_an_optimizer_step_raise_although_gradients_are_gone(each: int, most: int) -> None:
    optimizer = adam()
    scheduler = one_cycle(optimizer)

    def train() -> None:
        for _ in range(400 // each):
            backward(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(each):
                scheduler.step(1.0)

    with pytest.raises(RuntimeError, match=ONCE):
        train()
    assert scheduler.last_epoch <= most


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_grad_scaler_may_skip_steps(set_to_none: bool) -> None:
    """Gradients overflow ten times at the start, and every second time for a while later."""
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([param], lr=0.1)
    scheduler = one_cycle(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    made: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: made.append(True))
    for step in range(60):
        optimizer.zero_grad(set_to_none=set_to_none)
        size = 2.0 ** (10 + (min(max(step, 28), 40) - 28) // 2)
        scaler.scale((size * param).sum()).backward()
        scaler.step(optimizer)
        if len(made) == step:
            made.append(False)
        scaler.update()
        scheduler.step(1.0)
    assert made[:11] == [False] * 10 + [True]
    assert made[30:42] == [False, True] * 6
    assert sum(made) == 44
    assert scheduler.last_epoch == 60


def test_scheduler_steps_before_the_first_optimizer_step_and_without_any_pass() -> None:
    scheduler = one_cycle(adam(), auto_lr=False)
    for _ in range(100):
        scheduler.step()


@pytest.mark.parametrize(
    ("counts", "said"),
    [([MOST_BEHIND + 1] * 4, 1), ([2] * 4 * MOST_BEHIND, 1), ([2, 1, 1, 1, 1] * 40, 0)],
    ids=["epochs", "two each", "now and then"],
)
def test_optimizer_steps_without_scheduler_steps_are_said_once(
    counts: list[int], said: int, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = adam()
    train(optimizer, one_cycle(optimizer), *counts)
    assert caplog.text.count("once after each optimizer.step()") == said


def test_a_loaded_run_counts_anew() -> None:
    optimizer = adam()
    scheduler = one_cycle(optimizer)
    backward(optimizer)
    optimizer.step()
    scheduler.step(1.0)
    scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    scheduler.step(1.0)
    assert scheduler.last_epoch == 2


def test_steps_that_were_captured_in_a_graph_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays run no hooks. ``tests/optim/test_cuda_graphs.py`` has real ones."""
    optimizer = adam()
    scheduler = one_cycle(optimizer)
    backward(optimizer)
    monkeypatch.setattr(guards, "_capturing", lambda: True)
    optimizer.step()
    monkeypatch.undo()
    for _ in range(100):
        scheduler.step(1.0)
    assert not scheduler.cycle.steps.counts


GRADIENTS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "of inference mode": torch.inference_mode()(lambda: torch.ones(2)),
    "a subclass": lambda: nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_that_tell_nothing(gradient: Callable[[], Any]) -> None:
    class Holder:
        grad = gradient()

    steps, groups = StepCount(), [{"params": [Holder]}]
    steps.optimizer_stepped(groups)
    for _ in range(2):
        steps.check(0)
        steps.scheduler_stepped()


@pytest.mark.full
def test_a_compiled_step_runs_the_hooks_and_is_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounter

    param = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([param], lr=torch.tensor(0.1))
    scheduler = one_cycle(optimizer)
    counter = CompileCounter()
    step = torch.compile(lambda: optimizer.step(), backend=counter)
    for _ in range(20):
        param.grad = torch.ones(4)
        step()
        scheduler.step(1.0)
    assert scheduler.cycle.steps.counts
    assert counter.frame_count <= 3, "not once for every value of a counter"
    with pytest.raises(RuntimeError, match=ONCE):
        scheduler.step(1.0)


# One rank alone


def _too_often(rank: int, how: str) -> str | None:
    """Rank 1 calls ``scheduler.step()`` once too often in the first cycle."""
    trainer = Trainer(rank, ddp=False, auto_lr=False)
    extra = rank == 1
    try:
        trainer.train(2)
        if extra and how == "at once":
            trainer.scheduler.step(0.5)
        if how != "at once":
            trainer.optimizer.zero_grad()
        if extra and how == "after zero_grad":
            trainer.scheduler.step()
        if extra and how == "with a loss":
            trainer.scheduler.step(0.5)
        if how == "at once":
            return None
        trainer.train(2 - extra)
    except RuntimeError as error:
        return str(error)
    return None


TOO_OFTEN = Cases(2, _too_often, [("at once",), ("after zero_grad",), ("with a loss",)])


def test_a_scheduler_step_too_many_on_one_rank_names_it() -> None:
    first, second = TOO_OFTEN[("at once",)]
    assert first is None
    assert "rank 1: scheduler.step() was called 2 times after one optimizer.step(), with no new gradient" in str(second)


def test_one_without_a_gradient_and_a_loss_is_noticed_at_the_sync() -> None:
    for message in TOO_OFTEN[("after zero_grad",)]:
        assert (
            "the replicas disagree on the steps since the last sync (rank 0: optimizer steps 4, losses 4; rank 1: "
            "optimizer steps 3, losses 3): call scheduler.step() once after each optimizer.step(), on every rank"
        ) in str(message)


def test_one_that_may_be_an_overflow_is_no_error() -> None:
    """A GradScaler skips steps on one rank of local gradients, and a loss is recorded for them."""
    assert TOO_OFTEN[("with a loss",)] == [None, None]


def test_frozen_parameters_do_not_hide_a_second_step() -> None:
    frozen = [nn.Parameter(torch.ones(1), requires_grad=False) for _ in range(20)]
    optimizer = torch.optim.Adam([*frozen, weight := nn.Parameter(torch.ones(1))])
    scheduler = one_cycle(optimizer)
    weight.grad = torch.ones(1)
    optimizer.step()
    scheduler.step(1.0)
    with pytest.raises(RuntimeError, match=ONCE):
        scheduler.step(1.0)


def test_one_parameter_is_asked_for_its_gradient_after_it_was_found() -> None:
    """Else the time of a scheduler step after ``zero_grad()`` would grow with the number of tensors."""
    asked = []

    class Asked:
        present: torch.Tensor | None = None

        @property
        def grad(self) -> torch.Tensor | None:
            asked.append(self)
            return self.present

    params = [Asked() for _ in range(100)]
    steps = StepCount()
    for _ in range(3):
        params[-1].present = torch.ones(1)
        steps.optimizer_stepped([{"params": params}])
        asked.clear()
        params[-1].present = None
        steps.check(0)
        steps.scheduler_stepped()
        assert set(asked) <= {params[-1]}
    params[-1].present = torch.ones(1)
    steps.optimizer_stepped([{"params": params}])
    assert set(asked) == {params[-1]}
