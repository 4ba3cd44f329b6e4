"""A loss that fails under vmap is computed again from the same buffers, random numbers and batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.stack.losses import Rollback
from tests.stack.cases import WIDTH, batch, diverged_stack

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def test_random_numbers_are_restored_when_vmap_fails() -> None:
    def noisy(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x + torch.randn_like(x)).mean()
        return y * y.detach().item()

    stack = diverged_stack(nn.Linear(WIDTH, 1))
    torch.manual_seed(5)
    first = stack.losses(noisy, batch())
    torch.manual_seed(5)
    assert torch.equal(first, stack.losses(noisy, batch(), chunk_size=1)), "as if vmap had not been tried"


def test_buffers_are_restored_when_a_later_replica_raises() -> None:
    stack = hk.ReplicaStack(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 3)
    calls = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        loss = model(x).square().mean()
        if loss.item() > -1 and len(calls) >= 6:  # of the last replica in the second call; the first fails under vmap
            raise KeyError("mine")
        return loss

    stack.backward(loss_fn, torch.randn(12, 3))
    before = [buffer.clone() for buffer in stack.buffers()]
    calls[:] = [1] * 3
    with pytest.raises(KeyError, match="mine"):
        stack.backward(loss_fn, torch.randn(12, 3))
    assert all(map(torch.equal, stack.buffers(), before))


def test_a_batch_that_the_loss_changes_in_place_is_changed_once() -> None:
    stack = hk.ReplicaStack(nn.Linear(3, 1), 2)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        x.mul_(2.0)
        loss = model(x).square().mean()
        return loss if loss.item() > -1 else 2 * loss  # which vmap cannot follow

    x = torch.randn(4, 3)
    expected = [model(2 * part).square().mean() for model, part in zip([stack.replica(0)] * 2, x.chunk(2), strict=True)]
    found = stack.losses(loss_fn, x.clone())
    torch.testing.assert_close(found, torch.stack(expected).detach())


def test_changed_buffers_are_found_and_restored() -> None:
    buffers = [torch.zeros(2), torch.ones(2), torch.arange(3)]
    first = Rollback(buffers, None, torch.device("cpu"))
    state = torch.get_rng_state()
    buffers[1].add_(1)
    buffers[2].add_(1)
    torch.rand(1)
    assert first.changed() == [1, 2]
    first.restore()
    assert [buffer.tolist() for buffer in buffers] == [[0, 0], [1, 1], [0, 1, 2]]
    assert torch.equal(torch.get_rng_state(), state)


def test_later_only_buffers_known_to_change_are_copied() -> None:
    buffers = [torch.zeros(2), torch.ones(2)]
    later = Rollback(buffers, [1], torch.device("cpu"))
    for buffer in buffers:
        buffer.add_(1)
    later.restore()
    assert [buffer.tolist() for buffer in buffers] == [[1, 1], [1, 1]]
