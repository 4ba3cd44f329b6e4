"""The schedulers: torch's schedule times the multiplier of the replica, around any schedule; promises of auto_lr."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules

import hdet_kernels as hk
from tests.schedule.cases import Place, adam, advance, groups_of, parameters
from tests.training import batch, loss_of, network, same

TOTAL = 37


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


@pytest.mark.parametrize("replica", range(4))
def test_every_group_is_scaled_by_its_own_permutation_from_the_first_step(replica: int) -> None:
    optimizer = Adam([{"params": [p]} for p in parameters()], lr=1.0)
    plain = Adam([{"params": [p]} for p in parameters()], lr=1.0)
    reference = schedules.OneCycleLR(plain, max_lr=0.1, total_steps=TOTAL)
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        0.1,
        TOTAL,
        spread=0.2,
        sync_every=5,
        auto_lr=False,
        ensemble=Place(4, replica),
        seed=3,
        tie_groups=False,
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
        applied = dropout.p
        advance(optimizer, scheduler)
        if step % 4 == 3:
            assert scheduler.history[-1].values["dropout"][2] == applied
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
@pytest.mark.parametrize("tensor_lr", [False, pytest.param(True, marks=pytest.mark.full)], ids=["float", "tensor"])
@pytest.mark.parametrize("make", WRAPPED.values(), ids=WRAPPED)
def test_any_scheduler_can_be_wrapped(
    make: Callable[[Optimizer], schedules.LRScheduler], tensor_lr: bool, spread: float
) -> None:
    """The wrapped schedule gives its own values, also if it computes the next one from the current one."""
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


def test_a_wrapped_scheduler_of_unknown_length_needs_it() -> None:
    optimizer = adam()
    with pytest.raises(ValueError, match="pass total_steps="):
        hk.HDETScheduler(schedules.ExponentialLR(optimizer, 0.9))
    with pytest.raises(ValueError, match="needs its length"):
        hk.HDETScheduler(schedules.ExponentialLR(optimizer, 0.9), sync_every=3)
    assert hk.HDETScheduler(schedules.CosineAnnealingLR(optimizer, 160)).sync_every == 2
    optimizer = adam()
    scheduler = hk.HDETScheduler(schedules.ExponentialLR(optimizer, 0.9), sync_every=3, auto_lr=False)
    for _ in range(10):
        advance(optimizer, scheduler)
    assert [r.step for r in scheduler.history] == [3, 6, 9]


def test_a_wrapped_onecycle_refuses_steps_past_its_end() -> None:
    optimizer = adam()
    scheduler = hk.HDETScheduler(schedules.OneCycleLR(optimizer, 0.1, total_steps=4), sync_every=3, auto_lr=False)
    for _ in range(4):
        advance(optimizer, scheduler)
    assert [(r.step, r.kind) for r in scheduler.history] == [(3, "sync"), (4, "last")]
    before = groups_of(optimizer), scheduler.last_epoch
    with pytest.raises(ValueError, match="step 5 is past the end: total_steps is 4"):
        scheduler.step()
    assert (groups_of(optimizer), scheduler.last_epoch) == before


def test_an_optimizer_without_parameters_is_refused() -> None:
    empty = Adam([{"params": []}], lr=0.1)
    with pytest.raises(ValueError, match="no parameters to average"):
        hk.HDETOneCycleLR(empty, 0.1, 10)


def test_bounds_of_a_tensor_learning_rate_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_groups_that_lost_their_momenta_are_named_when_a_state_is_loaded() -> None:
    """A damaged checkpoint of the optimizer, loaded before that of the scheduler."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, auto_lr=False)
    state = scheduler.state_dict()
    del optimizer.param_groups[0]["base_momentum"]
    with pytest.raises(ValueError, match="parameter group 0 of the optimizer has no 'base_momentum'"):
        scheduler.load_state_dict(state)


LONG, SYNC = 240, 6


