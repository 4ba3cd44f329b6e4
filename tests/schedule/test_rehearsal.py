"""Playing a copy of a schedule: its peak and end are found, and nothing else changes."""

from __future__ import annotations

import copy
import logging
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as schedules

import hdet_kernels as hk
from hdet_kernels.schedule.build import LONGEST, rehearse
from tests.schedule.cases import Place

TOTAL = 40
PEAK = 0.1


def sequential(optimizer: Optimizer) -> schedules.LRScheduler:
    parts = [schedules.LinearLR(optimizer, 0.1, 1.0, 4), schedules.CosineAnnealingLR(optimizer, TOTAL - 4, 0.02)]
    return schedules.SequentialLR(optimizer, parts, [4])


def chained(optimizer: Optimizer) -> schedules.LRScheduler:
    return schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.5, 10), schedules.MultiStepLR(optimizer, [20], 0.1)], optimizer
    )


SCHEDULES: dict[str, tuple[Callable[[Optimizer], schedules.LRScheduler], float, float]] = {
    # constructor, highest and last value over PEAK
    "lambda": (lambda o: schedules.LambdaLR(o, lambda t: min(t / 10, 1.0)), 1.0, 1.0),
    "constant": (lambda o: schedules.ConstantLR(o, 1.0, 0), 1.0, 1.0),
    "cosine": (lambda o: schedules.CosineAnnealingLR(o, TOTAL), 1.0, (1 + math.cos(math.pi * 39 / 40)) / 2),
    "step": (lambda o: schedules.StepLR(o, 20, 0.5), 1.0, 0.5),
    "drop behind the end": (lambda o: schedules.StepLR(o, TOTAL, 0.5), 1.0, 1.0),
    "exponential": (lambda o: schedules.ExponentialLR(o, 0.9), 1.0, 0.9**39),
    "sequential": (sequential, 1.0, 0.2 + 0.8 * (1 + math.cos(math.pi * 35 / 36)) / 2),
    "chained": (chained, 1.0, 0.1),
}


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]


def built(make: Callable[[Optimizer], schedules.LRScheduler], lr: Any = PEAK) -> tuple[Adam, schedules.LRScheduler]:
    first, second = weights()
    optimizer = Adam([{"params": [first]}, {"params": [second], "weight_decay": 0.1}], lr=lr)
    return optimizer, make(optimizer)


def everything(optimizer: Optimizer, scheduler: schedules.LRScheduler) -> Any:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return copy.deepcopy((groups, scheduler.state_dict(), dict(optimizer.state), sorted(vars(optimizer))))


@pytest.mark.parametrize("lr", [PEAK, torch.tensor(PEAK)], ids=["float", "tensor"])
@pytest.mark.parametrize(("make", "highest", "last"), SCHEDULES.values(), ids=SCHEDULES)
def test_peak_and_end_are_found_and_nothing_changes(make: Any, highest: float, last: float, lr: Any) -> None:
    optimizer, scheduler = built(make, copy.deepcopy(lr))
    plain, reference = built(make, copy.deepcopy(lr))
    rates = [group["lr"] for group in optimizer.param_groups]
    before = everything(optimizer, scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rehearse(scheduler, TOTAL)
    assert found is not None
    rel = 1e-5 if isinstance(lr, Tensor) else 1e-9  # fp32 tensors are multiplied step by step
    assert found.highest == pytest.approx([PEAK * highest] * 2, rel=rel)
    assert found.end == pytest.approx(last / highest, rel=rel)
    assert everything(optimizer, scheduler) == before
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))
    for _ in range(TOTAL - 1):
        for pair in ((optimizer, scheduler), (plain, reference)):
            pair[0].step()
            pair[1].step()
        assert [float(g["lr"]) for g in optimizer.param_groups] == [float(g["lr"]) for g in plain.param_groups]
    run = hk.HDETScheduler(
        built(make, copy.deepcopy(lr))[1], total_steps=TOTAL, ensemble=Place(2), tie_groups=False
    ).cycle.run
    assert run.peaks == pytest.approx([PEAK * highest] * 2, rel=rel)
    assert run.end == pytest.approx(last / highest, rel=rel)


def test_random_generators_are_unchanged() -> None:
    def noisy(step: int) -> float:
        return 1.0 + 0.0 * (random.random() + np.random.rand() + float(torch.rand(())))  # noqa: NPY002

    _, scheduler = built(lambda o: schedules.LambdaLR(o, noisy))
    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert rehearse(scheduler, TOTAL) is not None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002


@pytest.mark.parametrize(
    ("make", "peak"),
    [
        (lambda o: schedules.LambdaLR(o, lambda t: min(t / 10, 1.0)), 10 / TOTAL),
        (lambda o: schedules.LambdaLR(o, lambda t: min((t + 1) / 1000, 1.0)), 39 / TOTAL),
        (lambda o: schedules.ConstantLR(o, 1.0, 0), 0.0),
        (lambda o: schedules.CosineAnnealingLR(o, TOTAL), 0.0),
        (sequential, 4 / TOTAL),
        (lambda o: schedules.OneCycleLR(o, 0.3, TOTAL), 11 / TOTAL),
    ],
    ids=["warm-up", "all warm-up", "constant", "cosine", "warm-up and cosine", "onecycle"],
)
def test_finds_when_the_peak_is_reached(make: Any, peak: float) -> None:
    """The first step at which one group reaches 99 % of its peak."""
    _, scheduler = built(make)
    found = rehearse(scheduler, TOTAL)
    assert found is not None
    assert found.peak == peak
    if not isinstance(scheduler, schedules.OneCycleLR):
        assert hk.HDETScheduler(scheduler, total_steps=TOTAL, ensemble=Place(2)).cycle.run.peak == peak


