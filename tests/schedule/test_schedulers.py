"""The schedulers in one process: torch's schedule, the replica's place in the spread, and what is refused."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules

import hdet_kernels as hk
from hdet_kernels.ensemble import SingleReplica

TOTAL = 37


class Place(SingleReplica):
    """Replica ``replica`` of ``size`` that show the same control row and are equal at every sync."""

    def __init__(self, size: int = 1, replica: int = 0) -> None:
        self.size = self.processes = size
        self.replica = self.process = replica

    def averages(self, device: torch.device) -> bool:
        return True

    def gather(self, rows: Tensor) -> Tensor:
        return rows.reshape(1, 1, -1).repeat(self.size, 1, 1)


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes or ((3, 2), (4,))]


def adam(**options: Any) -> Adam:
    return Adam(parameters(), **{"lr": 0.1, **options})


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Everything in the groups but the parameters, by value."""
    return [copy.deepcopy({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]


def advance(optimizer: Optimizer, scheduler: Any, *args: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    scheduler.step(*args)


ONE_CYCLE = {
    "defaults": {},
    "linear": {"anneal_strategy": "linear"},
    "three-phase": {"three_phase": True},
    "no-momentum": {"cycle_momentum": False},
    "early-peak": {"pct_start": 0.1},
    "factors": {"div_factor": 7.0, "final_div_factor": 13.0},
    "momenta": {"base_momentum": 0.7, "max_momentum": 0.8},
}


@pytest.mark.parametrize(
    "make", [lambda p: Adam(p, lr=1.0), lambda p: SGD(p, lr=1.0, momentum=0.9)], ids=["adam", "sgd"]
)
@pytest.mark.parametrize("options", ONE_CYCLE.values(), ids=ONE_CYCLE)
def test_without_spread_everything_is_onecyclelr_bit_for_bit(
    make: Callable[..., Optimizer], options: dict[str, Any]
) -> None:
    groups = [[{"params": [p]} for p in parameters()] for _ in range(2)]
    theirs, ours = make(groups[0]), make(groups[1])
    torch_scheduler = schedules.OneCycleLR(theirs, max_lr=[0.3, 0.01], total_steps=TOTAL, **options)
    scheduler = hk.HDETOneCycleLR(ours, max_lr=[0.3, 0.01], total_steps=TOTAL, spread=0, **options)
    assert isinstance(scheduler, schedules.OneCycleLR)
    for _ in range(TOTAL):
        assert groups_of(ours) == groups_of(theirs)
        assert scheduler.get_last_lr() == torch_scheduler.get_last_lr()
        advance(theirs, torch_scheduler)
        advance(ours, scheduler)
    assert groups_of(ours) == groups_of(theirs)
    for a, b in zip(theirs.param_groups, ours.param_groups, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a["params"], b["params"], strict=True))


def test_arguments_begin_with_torchs_in_torchs_order() -> None:
    theirs = list(inspect.signature(schedules.OneCycleLR).parameters.values())
    ours = list(inspect.signature(hk.HDETOneCycleLR).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(theirs) :])
    assert inspect.signature(hk.HDETScheduler).parameters.keys() >= {p.name for p in ours[len(theirs) :]}


@pytest.mark.parametrize("replica", range(4))
def test_every_group_is_scaled_by_its_own_permutation_from_the_first_step(replica: int) -> None:
    optimizer = Adam([{"params": [p]} for p in parameters()], lr=1.0)
    plain = Adam([{"params": [p]} for p in parameters()], lr=1.0)
    reference = schedules.OneCycleLR(plain, max_lr=0.1, total_steps=TOTAL)
    scheduler = hk.HDETOneCycleLR(
        optimizer, 0.1, TOTAL, spread=0.2, sync_every=5, auto_lr=False, ensemble=Place(4, replica), seed=3
    )
    rho = hk.multipliers(4, 0.2)
    for step in range(TOTAL):
        own = [rho[hk.permutation(4, seed=3, cycle=step // 5, hyperparameter=f"lr/{g}")[replica]] for g in range(2)]
        assert scheduler.get_last_lr() == [lr * m for lr, m in zip(reference.get_last_lr(), own, strict=True)]
        assert [g["lr"] for g in optimizer.param_groups] == scheduler.get_last_lr()
        assert [g["betas"] for g in optimizer.param_groups] == [g["betas"] for g in plain.param_groups]
        advance(plain, reference)
        advance(optimizer, scheduler)


def test_tensor_learning_rate_is_filled_in_place() -> None:
    rate = torch.tensor(0.5)
    optimizer = Adam(parameters(), lr=rate)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, TOTAL, auto_lr=False, sync_every=5, ensemble=Place(2, 1))
    seen = []
    for _ in range(7):
        assert optimizer.param_groups[0]["lr"] is rate
        seen.append(float(rate))
        advance(optimizer, scheduler)
    assert len(set(seen)) == 7


def test_explored_scalars_are_spread_beside_the_learning_rate() -> None:
    dropout = nn.Dropout(0.1)
    optimizer = AdamW(parameters(), lr=1.0, weight_decay=0.2)
    explore = [
        hk.Explore("weight_decay", spread=0.5),
        hk.Explore("dropout", spread=0.5, base=0.4, apply=lambda p: setattr(dropout, "p", p), bounds=(0.0, 0.45)),
    ]
    ensemble = Place(3, 2)
    scheduler = hk.HDETOneCycleLR(
        optimizer, 0.1, TOTAL, sync_every=4, auto_lr=False, explore=explore, ensemble=ensemble
    )
    seen = set()
    for step in range(20):
        decay_at, dropout_at = (
            hk.multipliers(3, 0.5)[hk.permutation(3, seed=0, cycle=step // 4, hyperparameter=name)[2]]
            for name in ("weight_decay/0", "dropout")
        )
        assert optimizer.param_groups[0]["weight_decay"] == 0.2 * decay_at
        assert dropout.p == min(0.4 * dropout_at, 0.45)
        seen.add((decay_at, dropout_at))
        advance(optimizer, scheduler)
    assert len(seen) > 2


WRAPPED: dict[str, Callable[[Optimizer], schedules.LRScheduler]] = {
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, TOTAL),
    "step": lambda o: schedules.StepLR(o, 7, 0.5),
    "lambda": lambda o: schedules.LambdaLR(o, lambda e: 1 / (1 + e)),
    "linear": lambda o: schedules.LinearLR(o, 0.1, 1.0, 9),
    "onecycle": lambda o: schedules.OneCycleLR(o, 0.3, total_steps=TOTAL),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 5, cycle_momentum=False),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1.0, 5), schedules.CosineAnnealingLR(o, TOTAL - 5)], [5]
    ),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o, 0.1, 1.0, 5), schedules.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("spread", [0.0, 0.3], ids=["plain", "spread"])
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("make", WRAPPED.values(), ids=WRAPPED)
def test_any_scheduler_can_be_wrapped(
    make: Callable[[Optimizer], schedules.LRScheduler], tensor_lr: bool, spread: float
) -> None:
    """The wrapped schedule is what it is alone, also where it computes the next value from the current one."""
    optimizers = [adam(lr=torch.tensor(0.1, dtype=torch.float64) if tensor_lr else 0.1) for _ in range(2)]
    reference = make(optimizers[0])
    scheduler = hk.HDETScheduler(
        make(optimizers[1]), total_steps=TOTAL, spread=spread, auto_lr=False, sync_every=6, ensemble=Place(4, 3)
    )
    assert isinstance(scheduler, schedules.LRScheduler)
    assert len(scheduler.base_lrs) == 1
    for step in range(TOTAL):
        assert scheduler.last_epoch == step
        place = hk.permutation(4, seed=0, cycle=step // 6, hyperparameter="lr/0")[3]
        expected = float(reference.get_last_lr()[0]) * float(hk.multipliers(4, spread)[place])
        assert float(scheduler.get_last_lr()[0]) == expected
        assert float(optimizers[1].param_groups[0]["lr"]) == expected
        advance(optimizers[0], reference)
        advance(optimizers[1], scheduler)


def test_wrapped_scheduler_needs_a_length_where_it_cannot_be_known() -> None:
    optimizer = adam()
    with pytest.raises(ValueError, match="pass total_steps="):
        hk.HDETScheduler(schedules.ExponentialLR(optimizer, 0.9))
    with pytest.raises(ValueError, match="needs its length"):
        hk.HDETScheduler(schedules.ExponentialLR(optimizer, 0.9), sync_every=3)
    assert hk.HDETScheduler(schedules.CosineAnnealingLR(optimizer, 80)).sync_every == 2
    optimizer = adam()
    scheduler = hk.HDETScheduler(schedules.ExponentialLR(optimizer, 0.9), sync_every=3, auto_lr=False)
    for _ in range(10):
        advance(optimizer, scheduler)
    assert [r.step for r in scheduler.history] == [3, 6, 9]


@pytest.mark.parametrize(
    ("total", "expected"), [(1, 1), (10, 1), (100, 2), (1000, 25), (40_000, 1000), (10**6, 1000)], ids=str
)
def test_default_sync_interval_is_a_fortieth_of_the_run_and_at_most_1000(total: int, expected: int) -> None:
    assert hk.HDETOneCycleLR(adam(), 0.1, total).sync_every == expected


@pytest.mark.parametrize(("total", "expected"), [(1, 1), (100, 1), (1000, 12), (80_000, 1000), (10**6, 1000)], ids=str)
def test_half_of_that_where_a_probe_compares_learning_rates_alone(total: int, expected: int) -> None:
    options: dict[str, Any] = {"cycle_momentum": False, "probe": lambda: torch.tensor(1.0)}
    rates = hk.Explore("lr", spread=0.5)
    assert hk.HDETOneCycleLR(adam(), 0.1, total, **options).sync_every == expected
    assert hk.HDETOneCycleLR(adam(), 0.1, total, explore=[rates], **options).sync_every == expected


@pytest.mark.parametrize(
    ("total", "expected"), [(1, 1), (9, 1), (100, 10), (300, 30), (1000, 30), (1600, 40), (10**6, 1000)], ids=str
)
def test_other_scalars_take_30_steps_but_for_a_tenth_of_the_run(total: int, expected: int) -> None:
    rates, decay = hk.Explore("lr", spread=0.5), hk.Explore("weight_decay", base=0.1)
    for probe in (None, lambda: torch.tensor(1.0)):
        assert hk.HDETOneCycleLR(adam(), 0.1, total, explore=[rates, decay], probe=probe).sync_every == expected


def test_the_last_step_converges_and_nothing_follows() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, sync_every=4)
    for _ in range(10):
        advance(optimizer, scheduler, 1.0)
    assert [(r.step, r.kind) for r in scheduler.history] == [(4, "sync"), (8, "sync"), (10, "last")]
    before = groups_of(optimizer), scheduler.last_epoch
    with pytest.raises(ValueError, match="step 11 is past the end: total_steps is 10"):
        scheduler.step(1.0)
    assert (groups_of(optimizer), scheduler.last_epoch) == before


