"""Syncs of a stack: averaging rows and buffers, excluded replicas, consensus and probes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import hdet_kernels as hk
from hdet_kernels.ensemble import SingleReplica
from tests.stack.trainer import REPLICAS, StackTrainer, data
from tests.training import loss_of, network


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


def test_a_replica_with_a_non_finite_loss_is_excluded() -> None:
    """Unless the controller may undo it."""
    trainer = StackTrainer(auto_lr=hk.RegressionController(undo=0)).train(3)
    losses = trainer.stack.backward(loss_of, *data(3))
    trainer.optimizer.step()
    losses[1] = math.inf
    trainer.scheduler.step(losses)
    assert trainer.scheduler.history[-1].excluded == [1]


def test_when_all_replicas_are_non_finite_nothing_is_overwritten() -> None:
    """Unless the controller may undo it."""
    trainer = StackTrainer(auto_lr=hk.RegressionController(undo=0)).train(3)
    losses = trainer.stack.backward(loss_of, *data(3))
    trainer.optimizer.step()
    before = trainer.parameters()
    with pytest.raises(RuntimeError, match="no replica is sound at step 4"):
        trainer.scheduler.step(torch.full_like(losses, math.nan))
    assert torch.equal(trainer.parameters(), before)


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


def test_batch_norm_statistics_are_averaged() -> None:
    trainer = StackTrainer(batch_norm=True).train(3)
    buffers = dict(trainer.stack.named_buffers())
    assert (buffers["norm.running_mean"] != buffers["norm.running_mean"][:1]).any()
    trainer.train(1)
    for buffer in buffers.values():
        assert (buffer == buffer[:1]).all()


def test_channels_last_buffers_are_averaged() -> None:
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


def test_infinities_of_a_mask_do_not_exclude_a_replica() -> None:
    """Infinities that a buffer had from the start are allowed; new ones exclude the replica."""
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