@pytest.mark.parametrize(
    ("rates", "shapes", "expected"),
    [
        ((0.1, 0.3), (lambda t: min(t / 8, 1.0), lambda t: t / TOTAL), ((0.1, 0.3 * 39 / 40), 1.0, 8 / TOTAL)),
        ((0.1, 0.3), (lambda t: 1.0, lambda t: 1 - t / TOTAL), ((0.1, 0.3), (1 + 1 / TOTAL) / 2, 0.0)),
        ((0.0, 0.3), (lambda t: 1.0, lambda t: 1.0), ((0.0, 0.3), 1.0, 0.0)),
    ],
    ids=["the first to peak counts", "ends count alike", "a frozen one does not count"],
)
def test_groups_of_their_own_shape(rates: Any, shapes: Any, expected: tuple[Any, float, float]) -> None:
    optimizer = SGD([{"params": [p], "lr": lr} for p, lr in zip(weights(), rates, strict=True)])
    found = rehearse(schedules.LambdaLR(optimizer, list(shapes)), TOTAL)
    assert found is not None
    assert found.highest == pytest.approx(expected[0])
    assert (found.end, found.peak) == pytest.approx(expected[1:])


def test_a_schedule_in_its_middle_is_played_from_there() -> None:
    optimizer, scheduler = built(lambda o: schedules.CosineAnnealingLR(o, TOTAL))
    for _ in range(30):
        optimizer.step()
        scheduler.step()
    found = rehearse(scheduler, TOTAL)
    assert found is not None
    assert found.highest == pytest.approx([PEAK] * 2)
    assert found.end == pytest.approx((1 + math.cos(math.pi * 39 / 40)) / 2)


class NoCopy(schedules.ConstantLR):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("holds a socket")


def test_a_schedule_that_cannot_be_copied_counts_as_annealing(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, scheduler = built(lambda o: NoCopy(o, 1.0, 0))
    with caplog.at_level(logging.INFO, "hdet_kernels"):
        assert rehearse(scheduler, TOTAL) is None
    assert "NoCopy cannot be played ahead" in caplog.text
    run = hk.HDETScheduler(scheduler, total_steps=TOTAL, ensemble=Place(2), tie_groups=False).cycle.run
    assert (run.end, run.peaks) == (0.0, (PEAK, PEAK))
    assert optimizer.param_groups[0]["initial_lr"] == PEAK


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_schedule_with_non_finite_values_is_not_used(bad: float) -> None:
    _, scheduler = built(lambda o: schedules.LambdaLR(o, lambda t: bad if t == 5 else 1.0))
    assert rehearse(scheduler, TOTAL) is None


def counting(calls: list[int]) -> Callable[[Optimizer], schedules.LRScheduler]:
    return lambda o: schedules.LambdaLR(o, lambda t: (calls.append(t), 1.0)[1])


def test_a_long_run_is_not_played() -> None:
    calls: list[int] = []
    _, scheduler = built(counting(calls))
    calls.clear()
    assert rehearse(scheduler, LONGEST + 1) is None
    assert calls == []


@pytest.mark.parametrize(
    ("options", "plays"),
    [
        ({}, True),
        ({"auto_lr": hk.HypergradientController()}, True),
        ({"auto_lr": hk.HypergradientController(), "ensemble": None}, True),
        ({"auto_lr": False}, False),
        ({"spread": 0.0}, False),
        ({"spread": 0.0, "explore": [hk.Explore("weight_decay", base=0.1)]}, False),
        ({"ensemble": None}, False),
        ({"auto_lr": hk.SoftmaxController(warmup_steps=5, decay=0.1)}, True),
    ],
    ids=["default", "slopes", "slopes, one", "off", "no spread", "lr without spread", "one replica", "softmax"],
)
def test_is_played_only_for_a_controller_that_can_move_a_learning_rate(options: dict[str, Any], plays: bool) -> None:
    calls: list[int] = []
    _, scheduler = built(counting(calls))
    calls.clear()
    run = hk.HDETScheduler(
        scheduler, **{"total_steps": TOTAL, "ensemble": Place(2), "tie_groups": False, **options}
    ).cycle.run
    assert bool(calls) is plays
    assert run.end == (1.0 if plays else 0.0)
    assert run.peaks[:2] == ((PEAK, PEAK) if plays else run.peaks[:2])
    assert plays or not any(run.peaks)


def test_onecyclelr_anneals_to_nothing() -> None:
    _, scheduler = built(lambda o: schedules.OneCycleLR(o, 0.3, TOTAL))
    wrapped = hk.HDETScheduler(scheduler, ensemble=Place(2), tie_groups=False).cycle.run
    own = hk.HDETOneCycleLR(built(lambda o: None)[0], 0.3, TOTAL, ensemble=Place(2), tie_groups=False).cycle.run  # type: ignore[arg-type,return-value]
    assert (own.end, own.peaks) == (wrapped.end, wrapped.peaks) == (0.0, (0.3, 0.3))


@pytest.mark.parametrize("auto_lr", [True, False], ids=["auto", "plain"])
def test_one_replica_has_the_plain_schedule(auto_lr: bool) -> None:
    """Nothing can be compared, and no cap applies."""
    optimizer, scheduler = built(lambda o: schedules.CosineAnnealingLR(o, TOTAL))
    plain, reference = built(lambda o: schedules.CosineAnnealingLR(o, TOTAL))
    ours = hk.HDETScheduler(scheduler, auto_lr=auto_lr)
    for _ in range(TOTAL):
        assert ours.get_last_lr() == reference.get_last_lr()
        optimizer.step(), plain.step()
        ours.step(1.0)
        reference.step()