def test_a_wrapped_onecycle_ends_where_it_ends() -> None:
    optimizer = adam()
    scheduler = hk.HDETScheduler(schedules.OneCycleLR(optimizer, 0.1, total_steps=4), sync_every=3, auto_lr=False)
    for _ in range(4):
        advance(optimizer, scheduler)
    assert [(r.step, r.kind) for r in scheduler.history] == [(3, "sync"), (4, "last")]
    before = groups_of(optimizer), scheduler.last_epoch
    with pytest.raises(ValueError, match="step 5 is past the end: total_steps is 4"):
        scheduler.step()
    assert (groups_of(optimizer), scheduler.last_epoch) == before


def test_bare_step_works_after_record_loss_and_window_means_all_records() -> None:
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


def test_auto_lr_without_any_loss_says_what_to_do_and_changes_nothing() -> None:
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
def test_no_loss_is_needed_where_nothing_reads_it(options: dict[str, Any]) -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, **options)
    for _ in range(10):
        advance(optimizer, scheduler)
    assert scheduler.last_epoch == 10


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "spread-1": ({"spread": 1.0}, ValueError, "spread must be below 1 with linear spacing, got 1.0"),
    "spread-negative": ({"spread": -0.1}, ValueError, "spread must be a finite number of at least 0, got -0.1"),
    "spread-nan": ({"spread": math.nan}, ValueError, "spread must be a finite number"),
    "sync-0": ({"sync_every": 0}, ValueError, "sync_every must be a whole number of steps, at least 1, got 0"),
    "sync-float": ({"sync_every": 2.5}, ValueError, "sync_every must be a whole number"),
    "groups": ({"max_lr": [0.1, 0.2, 0.3]}, ValueError, "max_lr"),
    "total": ({"total_steps": 0}, ValueError, "total_steps"),
    "gradients": ({"gradients": "mean"}, ValueError, "gradients must be one of 'auto', 'shared', 'local', got 'mean'"),
    "state": ({"average_state": "yes"}, ValueError, "average_state must be one of"),
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
    "typo": ({"sync_evry": 3}, TypeError, "sync_evry"),
}  # fmt: skip


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize(("options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused_and_change_nothing(
    options: dict[str, Any], error: type[Exception], message: str, tensor_lr: bool
) -> None:
    optimizer = adam(lr=torch.tensor(0.1) if tensor_lr else 0.1)
    before = groups_of(optimizer)
    with pytest.raises(error, match=message):
        hk.HDETOneCycleLR(optimizer, **{"max_lr": 0.1, "total_steps": 10, **options})
    assert groups_of(optimizer) == before
    hk.HDETOneCycleLR(optimizer, 0.1, 10)


def test_what_is_not_an_optimizer_or_has_no_parameters_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, got int"):
        hk.HDETOneCycleLR(3, 0.1, 10)  # type: ignore[arg-type]
    empty = Adam([{"params": []}], lr=0.1)
    with pytest.raises(ValueError, match="no parameters to average"):
        hk.HDETOneCycleLR(empty, 0.1, 10)
    with pytest.raises(TypeError, match="wraps a torch LRScheduler, got Adam"):
        hk.HDETScheduler(adam())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ReduceLROnPlateau decides by a metric"):
        hk.HDETScheduler(schedules.ReduceLROnPlateau(adam()))
    with pytest.raises(TypeError, match="has a cycle of its own"):
        hk.HDETScheduler(hk.HDETOneCycleLR(adam(), 0.1, 10))


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
def test_a_loss_that_is_not_a_scalar_is_refused_and_changes_nothing(loss: Any, error: type[Exception]) -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, sync_every=1)
    with pytest.raises(error, match="the loss must be"):
        scheduler.step(loss)
    assert scheduler.last_epoch == 0
    assert scheduler.cycle.window.count == 0
    assert not scheduler.history


