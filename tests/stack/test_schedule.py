"""Schedulers on a stack: learning rates and other scalars of each replica, and arguments that are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import hdet_kernels as hk
from tests.stack.trainer import REPLICAS, StackTrainer, data, learning_rates, shifted_loss, two_groups
from tests.training import loss_of, network


def test_each_replica_has_its_own_learning_rate_and_the_group_the_base_rate() -> None:
    trainer = StackTrainer(auto_lr=False, spread=0.3)
    plain = torch.optim.AdamW(network().parameters(), lr=0.01)
    schedule = OneCycleLR(plain, 0.01, 24)
    for step in range(8):
        base = plain.param_groups[0]["lr"]
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(base, rel=1e-12)
        order = hk.permutation(REPLICAS, seed=0, cycle=step // 4, hyperparameter="lr/0")
        assert learning_rates(trainer) == pytest.approx(base * hk.multipliers(REPLICAS, 0.3)[order], rel=1e-12)
        trainer.train(1)
        plain.step()
        schedule.step()
    assert trainer.scheduler.get_last_lr() == [trainer.optimizer.param_groups[0]["lr"]]


def test_tensor_learning_rates_train_like_floats() -> None:
    trainer = StackTrainer(auto_lr=False, lr=torch.tensor(0.01))
    other = StackTrainer(auto_lr=False)
    for each in (trainer, other):
        each.train(6)
    assert isinstance(trainer.optimizer.param_groups[0]["lr"], Tensor)
    assert learning_rates(trainer) == pytest.approx(learning_rates(other), rel=1e-6)
    torch.testing.assert_close(trainer.parameters(), other.parameters(), rtol=1e-5, atol=1e-6)


def test_a_learning_rate_set_by_hand_holds_for_all_replicas_until_the_next_step() -> None:
    trainer = StackTrainer(make_optimizer=hk.FusedSGD, cycle_momentum=False).train(2)
    before = trainer.parameters()
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    trainer.train(1)
    assert torch.equal(trainer.parameters(), before)
    trainer.train(1)
    assert not torch.equal(trainer.parameters(), before)


def test_a_new_scheduler_removes_scalars_explored_by_the_old_one() -> None:
    trainer = StackTrainer(explore=[hk.Explore("weight_decay")]).train(24)
    assert set(trainer.optimizer.param_groups[0]["per_replica"]) == {"lr", "weight_decay"}
    hk.HDETOneCycleLR(trainer.optimizer, 0.01, 24, ensemble=trainer.stack.ensemble)
    assert set(trainer.optimizer.param_groups[0]["per_replica"]) == {"lr"}


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
def test_the_optimizer_uses_the_learning_rate_of_each_replica(lr: Any) -> None:
    trainer = StackTrainer(make_optimizer=hk.FusedSGD, cycle_momentum=False, lr=lr)
    for _ in range(3):
        before, own = trainer.parameters(), torch.tensor(learning_rates(trainer))
        moved = (trainer.train(1).parameters() - before).norm(dim=1)
        torch.testing.assert_close(moved / moved.mean(), own / own.mean(), rtol=1e-3, atol=0)
    assert moved.std() > 0.05 * moved.mean()


def test_any_scalar_of_the_optimizer_can_be_explored() -> None:
    explore = [
        hk.Explore("weight_decay", base=0.1, spread=0.5),
        hk.Explore("betas[1]", spread=0.005, bounds=(0.9, 0.9999)),
    ]
    trainer = StackTrainer(explore=explore, auto_lr=False)
    own = trainer.optimizer.param_groups[0]["per_replica"]
    assert sorted(own["weight_decay"]) == pytest.approx(0.1 * hk.multipliers(REPLICAS, 0.5))
    assert sorted(own["betas[1]"]) == pytest.approx(np.minimum(0.999 * hk.multipliers(REPLICAS, 0.005), 0.9999))
    trainer.train(8)
    assert sorted(trainer.scheduler.history[0].values["weight_decay/0"]) == pytest.approx(
        0.1 * hk.multipliers(REPLICAS, 0.5)
    )


def test_without_spread_every_replica_is_plain_training_on_the_whole_batch() -> None:
    trainer = StackTrainer(spread=0.0).train(8)
    model = network()
    optimizer = hk.FusedAdamW(model.parameters(), lr=0.01)
    schedule = OneCycleLR(optimizer, 0.01, 24)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, *data(step)).backward()
        optimizer.step()
        schedule.step()
    expected = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for row in trainer.parameters():
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-6)


def test_a_stack_of_one_trains_with_the_base_values() -> None:
    trainer = StackTrainer(replicas=1).train(8)
    assert trainer.scheduler.history[-1].values["lr/0"] == [trainer.scheduler.history[-1].base["lr/0"]]


def test_any_torch_schedule() -> None:
    trainer = StackTrainer(
        make_scheduler=lambda optimizer, **options: hk.HDETScheduler(
            CosineAnnealingLR(optimizer, 24), sync_every=4, auto_lr=False, **options
        )
    )
    plain = torch.optim.AdamW(network().parameters(), lr=0.01)
    cosine = CosineAnnealingLR(plain, 24)
    for _ in range(9):
        trainer.train(1)
        plain.step()
        cosine.step()
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(plain.param_groups[0]["lr"], rel=1e-12)
        assert np.mean(learning_rates(trainer)) == pytest.approx(plain.param_groups[0]["lr"], rel=1e-12)
    assert [record.step for record in trainer.scheduler.history] == [4, 8]


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_explored_scalars_reach_the_loss(gradients: str) -> None:
    explore = [hk.Explore("shift", base=0.5, spread=0.5, bounds=(0.1, 0.7))]
    trainer = StackTrainer(gradients=gradients, explore=explore, auto_lr=False, spread=0.0)
    seen: list[Tensor] = []
    trainer.loss_fn = shifted_loss(trainer.stack, seen)
    order = hk.permutation(REPLICAS, seed=0, cycle=0, hyperparameter="shift")
    values = np.clip(0.5 * hk.multipliers(REPLICAS, 0.5), 0.1, 0.7)[order]
    torch.testing.assert_close(trainer.stack.hyper["shift"], torch.tensor(values, dtype=torch.float32))
    x, y = data(0)
    losses = trainer.stack.backward(trainer.loss_fn, x, y)
    plain = network()
    for replica, part in enumerate(zip(x.chunk(REPLICAS), y.chunk(REPLICAS), strict=True)):
        expected = F.mse_loss(plain(part[0]), part[1] + float(values[replica]))
        torch.testing.assert_close(losses[replica], expected.detach())
    assert all(value.dim() == 0 for value in seen)
    trainer.stack.zero_grad()
    trainer.train(5)
    again = hk.permutation(REPLICAS, seed=0, cycle=1, hyperparameter="shift")
    values = np.clip(0.5 * hk.multipliers(REPLICAS, 0.5), 0.1, 0.7)[again]
    torch.testing.assert_close(trainer.stack.hyper["shift"], torch.tensor(values, dtype=torch.float32))


def test_an_apply_function_gets_the_values_of_all_replicas() -> None:
    got: list[Any] = []
    StackTrainer(explore=[hk.Explore("temperature", base=2.0, apply=got.append)], auto_lr=False)
    assert len(got[-1]) == REPLICAS
    assert sorted(got[-1]) == pytest.approx(2.0 * hk.multipliers(REPLICAS, 0.3))


def test_the_controller_moves_a_scalar_of_the_loss_with_local_gradients() -> None:
    """The loss is smallest without the shift, and the controller lowers it."""
    trainer = StackTrainer(
        replicas=8,
        gradients="local",
        explore=[hk.Explore("shift", base=0.5, spread=0.5)],
        spread=0.0,
        total_steps=80,
        sync_every=2,
        make_optimizer=hk.FusedSGD,
    )
    probe = data(1000, 8)
    trainer.loss_fn = shifted_loss(trainer.stack, [])
    trainer.scheduler.cycle.probe = lambda: trainer.stack.losses(loss_of, *probe, same_batch=True)
    trainer.train(80)
    assert trainer.scheduler.history[-1].base["shift"] < 0.4


def test_step_takes_one_loss_per_replica() -> None:
    trainer = StackTrainer()
    losses = trainer.stack.backward(loss_of, *data(0))
    trainer.optimizer.step()
    for given, error, message in (
        (losses.mean(), ValueError, r"must have shape \[4\], got \[\]: pass one for each of the 4 replicas"),
        (1.0, TypeError, r"must be \[4\] numbers, got 1.0"),
        (losses[:3], ValueError, r"must have shape \[4\], got \[3\]"),
        ("loss", TypeError, "got 'loss'"),
    ):
        with pytest.raises(error, match=message):
            trainer.scheduler.step(given)
    assert trainer.scheduler.last_epoch == 0
    trainer.scheduler.step(losses.tolist())


def test_more_than_64_replicas_in_a_process_are_refused() -> None:
    """Refused when the scheduler is built, not at the first sync."""
    with pytest.raises(ValueError, match=r"at most 64 replicas of one process are averaged, got 65"):
        StackTrainer(replicas=65)


def test_an_unknown_scalar_without_a_base_is_refused() -> None:
    with pytest.raises(ValueError, match="'temperature' is not a key of the optimizer's parameter groups"):
        StackTrainer(explore=[hk.Explore("temperature")])


def test_a_scalar_that_no_loss_reads_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = StackTrainer(gradients="local", explore=[hk.Explore("temprature", base=1.0)], auto_lr=False)
    trainer.train(3)
    assert not caplog.messages
    trainer.train(9)
    assert sum("hyper['temprature'] was given new values, but no loss has read it" in m for m in caplog.messages) == 1


def test_a_scalar_that_the_loss_reads_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    trainer = StackTrainer(gradients="local", explore=[hk.Explore("shift", base=0.5)], auto_lr=False)
    trainer.loss_fn = shifted_loss(trainer.stack, [])
    trainer.train(12)
    assert not caplog.messages


def test_a_scalar_of_the_loss_with_shared_gradients_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    StackTrainer(explore=[hk.Explore("shift", base=0.5)])
    assert "shift cannot be explored with shared gradients" in caplog.messages[0]


def test_a_group_with_learning_rate_zero_stays_frozen() -> None:
    def frozen(optimizer: Any, **options: Any) -> hk.HDETOneCycleLR:
        return hk.HDETOneCycleLR(optimizer, [0.0, 1e-4], 80, sync_every=2, **options)

    trainer = StackTrainer(make_optimizer=two_groups, make_scheduler=frozen)
    before = trainer.parameters().clone()
    count = next(iter(trainer.stack.parameters()))[0].numel()
    trainer.train(40)
    assert trainer.scheduler.cycle.run.peaks == (None, 1e-4)
    assert all(record.base["lr/0"] == 0 for record in trainer.scheduler.history)
    assert torch.equal(trainer.parameters()[:, :count], before[:, :count])
    assert not torch.equal(trainer.parameters()[:, count:], before[:, count:])


@pytest.mark.parametrize(("bounds", "low"), [((0.05, 0.2), math.log(0.5)), ((0.0, 0.2), -math.inf)])
def test_controllers_know_the_range_that_bounds_allow(bounds: tuple[float, float], low: float) -> None:
    trainer = StackTrainer(explore=[hk.Explore("weight_decay", base=0.1, bounds=bounds)], total_steps=160)
    rate, decay = trainer.scheduler.cycle.run.reach
    assert rate == (-math.inf, math.inf)
    assert decay == pytest.approx((low, math.log(2)))
