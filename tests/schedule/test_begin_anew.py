"""The run that begins anew where training broke: its schedule, its steps and its data."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import hdet_kernels as hk
from hdet_kernels.controller.settings import SlopeSettings
from tests.ranks import run_ranks
from tests.schedule.scout_runs import PHASE, REPLICAS, STEPS, StackRun
from tests.schedule.undo_runs import OPTIMIZERS, Kind, Scripted, Trying, Undoable
from tests.training import same

#: A run of 9 steps, after 8 of 17, has every other learning rate of the schedule.
WHOLE, HALF = 17, 8


def halved(optimizer: Any) -> LambdaLR:
    """Return the schedule of a run that begins anew: every other learning rate of OneCycleLR, and half of each."""
    whole = OneCycleLR(SGD([nn.Parameter(torch.ones(1))], lr=1.0), 0.05, WHOLE, cycle_momentum=False)
    rates = [whole.get_last_lr()[0]]
    for _ in range(WHOLE):
        whole.optimizer.step()
        whole.step()
        rates.append(whole.get_last_lr()[0])
    return LambdaLR(optimizer, lambda step: 0.5 * rates[min(2 * step, WHOLE - 1)])


def _anew_and_fresh(rank: int, kind: Kind, optimizer: str) -> list[dict[str, Any]]:
    """Return what became of a run that began anew after 8 of 17 steps, and of one of 9 steps from the start.

    The second has the schedule of the rest and its data. Buffers are left out: those of the start are kept after the
    first forward pass, which is over before the first step.
    """
    broken: dict[str, Any] = {"auto_lr": Scripted((HALF,)), "total_steps": WHOLE, "sync_every": HALF}
    anew = Undoable(kind, optimizer, rank, **broken).train(HALF)
    options = {"auto_lr": Scripted(), "total_steps": WHOLE - HALF, "sync_every": HALF, "schedule": halved}
    fresh = Undoable(kind, optimizer, rank, first_batch=HALF, **options)
    found: list[dict[str, Any]] = []
    for run in (anew, fresh):
        rates = []
        for _ in range(WHOLE - HALF):
            rates.append(copy.deepcopy([run.optimizer.param_groups[0].get(key) for key in ("lr", "per_replica")]))
            run.train(1)
        records = [
            {key: record[key] for key in ("losses", "values", "base", "kind", "excluded", "gradients")}
            for record in run.history()[-2:]
        ]
        found.append({**run.everything(), "buffers": None, "rates": rates, "records": records})
    return found


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        pytest.param(kind, optimizer, marks=() if kind == "stack shared" and number in (0, 2) else pytest.mark.full)
        for kind in ("stack shared", "stack local")
        for number, optimizer in enumerate(list(OPTIMIZERS)[:4])
    ],
)
def test_a_run_that_begins_anew_is_one_over_the_steps_that_remain(kind: Kind, optimizer: str) -> None:
    anew, fresh = _anew_and_fresh(0, kind, optimizer)
    assert same(anew, fresh)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ranks shared", "ranks local"])
def test_ranks_that_begin_anew_are_a_run_over_the_steps_that_remain(kind: Kind) -> None:
    for anew, fresh in run_ranks(2, _anew_and_fresh, kind, "FusedAdamW"):
        assert same(anew, fresh)


LENGTH, AFTER = 60, 20


def breaking(schedule: Callable[[Any], Any] | None, **options: Any) -> Any:
    """Return a scheduler of two replicas in a stack, without a spread, whose training breaks after 20 of 60 steps."""
    stack = hk.ReplicaStack(nn.Linear(1, 1), 2, gradients="local")
    optimizer = hk.FusedSGD(stack.parameters(), lr=1.0, momentum=0.9)
    given = {"sync_every": 10, "auto_lr": Scripted((AFTER,), undo=1, last=LENGTH), "total_steps": LENGTH} | options
    given |= {"ensemble": stack.ensemble, "spread": 0.01}
    return (
        hk.HDETOneCycleLR(optimizer, 0.4, **given)
        if schedule is None
        else hk.HDETScheduler(schedule(optimizer), **given)
    )


def step(scheduler: Any) -> None:
    for group in scheduler.optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    scheduler.optimizer.step()
    scheduler.step(torch.ones(2))


def rates_of(scheduler: Any, steps: int = LENGTH, *, resumed_by: Callable[[], Any] | None = None) -> list[float]:
    """Return the learning rate of each step, without what the controller did, with a new scheduler for every step."""
    found = []
    for _ in range(steps):
        factor = scheduler.cycle.spread.controller_state["factors"][0]
        found.append(scheduler.get_base_lr()[0] / factor)
        assert scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(found[-1] * factor)
        step(scheduler)
        if resumed_by is not None:
            saved = copy.deepcopy([each.state_dict() for each in (scheduler.optimizer, scheduler)])
            scheduler = resumed_by()
            for part, each in zip((scheduler.optimizer, scheduler), saved, strict=True):
                part.load_state_dict(each)
    return found


def played(schedule: Callable[[Any], Any], steps: int) -> list[float]:
    """Return the learning rates of a schedule of torch."""
    scheduler, found = schedule(SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)), []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def one_cycle_over(steps: int) -> Callable[[Any], Any]:
    return lambda optimizer: OneCycleLR(optimizer, 0.4, steps)


def cosine_over(steps: int) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, steps - 1)


def warm_cosine_over(steps: int) -> Callable[[Any], Any]:
    def schedule(optimizer: Any) -> Any:
        climb = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=steps // 5)
        fall = lr_scheduler.CosineAnnealingLR(optimizer, steps - 1 - steps // 5)
        return lr_scheduler.SequentialLR(optimizer, [climb, fall], milestones=[steps // 5])

    return schedule


#: A schedule over a number of steps, by name, and how HDET is told of it.
SHAPES: dict[str, tuple[Callable[[int], Callable[[Any], Any]], bool]] = {
    "OneCycleLR": (one_cycle_over, True),
    "wrapped OneCycleLR": (one_cycle_over, False),
    "CosineAnnealingLR": (cosine_over, False),
    "SequentialLR": (warm_cosine_over, False),
    "ExponentialLR": (
        lambda steps: lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.05 ** (1 / steps)),
        False,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_schedule_begins_again_over_the_steps_that_remain(name: str) -> None:
    """At its first and last step it is where a schedule of that length is, and between them within one step of it."""
    shape, own = SHAPES[name]
    build = lambda: breaking(None if own else shape(LENGTH))  # noqa: E731
    scheduler = build()
    found = rates_of(scheduler)
    assert found[:AFTER] == pytest.approx(played(shape(LENGTH), AFTER))
    rest, whole = found[AFTER:], played(shape(LENGTH), LENGTH)
    assert [rest[0], rest[-1]] == pytest.approx([whole[0], whole[-1]])
    expected = played(shape(LENGTH - AFTER), LENGTH - AFTER)
    apart = max(abs(before - after) for before, after in itertools.pairwise(expected))
    assert max(abs(here - there) for here, there in zip(rest, expected, strict=True)) <= 1.01 * apart
    assert scheduler.last_epoch == LENGTH
    assert rates_of(build(), resumed_by=build) == found
    if "OneCycleLR" in name:
        with pytest.raises(ValueError, match=f"step {LENGTH + 1} is past the end: total_steps is {LENGTH}"):
            step(scheduler)


#: A trial of the first ten steps, which is no better. The steps of the schedule after that, over the 40 that remain.
TRIAL = 10
TRIED = Trying(doubted=(TRIAL,), no_better=(2 * TRIAL,), undo=2, last=LENGTH)
POSITIONS = [TRIAL + number * (LENGTH - 1 - TRIAL) / (LENGTH - 2 * TRIAL - 1) for number in range(LENGTH - 2 * TRIAL)]


def between(first: float, last: float, share: float) -> float:
    return last + (first - last) / 2 * (1 + math.cos(math.pi * share))


def one_cycle_at(position: float, first: float, peak: float, last: float) -> float:
    """Return a value of OneCycleLR over 60 steps, the equations of which are cosines to step 17 and to step 59."""
    return between(first, peak, position / 17) if position < 17 else between(peak, last, (position - 17) / 42)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("OneCycleLR", "CosineAnnealingLR") else pytest.mark.full)
        for name in SHAPES
    ],
)
def test_after_going_back_the_schedule_goes_on_over_the_steps_that_remain(name: str) -> None:
    shape, own = SHAPES[name]
    build = lambda: breaking(None if own else shape(LENGTH), auto_lr=TRIED)  # noqa: E731
    found, whole = rates_of(build()), played(shape(LENGTH), LENGTH)
    assert found[:TRIAL] == pytest.approx(whole[:TRIAL])
    assert found[TRIAL] == pytest.approx(whole[0])
    assert [found[2 * TRIAL], found[-1]] == pytest.approx([whole[TRIAL], whole[-1]])
    if "OneCycleLR" in name:
        expected = [one_cycle_at(position, 0.4 / 25, 0.4, 0.4 / 25e4) for position in POSITIONS]
    else:
        expected = [whole[round(position)] for position in POSITIONS]  # a schedule that was played has whole steps
    assert found[2 * TRIAL :] == pytest.approx(expected)
    assert rates_of(build(), resumed_by=build) == found


def test_after_going_back_momentum_follows_the_learning_rate() -> None:
    scheduler, found = breaking(None, auto_lr=TRIED), []
    for _ in range(LENGTH):
        found.append(scheduler.optimizer.param_groups[0]["momentum"])
        step(scheduler)
    expected = [one_cycle_at(position, 0.95, 0.85, 0.95) for position in POSITIONS]
    assert found[TRIAL] == found[0] == 0.95
    assert found[2 * TRIAL :] == pytest.approx(expected)


def test_after_going_back_a_schedule_that_cannot_be_played_goes_on_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """It is below a warm-up in the trial only."""
    schedule = lambda optimizer: Unplayable(optimizer, lambda step: 1 - step / 100)  # noqa: E731
    build = lambda: breaking(schedule, auto_lr=TRIED)  # noqa: E731
    found, own = rates_of(build()), played(schedule, LENGTH)
    assert found[:TRIAL] == pytest.approx(own[:TRIAL])
    assert found[TRIAL : 2 * TRIAL] != pytest.approx(own[TRIAL : 2 * TRIAL])
    assert found[2 * TRIAL :] == pytest.approx(own[2 * TRIAL :])
    assert caplog.text.count("goes on where it is, below a warm-up") == 1
    assert rates_of(build(), resumed_by=build) == found


def test_momentum_begins_again_with_the_learning_rate() -> None:
    scheduler, found = breaking(None), []
    for _ in range(LENGTH):
        found.append(scheduler.optimizer.param_groups[0]["momentum"])
        step(scheduler)
    assert found[AFTER] == found[0] == 0.95
    assert min(found[AFTER:]) == pytest.approx(min(found[:AFTER]), abs=0.01)


class Unplayable(lr_scheduler.LambdaLR):
    """A schedule that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no")


