"""The schedulers over a stack: values, losses, syncs and checkpoints of R replicas in one process."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, OneCycleLR

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from tests.training import batch, loss_of, network, same

REPLICAS = 4


def data(step: int, replicas: int = REPLICAS) -> tuple[Tensor, Tensor]:
    x, y = (torch.cat(parts) for parts in zip(*(batch(r, step) for r in range(replicas)), strict=True))
    return x, y


class StackTrainer:
    """Stack, optimizer and scheduler."""

    def __init__(
        self,
        *,
        replicas: int = REPLICAS,
        gradients: Any = "shared",
        make_optimizer: Any = hk.FusedAdamW,
        make_scheduler: Any = hk.HDETOneCycleLR,
        lr: Any = 0.01,
        batch_norm: bool = False,
        **options: Any,
    ) -> None:
        self.stack = hk.ReplicaStack(network(batch_norm), replicas, gradients=gradients)
        self.optimizer = make_optimizer(self.stack.parameters(), lr=lr)
        options = {"ensemble": self.stack.ensemble, **options}
        if make_scheduler is hk.HDETOneCycleLR:
            options = {"max_lr": 0.01, "total_steps": 24, "sync_every": 4, **options}
        self.scheduler = make_scheduler(self.optimizer, **options)
        self.loss_fn = loss_of

    def train(self, steps: int) -> StackTrainer:
        for _ in range(steps):
            losses = self.stack.backward(self.loss_fn, *data(self.scheduler.last_epoch, self.stack.replicas))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step(losses)
        return self

    def parameters(self) -> Tensor:
        """[R, n]"""
        return torch.cat([p.detach().flatten(1) for p in self.stack.parameters()], dim=1)

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = (self.stack, self.optimizer, self.scheduler)
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, saved: bytes) -> StackTrainer:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip((self.stack, self.optimizer, self.scheduler), states, strict=True):
            part.load_state_dict(state)
        return self


def rates(trainer: StackTrainer, group: int = 0) -> list[float]:
    return [float(rate) for rate in trainer.optimizer.param_groups[group]["per_replica"]["lr"]]


# Values


def test_every_replica_has_its_own_learning_rate_and_the_group_the_base() -> None:
    trainer = StackTrainer(auto_lr=False, spread=0.3)
    plain = torch.optim.AdamW(network().parameters(), lr=0.01)
    schedule = OneCycleLR(plain, 0.01, 24)
    for step in range(8):
        base = plain.param_groups[0]["lr"]
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(base, rel=1e-12)
        order = hk.permutation(REPLICAS, seed=0, cycle=step // 4, hyperparameter="lr/0")
        assert rates(trainer) == pytest.approx(base * hk.multipliers(REPLICAS, 0.3)[order], rel=1e-12)
        trainer.train(1)
        plain.step()
        schedule.step()
    assert trainer.scheduler.get_last_lr() == [trainer.optimizer.param_groups[0]["lr"]]


def test_rates_that_are_tensors() -> None:
    trainer = StackTrainer(auto_lr=False, lr=torch.tensor(0.01))
    other = StackTrainer(auto_lr=False)
    for each in (trainer, other):
        each.train(6)
    assert isinstance(trainer.optimizer.param_groups[0]["lr"], Tensor)
    assert rates(trainer) == pytest.approx(rates(other), rel=1e-6)
    torch.testing.assert_close(trainer.parameters(), other.parameters(), rtol=1e-5, atol=1e-6)


def test_a_rate_written_by_hand_is_that_of_all_replicas_until_the_next_step() -> None:
    trainer = StackTrainer(make_optimizer=hk.FusedSGD, cycle_momentum=False).train(2)
    before = trainer.parameters()
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    trainer.train(1)
    assert torch.equal(trainer.parameters(), before)
    trainer.train(1)
    assert not torch.equal(trainer.parameters(), before)


def test_what_one_scheduler_explored_is_not_left_to_the_next() -> None:
    trainer = StackTrainer(explore=[hk.Explore("weight_decay")]).train(24)
    assert set(trainer.optimizer.param_groups[0]["per_replica"]) == {"lr", "weight_decay"}
    hk.HDETOneCycleLR(trainer.optimizer, 0.01, 24, ensemble=trainer.stack.ensemble)
    assert set(trainer.optimizer.param_groups[0]["per_replica"]) == {"lr"}


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
def test_the_optimizer_reads_the_rate_of_every_replica(lr: Any) -> None:
    trainer = StackTrainer(make_optimizer=hk.FusedSGD, cycle_momentum=False, lr=lr)
    for _ in range(3):
        before, own = trainer.parameters(), torch.tensor(rates(trainer))
        moved = (trainer.train(1).parameters() - before).norm(dim=1)
        torch.testing.assert_close(moved / moved.mean(), own / own.mean(), rtol=1e-3, atol=0)
    assert moved.std() > 0.05 * moved.mean()


def test_any_scalar_of_the_optimizer_is_explored_by_replica() -> None:
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


def test_without_spread_all_replicas_are_plain_training_on_the_whole_batch() -> None:
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


def test_a_stack_of_one_is_a_single_replica() -> None:
    trainer = StackTrainer(replicas=1).train(8)
    assert trainer.scheduler.history[-1].values["lr/0"] == [trainer.scheduler.history[-1].base["lr/0"]]


def test_another_schedule() -> None:
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
        assert np.mean(rates(trainer)) == pytest.approx(plain.param_groups[0]["lr"], rel=1e-12)
    assert [record.step for record in trainer.scheduler.history] == [4, 8]


# Explored scalars of the loss


def smoothed(stack: hk.ReplicaStack, seen: list[Tensor]) -> Any:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(stack.hyper["shift"])
        return F.mse_loss(model(x), y + stack.hyper["shift"])

    return loss_fn


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_explored_scalars_reach_the_loss(gradients: str) -> None:
    explore = [hk.Explore("shift", base=0.5, spread=0.5, bounds=(0.1, 0.7))]
    trainer = StackTrainer(gradients=gradients, explore=explore, auto_lr=False, spread=0.0)
    seen: list[Tensor] = []
    trainer.loss_fn = smoothed(trainer.stack, seen)
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


def test_a_setter_gets_the_values_of_all_replicas() -> None:
    got: list[Any] = []
    StackTrainer(explore=[hk.Explore("temperature", base=2.0, apply=got.append)], auto_lr=False)
    assert len(got[-1]) == REPLICAS
    assert sorted(got[-1]) == pytest.approx(2.0 * hk.multipliers(REPLICAS, 0.3))


def test_a_scalar_of_the_loss_is_found_by_local_gradients() -> None:
    """The loss is least without the shift, and the controller finds out to which side to go."""
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
    trainer.loss_fn = smoothed(trainer.stack, [])
    trainer.scheduler.cycle.probe = lambda: trainer.stack.losses(loss_of, *probe, same_batch=True)
    trainer.train(80)
    assert trainer.scheduler.history[-1].base["shift"] < 0.4


# Syncs


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_a_bad_replica_is_left_out_and_healed(gradients: str) -> None:
    trainer = StackTrainer(gradients=gradients, make_optimizer=hk.FusedAdamW).train(3)
    first = next(trainer.stack.parameters())
    losses = trainer.stack.backward(loss_of, *data(3))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    with torch.no_grad():
        first[2, 0] = math.nan
    sound = trainer.parameters()[[0, 1, 3]].double().mean(dim=0)
    trainer.scheduler.step(losses)
    assert trainer.scheduler.history[-1].excluded == [2]
    for row in trainer.parameters():
        torch.testing.assert_close(row.double(), sound, rtol=1e-6, atol=1e-7)
    trainer.train(4)
    assert trainer.scheduler.history[-1].excluded == []
    assert trainer.parameters().isfinite().all()


def test_a_replica_whose_loss_is_not_finite_is_left_out() -> None:
    trainer = StackTrainer().train(3)
    losses = trainer.stack.backward(loss_of, *data(3))
    trainer.optimizer.step()
    losses[1] = math.inf
    trainer.scheduler.step(losses)
    assert trainer.scheduler.history[-1].excluded == [1]


def test_when_all_replicas_are_bad_nothing_is_overwritten() -> None:
    trainer = StackTrainer().train(3)
    losses = trainer.stack.backward(loss_of, *data(3))
    trainer.optimizer.step()
    before = trainer.parameters()
    with pytest.raises(RuntimeError, match="no replica is sound at step 4"):
        trainer.scheduler.step(torch.full_like(losses, math.nan))
    assert torch.equal(trainer.parameters(), before)


def test_the_consensus_inside_a_block_and_the_replicas_after_it() -> None:
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


def test_batch_norm_statistics_are_averaged() -> None:
    trainer = StackTrainer(batch_norm=True).train(3)
    buffers = dict(trainer.stack.named_buffers())
    assert (buffers["norm.running_mean"] != buffers["norm.running_mean"][:1]).any()
    trainer.train(1)
    for buffer in buffers.values():
        assert (buffer == buffer[:1]).all()


def test_buffers_in_another_order_of_memory_are_averaged() -> None:
    module = network()
    module.register_buffer("kernel", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    stack = hk.ReplicaStack(module, REPLICAS)
    optimizer = hk.FusedAdamW(stack.parameters())
    scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 24, ensemble=stack.ensemble)
    (kernel,) = stack.buffers()
    kernel.copy_(torch.randn(kernel.shape))
    mean, strides = kernel.mean(0), kernel.stride()
    scheduler.converge()
    torch.testing.assert_close(kernel, mean.expand_as(kernel))
    assert kernel.stride() == strides


def test_a_mask_is_no_damage() -> None:
    """Infinities that a buffer has had from the start; those that come later are one."""
    module = network()
    mask = torch.full((3, 3), -torch.inf).triu(1)
    module.register_buffer("mask", mask)
    module.register_buffer("mean", torch.zeros(2))
    stack = hk.ReplicaStack(module, REPLICAS)
    optimizer = hk.FusedAdamW(stack.parameters())
    scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 24, ensemble=stack.ensemble)
    masks, means = stack.buffers()
    scheduler.converge()
    means[1, 0] = torch.inf
    scheduler.converge()
    assert [record.excluded for record in scheduler.history] == [[], [1]]
    assert torch.equal(masks, mask.expand_as(masks))
    assert not means.any()


def test_a_probe_gives_a_loss_of_each_replica() -> None:
    calls = []
    trainer = StackTrainer(total_steps=40, sync_every=2)

    def probe() -> Tensor:
        losses = trainer.stack.losses(loss_of, *data(1000), same_batch=True)
        calls.append(losses)
        return losses

    trainer.scheduler.cycle.probe = probe
    trainer.train(2)
    assert trainer.scheduler.history[0].probes == pytest.approx(calls[0].tolist())


def test_initial_noise_is_that_of_the_processes() -> None:
    stack = hk.ReplicaStack(network(), 3)
    hk.warm_noisy_init_(stack.parameters(), seed=7, ensemble=stack.ensemble)
    for replica in range(3):
        model, place = network(), SingleReplica()
        place.replica = replica  # as the process that holds it
        hk.warm_noisy_init_(model.parameters(), seed=7, ensemble=place)
        for stacked, plain in zip(stack.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(stacked[replica], plain, rtol=0, atol=0)


# Checkpoints


@pytest.mark.parametrize("at", [8, 10], ids=["sync", "mid-cycle"])
@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("optimizer", [hk.FusedSGD, hk.FusedAdam, hk.FusedAdamW], ids=lambda made: made.__name__)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(optimizer: Any, gradients: str, at: int) -> None:
    def build() -> StackTrainer:
        return StackTrainer(
            gradients=gradients,
            make_optimizer=optimizer,
            batch_norm=True,
            total_steps=40,
            sync_every=4,
            explore=[hk.Explore("shift", base=0.5)],
        )

    whole = build().train(20)
    saved = build().train(at).save()
    resumed = build().load(saved).train(20 - at)
    assert torch.equal(resumed.parameters(), whole.parameters())
    assert all(map(torch.equal, resumed.stack.buffers(), whole.stack.buffers()))
    assert same(*([r.to_dict() | {"seconds": 0} for r in each.scheduler.history] for each in (resumed, whole)))
    assert torch.equal(resumed.stack.hyper["shift"], whole.stack.hyper["shift"])


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("replicas", [1, 2, 6])
def test_another_number_of_replicas_goes_on_at_a_sync(replicas: int, gradients: str) -> None:
    trainer = StackTrainer(gradients=gradients).train(8)
    scheduler, optimizer = copy.deepcopy(trainer.scheduler.state_dict()), copy.deepcopy(trainer.optimizer.state_dict())
    other = StackTrainer(replicas=replicas, gradients=gradients)
    other.stack.load_state_dict(trainer.stack.module().state_dict())
    other.optimizer.load_state_dict(optimizer)
    other.scheduler.load_state_dict(scheduler)
    for param, old in zip(other.stack.parameters(), trainer.stack.parameters(), strict=True):
        here, there = other.optimizer.state[param], trainer.optimizer.state[old]
        moment, before = here["exp_avg"].expand_as(param), there["exp_avg"].expand_as(old)
        assert torch.equal(moment, before[:1].expand_as(param)), "averaged at the sync, and so the same in all"
        assert (here["step"] == 8).all()
    other.train(4)
    assert [len(record.losses) for record in other.scheduler.history] == [4, 4, replicas]


def test_in_the_middle_of_a_cycle_it_does_not() -> None:
    state = StackTrainer().train(6).scheduler.state_dict()
    with pytest.raises(ValueError, match="has 4 replicas, 4 in a process, and was saved 2 steps into a cycle"):
        StackTrainer(replicas=2).scheduler.load_state_dict(state)


# What is refused


def test_losses_must_be_one_for_each_replica() -> None:
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


def test_the_ensemble_must_be_the_stacks() -> None:
    stack = hk.ReplicaStack(network(), 4)
    optimizer = hk.FusedAdamW(stack.parameters())
    groups = copy.deepcopy({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
    for ensemble in (None, RowEnsemble(3)):
        with pytest.raises(ValueError, match=r"a stack of 4 replicas, and .* pass ensemble=stack.ensemble"):
            hk.HDETOneCycleLR(optimizer, 0.01, 24, ensemble=ensemble)
    with pytest.raises(ValueError, match=r"holds 4 replicas in this process, but the optimizer's parameters are those"):
        hk.HDETOneCycleLR(hk.FusedAdamW(network().parameters()), 0.01, 24, ensemble=stack.ensemble)
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == groups


def test_the_buffers_are_the_stacks() -> None:
    """Those of a BatchNorm of as many channels as there are replicas would look like rows."""
    module = nn.Sequential(nn.Linear(6, REPLICAS), nn.BatchNorm1d(REPLICAS))
    stack = hk.ReplicaStack(module, REPLICAS)
    optimizer = hk.FusedAdamW(stack.parameters())
    with pytest.raises(ValueError, match=r"model= is a Sequential, .* leave model= out"):
        hk.HDETOneCycleLR(optimizer, 0.01, 24, ensemble=stack.ensemble, model=module)
    hk.HDETOneCycleLR(optimizer, 0.01, 24, ensemble=stack.ensemble, model=stack)


def test_more_replicas_than_are_averaged() -> None:
    """Said when the scheduler is built, not at the first sync."""
    with pytest.raises(ValueError, match=r"at most 64 replicas of one process are averaged, got 65"):
        StackTrainer(replicas=65)


def test_torchs_optimizers_have_one_rate_for_all() -> None:
    stack = hk.ReplicaStack(network(), 4)
    with pytest.raises(TypeError, match=r"AdamW has one learning rate for all .* FusedAdamW\(stack.parameters\(\)\)"):
        hk.HDETOneCycleLR(torch.optim.AdamW(stack.parameters()), 0.01, 24, ensemble=stack.ensemble)


def test_gradients_other_than_the_stacks() -> None:
    stack = hk.ReplicaStack(network(), 4)
    optimizer = hk.FusedAdamW(stack.parameters())
    with pytest.raises(ValueError, match="gradients='local', but the stack has shared ones"):
        hk.HDETOneCycleLR(optimizer, 0.01, 24, ensemble=stack.ensemble, gradients="local")


def test_a_name_that_is_nowhere_needs_a_base() -> None:
    with pytest.raises(ValueError, match="'temperature' is not a key of the optimizer's parameter groups"):
        StackTrainer(explore=[hk.Explore("temperature")])


def test_a_scalar_that_no_loss_reads_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = StackTrainer(gradients="local", explore=[hk.Explore("temprature", base=1.0)], auto_lr=False)
    trainer.train(3)
    assert not caplog.messages
    trainer.train(9)
    assert sum("hyper['temprature'] was given other values, but no loss has read it" in m for m in caplog.messages) == 1


def test_a_scalar_that_the_loss_reads_is_not(caplog: pytest.LogCaptureFixture) -> None:
    trainer = StackTrainer(gradients="local", explore=[hk.Explore("shift", base=0.5)], auto_lr=False)
    trainer.loss_fn = smoothed(trainer.stack, [])
    trainer.train(12)
    assert not caplog.messages


def test_a_scalar_of_the_loss_needs_local_gradients(caplog: pytest.LogCaptureFixture) -> None:
    StackTrainer(explore=[hk.Explore("shift", base=0.5)])
    assert "shift cannot be explored with shared gradients" in caplog.messages[0]


# Learning rates that are moved

MOVED: dict[str, Any] = {"total_steps": 80, "sync_every": 2, "max_lr": 1e-4}


def constant(optimizer: Any, **options: Any) -> hk.HDETScheduler:
    return hk.HDETScheduler(ConstantLR(optimizer, 1.0, 0), total_steps=80, sync_every=2, **options)


@pytest.mark.parametrize("options", [MOVED, {"make_scheduler": constant}], ids=["onecycle", "constant"])
def test_a_run_resumed_while_it_is_watched_is_the_straight_one(options: dict[str, Any]) -> None:
    """Before and at the first sync, between and at others, and after the last at which it is moved."""
    straight, saved = StackTrainer(**options), {}
    for at in (1, 3, 4, 7, 8, 11, 18, 26):
        saved[at] = straight.train(at - straight.scheduler.last_epoch).save()
    straight.train(40 - straight.scheduler.last_epoch)
    assert all(straight.scheduler.cycle.spread.control["q"]), "the controller has seen slopes"
    for at, file in saved.items():
        resumed = StackTrainer(**options).load(file).train(40 - at)
        assert torch.equal(resumed.parameters(), straight.parameters()), at
        assert resumed.scheduler.cycle.spread.control == straight.scheduler.cycle.spread.control, at
        bases = [[record.base for record in trainer.scheduler.history] for trainer in (resumed, straight)]
        assert bases[0] == bases[1], at


def test_a_frozen_group_stays_frozen_while_others_are_moved() -> None:
    def frozen(optimizer: Any, **options: Any) -> hk.HDETOneCycleLR:
        return hk.HDETOneCycleLR(optimizer, [0.0, 1e-4], 80, sync_every=2, **options)

    def two_groups(params: Any, lr: float) -> hk.FusedAdamW:
        first, *others = params
        return hk.FusedAdamW([{"params": [first]}, {"params": others}], lr=lr)

    trainer = StackTrainer(make_optimizer=two_groups, make_scheduler=frozen)
    before = trainer.parameters().clone()
    count = next(iter(trainer.stack.parameters()))[0].numel()
    trainer.train(40)
    assert trainer.scheduler.cycle.run.peaks == (None, 1e-4)
    assert all(record.base["lr/0"] == 0 for record in trainer.scheduler.history)
    assert torch.equal(trainer.parameters()[:, :count], before[:, :count])
    assert not torch.equal(trainer.parameters()[:, count:], before[:, count:])


# Early syncs


def probed(**options: Any) -> StackTrainer:
    """A trainer whose losses are compared on one batch, the same at every sync."""
    made: list[StackTrainer] = []
    options = {"total_steps": 160, "sync_every": 16, **options}
    made.append(StackTrainer(probe=lambda: made[0].stack.losses(loss_of, *batch(0, 999), same_batch=True), **options))
    return made[0]


def test_with_a_probe_the_first_cycle_has_syncs_besides() -> None:
    trainer = probed().train(40)
    history = trainer.scheduler.history
    assert [(record.step, record.kind, record.cycle) for record in history] == [
        (2, "early", 0), (4, "early", 0), (8, "early", 0), (16, "sync", 0), (32, "sync", 1)
    ]  # fmt: skip
    assert all(record.probes is not None for record in history)
    assert trainer.scheduler.cycle.spread.control["looks"] == [5]


@pytest.mark.parametrize(
    "options",
    [
        {"probe": None},
        {"auto_lr": False},
        {"spread": 0.0},
        {"auto_lr": hk.RegressionController(start_at=0.05)},
        {"auto_lr": hk.HypergradientController()},
        {"auto_lr": hk.SoftmaxController(warmup_steps=40)},
    ],
    ids=["no probe", "no controller", "no spread", "starts later", "hypergradient", "softmax"],
)
def test_there_are_none_where_nobody_would_listen(options: dict[str, Any]) -> None:
    make = StackTrainer if "probe" in options else probed
    trainer = make(**{"total_steps": 160, "sync_every": 16, **options}).train(20)
    assert [record.step for record in trainer.scheduler.history] == [16]


@pytest.mark.parametrize(
    ("sync_every", "expected"), [(1, []), (2, [1]), (3, [1, 2]), (4, [1, 2]), (16, [2, 4, 8]), (100, [12, 25, 50])]
)
def test_early_syncs_of_short_and_long_cycles(sync_every: int, expected: list[int]) -> None:
    assert list(probed(sync_every=sync_every).scheduler.cycle.run.early) == expected


def two_groups(params: Any, lr: float) -> hk.FusedAdamW:
    first, *others = params
    return hk.FusedAdamW([{"params": [first]}, {"params": others}], lr=lr)


def departures(trainer: StackTrainer) -> np.ndarray:
    """[groups, replicas], which replicas have another learning rate than the base one."""
    base = trainer.scheduler.get_base_lr()
    return np.array([[rate != float(base[g]) for rate in rates(trainer, g)] for g in range(len(base))])


def test_with_a_probe_a_replica_departs_in_one_group_at_most_and_two_in_none() -> None:
    """Those two stay equal to the last bit, which is how it is known that losses have no noise."""
    trainer = probed(replicas=8, make_optimizer=two_groups)
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
    squares, spare = trainer.scheduler.cycle.spread.control["noise"]
    assert squares == 0
    assert spare > 0


@pytest.mark.parametrize(
    "options",
    [{"probe": None}, {"gradients": "local"}, {"auto_lr": hk.SoftmaxController(warmup_steps=40)}, {"auto_lr": False}],
    ids=["no probe", "local gradients", "softmax", "no controller"],
)
def test_otherwise_all_replicas_depart_in_all_groups(options: dict[str, Any]) -> None:
    make = StackTrainer if "probe" in options else probed
    trainer = make(**{"replicas": 8, "make_optimizer": two_groups, "total_steps": 160, "sync_every": 16, **options})
    assert departures(trainer).all()


def test_resumes_exactly_where_pairs_change_groups() -> None:
    """Five replicas make one pair, which is in another group after every sync."""
    options = {"replicas": 5, "make_optimizer": two_groups}
    straight = probed(**options).train(40)
    for at in (3, 8, 20):
        resumed = probed(**options).load(probed(**options).train(at).save())
        resumed.train(40 - at)
        assert torch.equal(resumed.parameters(), straight.parameters())
        assert resumed.scheduler.cycle.spread.control == straight.scheduler.cycle.spread.control


@pytest.mark.parametrize("at", [1, 2, 3, 4, 7, 8, 12, 16, 20])
def test_resumes_exactly_around_early_syncs(at: int) -> None:
    straight = probed().train(24)
    resumed = probed().load(probed().train(at).save()).train(24 - at)
    assert torch.equal(resumed.parameters(), straight.parameters())
    assert resumed.scheduler.cycle.spread.control == straight.scheduler.cycle.spread.control
    assert [record.step for record in resumed.scheduler.history] == [2, 4, 8, 16]


def test_resumes_from_a_checkpoint_of_before_there_were_any() -> None:
    """Its controller does not know where the losses were at the last sync, how far they had gone, and whether that was
    too fast."""
    saved = probed().train(20)
    state = saved.scheduler.state_dict()
    for name in ("level", "way", "opposed", "signs", "noise"):
        del state["hdet"]["spread"]["controller"][name]
    saved.scheduler.load_state_dict(state)
    saved.train(20)
    control = saved.scheduler.cycle.spread.control
    assert control["level"] is not None
    assert control["way"][0] > 0


# The end of fan-out


@pytest.mark.parametrize("options", [{}, {"probe": None}, {"gradients": "local"}], ids=["probe", "no probe", "local"])
def test_replicas_depart_until_the_controller_stops(options: dict[str, Any]) -> None:
    """At 30 % of 160 steps there is a sync; from then on all have the base values."""
    make = StackTrainer if "probe" in options else probed
    trainer = make(**{"replicas": 8, "total_steps": 160, "sync_every": 16, **options})
    for step in range(100):
        assert departures(trainer).any() == (step < 48)
        trainer.train(1)


@pytest.mark.parametrize(
    "options",
    [
        {"auto_lr": False},
        {"auto_lr": hk.SoftmaxController(warmup_steps=40)},
        {"auto_lr": hk.RegressionController(stop_at=1.0)},
        {"sync_every": 100},
    ],
    ids=["no controller", "softmax", "to the end", "never acts"],
)
def test_replicas_depart_to_the_end_where_nothing_ends(options: dict[str, Any]) -> None:
    trainer = StackTrainer(**{"total_steps": 160, "sync_every": 16, **options}).train(150)
    assert departures(trainer).any()


def test_after_that_replicas_stay_equal() -> None:
    """To the last bit; syncs go on, for buffers and for replicas that go bad."""
    trainer = probed(replicas=8).train(60)
    assert (trainer.parameters() == trainer.parameters()[0]).all()
    before = len(trainer.scheduler.history)
    trainer.train(40)
    assert (trainer.parameters() == trainer.parameters()[0]).all()
    assert [record.step for record in trainer.scheduler.history[before:]] == [64, 80, 96]
    assert all(len(set(record.values["lr/0"])) == 1 for record in trainer.scheduler.history[before:])


@pytest.mark.parametrize("at", [47, 48, 49, 60])
def test_resumes_exactly_around_the_end_of_fan_out(at: int) -> None:
    straight = probed().train(70)
    resumed = probed().load(probed().train(at).save()).train(70 - at)
    assert torch.equal(resumed.parameters(), straight.parameters())
    assert rates(resumed) == rates(straight)


def decays(trainer: StackTrainer) -> list[bool]:
    """Which replicas have another weight decay than the base one."""
    return [value != trainer.scheduler.cycle.spread.base(1) for value in trainer.scheduler.cycle.spread.values(1)]


DECAY = {"explore": [hk.Explore("weight_decay", base=0.1)], "replicas": 8, "total_steps": 160}


@pytest.mark.parametrize(("gradients", "several"), [("shared", 6), ("local", 8)])
def test_other_scalars_are_explored_after_the_learning_rate(gradients: Any, several: int) -> None:
    """Learning rates to the sync at 30 % of 160 steps, weight decay to that at 90 %, from the cycle on that ends at
    30 %. In pairs, one of four departs in nothing; all others are there for one of the two but for that cycle."""
    trainer = probed(**DECAY, gradients=gradients)
    for step in range(160):
        if step < 32 or step >= 48:
            assert departures(trainer).sum() == (several if step < 48 else 0)
            assert sum(decays(trainer)) == (several if 48 <= step < 144 else 0)
        else:
            assert departures(trainer).any()
            assert any(decays(trainer))
        trainer.train(1)
    history = trainer.scheduler.history
    assert {record.base["weight_decay/0"] for record in history if record.step <= 48} == {0.1}
    if gradients == "shared":
        assert history[-1].base["weight_decay/0"] != 0.1


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_a_replica_that_goes_bad_where_only_another_scalar_departs(gradients: Any) -> None:
    """It is left out and healed; the learning rate stays, and weight decay goes by those that are sound."""
    trainer = probed(**DECAY, gradients=gradients).train(79)
    losses = trainer.stack.backward(loss_of, *data(79, 8))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    with torch.no_grad():
        next(trainer.stack.parameters())[2] = math.nan
    before = trainer.scheduler.cycle.spread.control["mu"]
    trainer.scheduler.step(losses)
    now, after = trainer.scheduler.history[-1], trainer.scheduler.cycle.spread.control["mu"]
    assert (now.step, now.excluded) == (80, [2])
    assert len(set(now.values["lr/0"])) == 1
    assert after[0] == before[0]
    assert math.isfinite(after[1])
    trainer.train(80)
    assert [record.excluded for record in trainer.scheduler.history if record.step > 80] == [[]] * 5
    assert trainer.parameters().isfinite().all()
    assert 0 < trainer.scheduler.history[-1].base["weight_decay/0"] < math.inf


def test_resumes_exactly_around_the_parts_of_the_run() -> None:
    """Before and at the steps where weight decay begins and ends to be explored, and where the learning rate does."""
    straight, saved = probed(**DECAY), {}
    for at in range(150):
        if at in (31, 32, 48, 144):
            saved[at] = straight.save()
        straight.train(1)
    for at, state in saved.items():
        resumed = probed(**DECAY).load(state).train(150 - at)
        assert torch.equal(resumed.parameters(), straight.parameters())
        assert resumed.scheduler.cycle.spread.control == straight.scheduler.cycle.spread.control


@pytest.mark.parametrize(("bounds", "low"), [((0.05, 0.2), math.log(0.5)), ((0.0, 0.2), -math.inf)])
def test_controllers_know_what_bounds_leave(bounds: tuple[float, float], low: float) -> None:
    trainer = StackTrainer(explore=[hk.Explore("weight_decay", base=0.1, bounds=bounds)], total_steps=160)
    rate, decay = trainer.scheduler.cycle.run.reach
    assert rate == (-math.inf, math.inf)
    assert decay == pytest.approx((low, math.log(2)))
