"""The promises of the default controller, kept in real training of a small stack."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import hdet_kernels as hk
from tests.training import batch, loss_of, network, same

TOTAL, SYNC = 240, 6


def train(max_lr: float, steps: int = TOTAL, **options: Any) -> tuple[hk.HDETOneCycleLR, list[Tensor], Tensor]:
    """Train four replicas on shared gradients; return the scheduler, the losses of all steps and the parameters."""
    stack = hk.ReplicaStack(network(), 4, gradients="shared")
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.01, backend="torch")
    options = {"sync_every": SYNC, "cycle_momentum": False, **options}
    scheduler = hk.HDETOneCycleLR(optimizer, max_lr, TOTAL, ensemble=stack.ensemble, **options)
    losses = []
    for step in range(steps):
        losses.append(stack.backward(loss_of, *batch(0, step, size=64)).detach())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses[-1])
    return scheduler, losses, torch.cat([param.detach().reshape(-1) for param in stack.parameters()])


def last_loss(losses: list[Tensor]) -> float:
    return float(torch.stack(losses[-20:]).mean())


@pytest.mark.full
@pytest.mark.parametrize("trust", [1.0, 3.0])
def test_a_good_learning_rate_is_kept(trust: float) -> None:
    """Bit for bit as without a controller: with trust=1 to the end, else until replicas stop to differ at the peak."""
    scheduler, losses, parameters = train(0.02, trust=trust)
    _, plain, expected = train(0.02, auto_lr=False)
    assert scheduler.cycle.spread.controller_state["mu"] == [0.0]
    same_until = TOTAL if trust == 1 else int(0.3 * TOTAL)
    assert same(losses[: same_until + 1], plain[: same_until + 1])
    assert torch.equal(parameters, expected) is (trust == 1)
    assert last_loss(losses) < 1.1 * last_loss(plain)


def test_full_trust_and_a_probe_are_as_without_a_controller() -> None:
    def probe() -> float:
        raise AssertionError("nothing is compared")

    assert torch.equal(train(0.02, 30, trust=1, probe=probe)[2], train(0.02, 30, auto_lr=False)[2])


def test_full_trust_leaves_the_learning_rate_beside_other_scalars() -> None:
    # Weight decay is moved from 0.3 of the run on.
    scheduler, *_ = train(0.02, TOTAL // 2, trust=1, explore=[hk.Explore("weight_decay", spread=0.5)])
    rate, decay = scheduler.cycle.spread.controller_state["mu"]
    assert rate == 0.0
    assert decay != 0.0


@pytest.mark.full
def test_what_is_a_hundred_times_too_high_is_undone_and_ends_better_than_plain() -> None:
    scheduler, losses, _ = train(2.0)
    _, plain, _ = train(2.0, auto_lr=False)
    (mu,) = scheduler.cycle.spread.controller_state["mu"]
    assert mu <= -math.log(3)
    assert any(record.undone is not None for record in scheduler.history)
    assert last_loss(losses) < last_loss(plain)