@pytest.mark.parametrize("total_steps", [LENGTH, None], ids=["length known", "length unknown"])
def test_a_schedule_that_cannot_be_played_goes_on_below_a_warm_up(
    total_steps: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = lambda optimizer: Unplayable(optimizer, lambda step: 1 - step / 100)  # noqa: E731
    found = rates_of(breaking(schedule, total_steps=total_steps))
    own, constants = played(schedule, LENGTH), SlopeSettings()
    assert found[:AFTER] == pytest.approx(own[:AFTER])
    assert found[AFTER] == pytest.approx(constants.warmup_from)
    length = AFTER if total_steps is None else round(constants.warmup_share * (LENGTH - AFTER))
    assert found[AFTER + length :] == pytest.approx(own[AFTER + length :])
    climb = found[AFTER : AFTER + length]
    assert all(before < after for before, after in itertools.pairwise(climb[: length // 2]))
    assert all(here <= there * (1 + 1e-12) for here, there in zip(found, own, strict=True))
    assert caplog.text.count("Unplayable cannot be played from the first step of the run, and goes on where it is") == 1


@pytest.mark.parametrize("saved_at", [AFTER - 5, AFTER + 5], ids=["before the return", "after it"])
def test_a_schedule_that_was_built_in_the_middle_of_a_run_goes_on_below_a_warm_up(
    saved_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As torch has it with ``last_epoch=``: what the schedule said before that is not known."""
    run = breaking(cosine_over(LENGTH))
    rates_of(run, saved_at)
    saved = copy.deepcopy([run.optimizer.state_dict(), run.state_dict()])

    def late(optimizer: Any) -> Any:
        optimizer.load_state_dict(saved[0])
        return lr_scheduler.CosineAnnealingLR(optimizer, LENGTH - 1, last_epoch=saved_at)

    resumed = breaking(late)
    resumed.load_state_dict(saved[1])
    found, own = rates_of(resumed, LENGTH - saved_at)[1:], played(cosine_over(LENGTH), LENGTH)[saved_at + 1 :]
    assert all(here <= there * (1 + 1e-9) for here, there in zip(found, own, strict=True))
    assert found[-20:] == pytest.approx(own[-20:])
    assert ("CosineAnnealingLR cannot be played" in caplog.text) is (saved_at < AFTER)


def test_a_run_that_looked_for_its_learning_rate_first_begins_anew_after_that() -> None:
    """Steps of records count from the first step of all; what is undone does not reach into the search."""
    options: dict[str, Any] = {"auto_lr": Scripted((10, 20)), "sync_every": 5}
    run = StackRun(**options)
    run.train(PHASE)
    started = [param.detach().clone() for param in run.stack.parameters()]
    run.train(10)
    assert same([param.detach() for param in run.stack.parameters()], started)
    resumed = StackRun(**options)
    resumed.load(run.saved())
    for each in (run, resumed):
        each.train(STEPS - PHASE - 10)
        records = [(record.step, record.undone) for record in each.scheduler.history if record.kind != "scout"]
        assert records == [(25, None), (30, 20), (35, None), (40, 30), (45, None), (50, None)]
        assert [record.cycle for record in each.scheduler.history if record.kind != "scout"] == list(range(6))
        summary = each.scheduler.history_summary
        assert (summary.undone, summary.lost) == (2, 20)
        assert [event["why"].split(":")[0] for event in summary.events[-2:]] == ["step 30", "step 40"]
        with pytest.raises(ValueError, match=f"step {STEPS + 1} is past the end: total_steps is {STEPS}"):
            each.scheduler.step(torch.ones(REPLICAS))
    assert same(*([param.detach() for param in each.stack.parameters()] for each in (run, resumed)))