def train_stack(
    max_lr: float, steps: int = LONG, *, scaled_after: int | None = None, rank: int = 0, first: int = 0, **options: Any
) -> tuple[hk.HDETOneCycleLR, list[Tensor], Tensor]:
    """Train four replicas on shared gradients; return the scheduler, the losses of all steps and the parameters.

    Args:
        scaled_after: the step after which all weights are multiplied by 10 000.
        rank: that of the batches.
        first: the number of the first one.
    """
    stack = hk.ReplicaStack(network(), 4, gradients="shared")
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.01, backend="torch")
    options = {"sync_every": SYNC, "cycle_momentum": False, "total_steps": LONG, **options}
    scheduler = hk.HDETOneCycleLR(optimizer, max_lr, ensemble=stack.ensemble, **options)
    losses = []
    for step in range(steps):
        losses.append(stack.backward(loss_of, *batch(rank, first + step, size=64)).detach())
        optimizer.step()
        if step + 1 == scaled_after:
            with torch.no_grad():
                for param in stack.parameters():
                    param.mul_(1e4)
        optimizer.zero_grad()
        scheduler.step(losses[-1])
    return scheduler, losses, torch.cat([param.detach().reshape(-1) for param in stack.parameters()])


def last_loss(losses: list[Tensor]) -> float:
    return float(torch.stack(losses[-20:]).mean())


@pytest.mark.full
@pytest.mark.parametrize("trust", [1.0, 3.0])
def test_a_good_learning_rate_is_kept(trust: float) -> None:
    """Bit for bit as without a controller: with trust=1 to the end, else until replicas stop to differ at the peak."""
    scheduler, losses, parameters = train_stack(0.02, trust=trust)
    _, plain, expected = train_stack(0.02, auto_lr=False)
    assert scheduler.cycle.spread.controller_state["mu"] == [0.0]
    same_until = LONG if trust == 1 else int(0.3 * LONG)
    assert same(losses[: same_until + 1], plain[: same_until + 1])
    assert torch.equal(parameters, expected) is (trust == 1)
    assert last_loss(losses) < 1.1 * last_loss(plain)


def test_full_trust_and_a_probe_are_as_without_a_controller() -> None:
    def probe() -> float:
        raise AssertionError("nothing is compared")

    assert torch.equal(train_stack(0.02, 30, trust=1, probe=probe)[2], train_stack(0.02, 30, auto_lr=False)[2])


def test_full_trust_leaves_the_learning_rate_beside_other_scalars() -> None:
    # Weight decay is moved from 0.3 of the run on.
    scheduler, *_ = train_stack(0.02, LONG // 2, trust=1, explore=[hk.Explore("weight_decay", spread=0.5)])
    rate, decay = scheduler.cycle.spread.controller_state["mu"]
    assert rate == 0.0
    assert decay != 0.0


@pytest.mark.full
def test_what_is_a_hundred_times_too_high_begins_anew_and_ends_better_than_plain() -> None:
    scheduler, losses, _ = train_stack(2.0)
    _, plain, _ = train_stack(2.0, auto_lr=False)
    (mu,) = scheduler.cycle.spread.controller_state["mu"]
    returns = scheduler.history_summary.undone
    assert returns >= 1
    assert mu == pytest.approx(-returns * math.log(hk.controller.RegressionSettings().cut))
    assert last_loss(losses) < last_loss(plain)


@pytest.mark.full
@pytest.mark.parametrize(("rank", "after"), [(0, 2), (1, 7), (2, 2)])
def test_weights_that_were_ruined_early_are_given_up(rank: int, after: int) -> None:
    """As soon as it is seen, the run is one at the lowered peak over the steps that remain."""
    given: dict[str, Any] = {"total_steps": 400, "sync_every": 5, "rank": rank}
    scheduler, losses, _ = train_stack(0.02, 400, scaled_after=after, **given)
    returned = [record for record in scheduler.history if record.undone is not None]
    assert len(returned) == 1
    left, peak = 400 - returned[0].step, 0.02 / hk.controller.RegressionSettings().cut
    given |= {"total_steps": left, "first": returned[0].step}
    _, plain, _ = train_stack(peak, left, auto_lr=False, **given)
    assert last_loss(losses) < 1.1 * last_loss(plain)