def test_a_nan_loss_is_an_error_at_the_sync_that_changes_nothing() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, sync_every=2)
    advance(optimizer, scheduler, 1.0)
    params = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    before = groups_of(optimizer), scheduler.state_dict()
    with pytest.raises(RuntimeError, match=r"no replica is sound at step 2; not finite: the loss on rank 0"):
        scheduler.step(math.nan)
    assert (groups_of(optimizer), scheduler.state_dict()) == before
    for now, then in zip(optimizer.param_groups[0]["params"], params, strict=True):
        assert torch.equal(now, then)
    scheduler.step(1.0)
    assert scheduler.last_epoch == 2


def test_groups_added_later_are_noticed() -> None:
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
    """Between syncs nothing reads a tensor: .item(), .tolist(), bool() and float() would wait for a GPU."""
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


def test_a_tensor_learning_rate_with_bounds_does_not_wait_either(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = Adam(parameters(), lr=torch.tensor(0.1))
    bounded = [hk.Explore("lr", spread=0.3, bounds=(0.02, 0.05))]
    base = schedules.CosineAnnealingLR(optimizer, 20)
    scheduler = hk.HDETScheduler(base, sync_every=10, auto_lr=False, explore=bounded, ensemble=Place(4, 1))
    assert 0.02 <= float(optimizer.param_groups[0]["lr"]) <= 0.05
    value = scheduler.cycle.spread.hyperparameters[0].bounded

    def forbidden(*_: Any) -> Any:
        raise AssertionError("a comparison waits for the device")

    monkeypatch.setattr(Tensor, "__bool__", forbidden)
    assert torch.equal(value(torch.tensor(7.0)), torch.tensor(0.05))


def test_a_setter_that_raises_at_a_sync_leaves_the_schedule_in_step() -> None:
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


@pytest.mark.parametrize("pct_start", [0.1, 0.3, 0.55])
def test_the_controller_stops_at_the_peak_of_a_wrapped_onecycle_too(pct_start: float) -> None:
    base = schedules.OneCycleLR(adam(), 0.1, total_steps=200, pct_start=pct_start)
    assert hk.HDETScheduler(base).cycle.run.peak == pytest.approx(pct_start)


def test_a_softmax_controller_that_cannot_know_the_floor_says_so(caplog: pytest.LogCaptureFixture) -> None:
    controller = hk.SoftmaxController(warmup_steps=10)
    hk.HDETScheduler(schedules.CosineAnnealingLR(adam(), 40), auto_lr=controller)
    assert "the learning rate will not decay; pass decay= as a number" in caplog.text
    caplog.clear()
    hk.HDETOneCycleLR(adam(), 0.1, 40, auto_lr=controller)
    assert "decay" not in caplog.text


def test_a_scheduler_that_is_gone_leaves_the_optimizer_alone() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10)
    state = optimizer.state_dict()
    del scheduler
    gc.collect()
    state["param_groups"][0]["lr"] = 0.77
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.77


def test_history_says_what_happened() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=4, auto_lr=False)
    rates = []
    for step in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        advance(optimizer, scheduler, float(step))
    (record,) = scheduler.history
    assert (record.step, record.cycle, record.losses, record.excluded) == (4, 0, [1.5], [])
    assert record.base == {"lr/0": rates[-1]}
    assert record.values == {"lr/0": [rates[-1]]}
    assert (record.bytes, record.collectives) == (0, 0)
