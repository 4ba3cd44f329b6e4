"""Schedulers on a stack: values of each replica, syncs, and the phases of a run.

In phases: the end of fan-out, and scalars that are explored after the learning rate.
"""

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
from hdet_kernels.ensemble import SingleReplica
from tests.stack.trainer import (
    DECAY,
    REPLICAS,
    SHORT,
    StackTrainer,
    data,
    departures,
    learning_rates,
    probed_trainer,
    shifted_loss,
    two_groups,
)
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
    assert type(trainer.optimizer.param_groups[0]["lr"]) is type(lr)


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


@pytest.mark.parametrize(("name", "warnings"), [("shift", 0), ("shfit", 1)])
def test_a_scalar_that_no_loss_reads_is_warned_about_once(
    name: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = StackTrainer(gradients="local", explore=[hk.Explore(name, base=0.5)], auto_lr=False)
    if name == "shift":
        trainer.loss_fn = shifted_loss(trainer.stack, [])
    trainer.train(3)
    assert not caplog.messages
    trainer.train(9)
    assert (
        sum(f"hyper[{name!r}] was given new values, but no loss has read it" in m for m in caplog.messages) == warnings
    )


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


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_a_non_finite_replica_is_excluded_and_replaced_by_the_mean(gradients: str) -> None:
    trainer = StackTrainer(gradients=gradients, make_optimizer=hk.FusedAdamW).train(3)
    first = next(trainer.stack.parameters())
    losses = trainer.stack.backward(loss_of, *data(3))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    with torch.no_grad():
        first[2, 0] = math.nan
    mean = trainer.parameters()[[0, 1, 3]].double().mean(dim=0)
    trainer.scheduler.step(losses)
    assert trainer.scheduler.history[-1].excluded == [2]
    for row in trainer.parameters():
        torch.testing.assert_close(row.double(), mean, rtol=1e-6, atol=1e-7)
    trainer.train(4)
    assert trainer.scheduler.history[-1].excluded == []
    assert trainer.parameters().isfinite().all()


def test_replicas_with_a_non_finite_loss_are_excluded_unless_all_are() -> None:
    """If a controller may not undo it."""
    trainer = StackTrainer(auto_lr=hk.RegressionController(undo=0)).train(3)
    losses = trainer.stack.backward(loss_of, *data(3))
    trainer.optimizer.step()
    before = trainer.parameters()
    with pytest.raises(RuntimeError, match="no replica is sound at step 4"):
        trainer.scheduler.step(torch.full_like(losses, math.nan))
    assert torch.equal(trainer.parameters(), before), "nothing is overwritten"
    trainer = StackTrainer(auto_lr=hk.RegressionController(undo=0)).train(3)
    losses = trainer.stack.backward(loss_of, *data(3))
    trainer.optimizer.step()
    losses[1] = math.inf
    trainer.scheduler.step(losses)
    assert trainer.scheduler.history[-1].excluded == [1]


def test_consensus_shows_the_mean_and_restores_the_replicas() -> None:
    trainer = StackTrainer().train(6)
    own = trainer.parameters()
    with trainer.scheduler.consensus():
        inside = trainer.parameters()
        averaged = trainer.stack.module()
    assert torch.equal(trainer.parameters(), own)
    mean = own.double().mean(dim=0).float()
    for row in inside:
        torch.testing.assert_close(row, mean, rtol=1e-6, atol=1e-7)
    found = torch.cat([p.detach().reshape(-1) for p in averaged.parameters()])
    torch.testing.assert_close(found, mean, rtol=1e-6, atol=1e-7)
    trainer.scheduler.converge()
    assert (trainer.parameters() == trainer.parameters()[:1]).all()
    assert trainer.scheduler.history[-1].kind == "manual"


def test_buffers_are_averaged_in_their_memory_format() -> None:
    module = network(batch_norm=True)
    module.register_buffer("kernel", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    stack = hk.ReplicaStack(module, REPLICAS)
    scheduler = hk.HDETOneCycleLR(hk.FusedAdamW(stack.parameters()), 0.01, 24, ensemble=stack.ensemble)
    buffers = [buffer for buffer in stack.buffers() if buffer.is_floating_point()]
    for buffer in buffers:
        buffer.copy_(torch.randn(buffer.shape))
    means, strides = [buffer.mean(0) for buffer in buffers], [buffer.stride() for buffer in buffers]
    scheduler.converge()
    for buffer, mean in zip(buffers, means, strict=True):
        torch.testing.assert_close(buffer, mean.expand_as(buffer))
    assert [buffer.stride() for buffer in buffers] == strides


def test_infinities_of_a_mask_do_not_exclude_a_replica() -> None:
    """Infinities that a buffer had from the start are allowed; new ones exclude the replica."""
    module = network()
    mask = torch.full((3, 3), -torch.inf).triu(1)
    module.register_buffer("mask", mask)
    module.register_buffer("mean", torch.zeros(2))
    stack = hk.ReplicaStack(module, REPLICAS)
    scheduler = hk.HDETOneCycleLR(hk.FusedAdamW(stack.parameters()), 0.01, 24, ensemble=stack.ensemble)
    masks, means = stack.buffers()
    scheduler.converge()
    means[1, 0] = torch.inf
    scheduler.converge()
    assert [record.excluded for record in scheduler.history] == [[], [1]]
    assert torch.equal(masks, mask.expand_as(masks))
    assert not means.any()


def test_a_probe_returns_a_loss_per_replica() -> None:
    calls = []
    trainer = StackTrainer(total_steps=40, sync_every=2)

    def probe() -> Tensor:
        losses = trainer.stack.losses(loss_of, *data(1000), same_batch=True)
        calls.append(losses)
        return losses

    trainer.scheduler.cycle.probe = probe
    trainer.train(2)
    assert trainer.scheduler.history[0].probes == pytest.approx(calls[0].tolist())


def test_initial_noise_equals_that_of_separate_processes() -> None:
    stack = hk.ReplicaStack(network(), 3)
    hk.warm_noisy_init_(stack.parameters(), seed=7, ensemble=stack.ensemble)
    for replica in range(3):
        model, place = network(), SingleReplica()
        place.replica = replica  # the place of the process that would hold it
        hk.warm_noisy_init_(model.parameters(), seed=7, ensemble=place)
        for stacked, plain in zip(stack.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(stacked[replica], plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"probe": None},
        {"auto_lr": True},
        {"auto_lr": False},
        {"spread": 0.0},
        {"auto_lr": hk.HypergradientController()},
        {"auto_lr": hk.SoftmaxController(warmup_steps=20)},
    ],
    ids=["no probe", "probe", "no controller", "no spread", "hypergradient", "softmax"],
)
def test_no_controller_of_ours_has_early_syncs(options: dict[str, Any]) -> None:
    make = StackTrainer if "probe" in options else probed_trainer
    trainer = make(**{"total_steps": 80, "sync_every": 8, **options}).train(10)
    assert [record.step for record in trainer.scheduler.history] == [8]


def test_with_a_probe_a_replica_departs_in_at_most_one_group_and_two_in_none() -> None:
    """Those two stay equal bit for bit, from which the controller concludes that losses have no noise."""
    trainer = probed_trainer(replicas=8, make_optimizer=two_groups, tie_groups=False)
    for _ in range(20):
        departing = departures(trainer)
        assert departing.sum(axis=0).tolist().count(0) == 2
        assert departing.sum() == 6
        assert set(departing.sum(axis=1).tolist()) == {2, 4}
        trainer.train(1)
    for record in trainer.scheduler.history:
        values = np.array([record.values["lr/0"], record.values["lr/1"]])
        equal = np.flatnonzero((values == np.median(values, axis=1, keepdims=True)).all(axis=0))
        assert record.probes is not None
        assert len({record.probes[replica] for replica in equal}) == 1
    squares, spare = trainer.scheduler.cycle.spread.controller_state["noise"]
    assert squares == 0
    assert spare > 0


@pytest.mark.parametrize(
    "options",
    [{"probe": None}, {"gradients": "local"}, {"auto_lr": hk.SoftmaxController(warmup_steps=40)}, {"auto_lr": False}],
    ids=["no probe", "local gradients", "softmax", "no controller"],
)
def test_otherwise_all_replicas_depart_in_all_groups(options: dict[str, Any]) -> None:
    make = StackTrainer if "probe" in options else probed_trainer
    long: dict[str, Any] = {"total_steps": 160, "sync_every": 16, "tie_groups": False}
    trainer = make(**{"replicas": 8, "make_optimizer": two_groups, **long, **options})
    assert departures(trainer).all()


@pytest.mark.parametrize(
    "options",
    [{}, {"gradients": "local"}, pytest.param({"probe": None}, marks=pytest.mark.full)],
    ids=["probe", "local", "no probe"],
)
def test_replicas_depart_until_the_controller_stops(options: dict[str, Any]) -> None:
    """At 30 % of 40 steps there is a sync; from then on all replicas have the base values."""
    make = StackTrainer if "probe" in options else probed_trainer
    trainer = make(**{"replicas": 8, **SHORT, **options})
    for step in range(25):
        assert departures(trainer).any() == (step < 12)
        trainer.train(1)


@pytest.mark.parametrize(
    "options",
    [
        {"auto_lr": False},
        {"auto_lr": hk.SoftmaxController(warmup_steps=5)},
        {"auto_lr": hk.RegressionController(stop_at=1.0)},
        {"sync_every": 12},
    ],
    ids=["no controller", "softmax", "to the end", "never acts"],
)
def test_replicas_depart_to_the_end_unless_a_controller_stops(options: dict[str, Any]) -> None:
    trainer = StackTrainer(**{"total_steps": 20, "sync_every": 2, **options}).train(19)
    assert departures(trainer).any()


def test_replicas_stay_equal_after_the_controller_stops() -> None:
    """Bit for bit. Syncs go on, for buffers and for replicas that become non-finite."""
    trainer = probed_trainer(replicas=8, **SHORT).train(15)
    assert (trainer.parameters() == trainer.parameters()[0]).all()
    before = len(trainer.scheduler.history)
    trainer.train(10)
    assert (trainer.parameters() == trainer.parameters()[0]).all()
    assert [record.step for record in trainer.scheduler.history[before:]] == [16, 20, 24]
    assert all(len(set(record.values["lr/0"])) == 1 for record in trainer.scheduler.history[before:])


def decays(trainer: StackTrainer) -> list[bool]:
    """Return which replicas have another weight decay than the base one."""
    return [value != trainer.scheduler.cycle.spread.base(1) for value in trainer.scheduler.cycle.spread.values(1)]


@pytest.mark.parametrize(("gradients", "several"), [("shared", 6), ("local", 8)])
def test_other_scalars_are_explored_after_the_learning_rate(gradients: Any, several: int) -> None:
    """Learning rates are explored up to the sync at 30 % of 40 steps, weight decay up to that at 90 %.

    In the cycle that ends at 30 % both are explored. In pairs, one replica of four departs in nothing.
    """
    trainer = probed_trainer(**DECAY, gradients=gradients)
    for step in range(40):
        if step < 8 or step >= 12:
            assert departures(trainer).sum() == (several if step < 12 else 0)
            assert sum(decays(trainer)) == (several if 12 <= step < 36 else 0)
        else:
            assert departures(trainer).any()
            assert any(decays(trainer))
        trainer.train(1)
    history = trainer.scheduler.history
    assert {record.base["weight_decay/0"] for record in history if record.step <= 12} == {0.1}
    if gradients == "shared":
        assert history[-1].base["weight_decay/0"] != 0.1


@pytest.mark.parametrize("gradients", ["shared", pytest.param("local", marks=pytest.mark.full)])
def test_a_replica_that_becomes_non_finite_while_only_weight_decay_is_explored(gradients: Any) -> None:
    """It is excluded and replaced by the mean. The learning rate stays; weight decay follows the finite replicas."""
    trainer = probed_trainer(**DECAY, gradients=gradients).train(19)
    losses = trainer.stack.backward(loss_of, *data(19, 8))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    with torch.no_grad():
        next(trainer.stack.parameters())[2] = math.nan
    before = trainer.scheduler.cycle.spread.controller_state["mu"]
    trainer.scheduler.step(losses)
    now, after = trainer.scheduler.history[-1], trainer.scheduler.cycle.spread.controller_state["mu"]
    assert (now.step, now.excluded) == (20, [2])
    assert len(set(now.values["lr/0"])) == 1
    assert after[0] == before[0]
    assert math.isfinite(after[1])
    trainer.train(20)
    assert [record.excluded for record in trainer.scheduler.history if record.step > 20] == [[]] * 5
    assert trainer.parameters().isfinite().all()
    assert 0 < trainer.scheduler.history[-1].base["weight_decay/0"] < math.inf
