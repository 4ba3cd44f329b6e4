"""Defaults of a cycle, and arguments that are refused before anything changes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import Adam
from torch.optim import lr_scheduler as schedules

import hdet_kernels as hk
from hdet_kernels.schedule.build import default_sync_every
from tests.schedule.cases import Place, adam, groups_of, parameters
from tests.training import same, with_averaging


@pytest.mark.parametrize(
    ("total", "expected"), [(1, 1), (10, 1), (100, 2), (1000, 25), (40_000, 1000), (10**6, 1000)], ids=str
)
def test_default_sync_interval_is_a_fortieth_of_the_run_with_local_gradients(total: int, expected: int) -> None:
    """Training losses of replicas that see other examples are compared."""
    assert hk.HDETOneCycleLR(adam(), 0.1, total, gradients="local").sync_every == expected


@pytest.mark.parametrize(("total", "expected"), [(1, 1), (100, 1), (1000, 12), (80_000, 1000), (10**6, 1000)], ids=str)
@pytest.mark.parametrize(
    "more", [{}, {"gradients": "local", "probe": lambda: torch.tensor(1.0)}], ids=["auto", "probe"]
)
def test_half_of_that_if_no_training_losses_compare_learning_rates(
    total: int, expected: int, more: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"cycle_momentum": False, **more}
    rates = hk.Explore("lr", spread=0.5)
    assert hk.HDETOneCycleLR(adam(), 0.1, total, **options).sync_every == expected
    assert hk.HDETOneCycleLR(adam(), 0.1, total, explore=[rates], **options).sync_every == expected


@pytest.mark.parametrize(
    ("total", "expected"), [(1, 1), (9, 1), (100, 10), (300, 30), (1000, 30), (1600, 40), (10**6, 1000)], ids=str
)
def test_other_scalars_need_30_steps_or_a_tenth_of_the_run(total: int, expected: int) -> None:
    rates, decay = hk.Explore("lr", spread=0.5), hk.Explore("weight_decay", base=0.1)
    for probe in (None, lambda: torch.tensor(1.0)):
        assert hk.HDETOneCycleLR(adam(), 0.1, total, explore=[rates, decay], probe=probe).sync_every == expected


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "spread-1": ({"spread": 1.0}, ValueError, "spread must be below 1 with linear spacing, got 1.0"),
    "spread-negative": ({"spread": -0.1}, ValueError, "spread must be a finite number of at least 0, got -0.1"),
    "spread-nan": ({"spread": math.nan}, ValueError, "spread must be a finite number"),
    "sync-0": ({"sync_every": 0}, ValueError, "sync_every must be a whole number of at least 1, got 0"),
    "sync-float": ({"sync_every": 2.5}, ValueError, "sync_every must be a whole number"),
    "groups": ({"max_lr": [0.1, 0.2, 0.3]}, ValueError, "max_lr"),
    "total": ({"total_steps": 0}, ValueError, "total_steps"),
    "gradients": ({"gradients": "mean"}, ValueError, "gradients must be one of 'auto', 'shared', 'local', got 'mean'"),
    "auto": ({"auto_lr": "softmax"}, TypeError, "auto_lr must be True, False or a controller"),
    "class": ({"auto_lr": hk.RegressionController}, TypeError, r"pass an instance, RegressionController\(\)"),
    "one-explore": ({"explore": hk.Explore("eps")}, TypeError, r"explore= takes several: pass \[Explore"),
    "seed": ({"seed": 1.5}, ValueError, "seed must be a whole number, got 1.5"),
    "probe": ({"probe": 3}, TypeError, "probe must be callable"),
    "explore": ({"explore": ["weight_decay"]}, TypeError, "explore= takes hdet_kernels.Explore"),
    "key": ({"explore": [hk.Explore("weight_dekay")]}, ValueError, "'weight_dekay' is not a key"),
    "zero-base": ({"explore": [hk.Explore("weight_decay")]}, ValueError, "must be a positive number, got 0"),
    "momentum": ({"explore": [hk.Explore("betas[0]")]}, ValueError, "pass cycle_momentum=False"),
    "setter": (
        {"explore": [hk.Explore("x", base=1.0, apply=lambda v: 1 / 0)]}, ZeroDivisionError, "division by zero"
    ),
    "slopes": (
        {"auto_lr": hk.HypergradientController(), "gradients": "local"}, ValueError, "needs shared gradients"
    ),
    "typo": ({"sync_evry": 3}, TypeError, "unexpected keyword argument 'sync_evry'; did you mean 'sync_every'"),
}  # fmt: skip


@pytest.mark.parametrize("tensor_lr", [False, pytest.param(True, marks=pytest.mark.full)], ids=["float", "tensor"])
@pytest.mark.parametrize(("options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_raise_and_change_nothing(
    options: dict[str, Any], error: type[Exception], message: str, tensor_lr: bool
) -> None:
    optimizer = adam(lr=torch.tensor(0.1) if tensor_lr else 0.1)
    before = groups_of(optimizer)
    with pytest.raises(error, match=message):
        hk.HDETOneCycleLR(optimizer, **with_averaging({"max_lr": 0.1, "total_steps": 10, **options}))
    assert groups_of(optimizer) == before
    hk.HDETOneCycleLR(optimizer, 0.1, 10)


@pytest.mark.parametrize("pct_start", [0.1, 0.3, 0.55])
def test_the_peak_of_a_wrapped_onecycle_is_known(pct_start: float) -> None:
    base = schedules.OneCycleLR(adam(), 0.1, total_steps=200, pct_start=pct_start)
    assert hk.HDETScheduler(base).cycle.run.peak == pytest.approx(pct_start)


def test_a_softmax_controller_warns_if_the_floor_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    controller = hk.SoftmaxController(warmup_steps=10)
    hk.HDETScheduler(schedules.CosineAnnealingLR(adam(), 40), auto_lr=controller)
    assert "the learning rate will not decay; pass decay= as a number" in caplog.text
    caplog.clear()
    hk.HDETOneCycleLR(adam(), 0.1, 40, auto_lr=controller)
    assert "decay" not in caplog.text


@pytest.mark.parametrize(
    ("total", "compares_losses", "rates_alone", "expected"),
    [
        (1000, True, True, 25),
        (1000, False, True, 12),
        (1000, True, False, 30),
        (1000, False, False, 30),
        (4000, False, False, 100),
        (200, False, False, 20),
        (9, True, False, 1),
        (1, False, True, 1),
        (10**9, True, True, 1000),
    ],
)
def test_default_sync_interval_by_a_table(total: int, compares_losses: bool, rates_alone: bool, expected: int) -> None:
    assert default_sync_every(total, compares_losses=compares_losses, rates_alone=rates_alone) == expected


def test_a_controller_whose_part_of_the_run_has_no_sync_is_said(caplog: pytest.LogCaptureFixture) -> None:
    controller = hk.RegressionController(start_at=0.1, stop_at=0.2)
    hk.HDETOneCycleLR(adam(), 0.1, 100, sync_every=30, auto_lr=controller, ensemble=Place(4, 0))
    assert "no sync falls into the part of the run in which RegressionController acts (sync_every=30" in caplog.text


def test_the_run_of_the_controller_has_facts_and_wishes() -> None:
    optimizer = Adam([{"params": [p]} for p in parameters()], lr=1.0)
    optimizer.param_groups[1]["weight_decay"] = 0.1
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        [0.3, 0.0],
        200,
        sync_every=16,
        probe=lambda: 1.0,
        explore=[hk.Explore("weight_decay", groups=[1], bounds=(0.05, 0.4))],
        ensemble=Place(4, 1),
    )
    run = scheduler.cycle.run
    assert (run.total_steps, run.sync_every, run.peak, run.end) == (200, 16, 0.3, 0.0)
    assert run.peaks == (0.3, None, None), "a frozen group and weight decay have no peak"
    assert run.floors == (pytest.approx(0.3 / 25 / 1e4), 0.0, None)
    assert run.reach[2] == (pytest.approx(math.log(0.5)), pytest.approx(math.log(4.0)))
    assert (run.probed, run.others, run.early, run.in_pairs) == (True, True, (), True)
    assert run.departs == ((0, 48), (48, 176), (48, 176))


class Counting(hk.SoftmaxController):
    """A controller that counts how often it is asked."""

    asked = 0

    def active(self, run: Any, step: int) -> bool:
        type(self).asked += 1
        return super().active(run, step)


@pytest.mark.parametrize("warmup", [10**9, 9_999_000], ids=["never active", "active at the end"])
def test_a_run_of_ten_million_syncs_is_not_walked_through(warmup: int, caplog: pytest.LogCaptureFixture) -> None:
    Counting.asked = 0
    hk.HDETOneCycleLR(adam(), 0.1, 10**7, sync_every=1, ensemble=Place(4), auto_lr=Counting(warmup_steps=warmup))
    assert Counting.asked <= 10_002
    assert ("no sync falls into the part of the run" in caplog.text) is (warmup == 10**9)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("options", [{}, {"outer": hk.Outer()}, {"auto_lr": hk.HypergradientController()}], ids=str)
def test_default_devices_and_dtypes_do_not_reach_inside(context: str, options: dict[str, Any]) -> None:
    def train(around: Callable[[], Any]) -> list[Any]:
        param = torch.nn.Parameter(torch.ones(5))
        optimizer = hk.FusedAdamW([param], lr=0.1)
        with around():
            scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=2, ensemble=Place(2), **with_averaging(options))
        for _ in range(4):
            param.grad = torch.full((5,), 0.5)
            optimizer.step()
            with around():
                scheduler.step(1.0)
        with around():
            with scheduler.consensus():
                pass
            scheduler.converge()
            scheduler.load_state_dict(scheduler.state_dict())
        return [param.detach().clone(), scheduler.get_last_lr(), scheduler.cycle.window.state_dict()]

    assert same(train(CONTEXTS[context]), train(contextlib.nullcontext))


@pytest.mark.parametrize(("trust", "told"), [(3.0, False), (10, False), (11, True), (None, True)])
def test_who_hardly_trusts_the_learning_rate_is_told_of_scouting(
    trust: float | None, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stack = hk.ReplicaStack(torch.nn.Linear(2, 1), 2)
    with caplog.at_level("INFO", logger="hdet_kernels"):
        hk.HDETOneCycleLR(hk.FusedAdamW(stack.parameters()), 0.1, 1000, ensemble=stack.ensemble, trust=trust)
    assert ("max_lr=None" in caplog.text) is told
