"""Gradients of their own for replicas that share one otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hdet_kernels as hk
from hdet_kernels.ensemble import SingleReplica
from hdet_kernels.schedule.scout.own_gradients import OwnGradients, _check_can_differ, differ


def stacked(gradients: Any) -> tuple[hk.ReplicaStack, hk.FusedAdamW]:
    stack = hk.ReplicaStack(torch.nn.Linear(3, 2), 2, gradients=gradients)
    return stack, hk.FusedAdamW(stack.parameters())


def step(stack: hk.ReplicaStack, optimizer: hk.FusedAdamW) -> torch.Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    stack.backward(lambda model, x: (model(x) - x.sum()).square().mean(), x)
    optimizer.step()
    optimizer.zero_grad()
    return next(stack.parameters()).detach().clone()


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_a_stack_has_gradients_of_each_replica_meanwhile(gradients: Any) -> None:
    stack, optimizer = stacked(gradients)
    own = OwnGradients(optimizer, stack.ensemble, None, "auto")
    assert own.certain
    for _ in range(2):
        own.begin()
        own.begin()  # nothing more
        apart = step(stack, optimizer)
        assert not torch.equal(apart[0], apart[1])
        own.end()
        own.end()
        assert stack.gradients == gradients
    before = next(stack.parameters()).detach().clone()
    moved = step(stack, optimizer) - before
    assert (torch.allclose(moved[0], moved[1], atol=1e-6)) is (gradients == "shared")
    assert optimizer.shares_state is (gradients == "shared")


def test_another_one_takes_over_without_touching_the_moments() -> None:
    stack, optimizer = stacked("shared")
    first, second = (OwnGradients(optimizer, stack.ensemble, None, "auto") for _ in range(2))
    first.begin()
    step(stack, optimizer)
    apart = {name: flat.clone() for name, flat in optimizer.all_state_flats().items()}
    second.take_over(first)
    first.end()
    second.begin()
    assert all(torch.equal(flat, apart[name]) for name, flat in optimizer.all_state_flats().items())
    second.end()
    assert (stack.gradients, optimizer.shares_state) == ("shared", True)


def test_moments_of_each_replica_exist_for_the_phase_only() -> None:
    stack, optimizer = stacked("shared")
    own = OwnGradients(optimizer, stack.ensemble, None, "auto")
    step(stack, optimizer)
    shared = {name: flat.clone() for name, flat in optimizer.all_state_flats().items()}
    own.begin()
    assert all(flat.numel() == 2 * shared[name].numel() for name, flat in optimizer.all_state_flats().items())
    own.share_state()
    assert all(torch.equal(flat, shared[name]) for name, flat in optimizer.all_state_flats().items())
    own.separate_state()
    own.end()
    assert all(torch.equal(flat, shared[name]) for name, flat in optimizer.all_state_flats().items())


@pytest.mark.parametrize(
    ("fingerprints", "expected"),
    [([1.0, 2.0], True), ([1.0, 1.0, 2.0], True), ([0.0, 0.0], None), ([np.nan, 1.0], None), ([np.inf, np.inf], None)],
)
def test_gradients_that_differ(fingerprints: list[float], expected: bool | None) -> None:
    assert differ(np.array(fingerprints)) is expected


def test_equal_gradients_are_refused_with_the_remedy() -> None:
    with pytest.raises(RuntimeError, match="pass the DistributedDataParallel model as model="):
        differ(np.array([1.5, 1.5]))


def test_what_averages_gradients_for_sure_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="gradients='shared' and no DistributedDataParallel"):
        OwnGradients(optimizer, SingleReplica(), None, "shared")
    assert not OwnGradients(optimizer, SingleReplica(), torch.nn.Linear(1, 1), "local").certain
    replicate = SimpleNamespace(is_replicate=lambda: True)
    param = SimpleNamespace(device_mesh=SimpleNamespace(ndim=2), placements=(replicate,))
    sharded: Any = SimpleNamespace(param_groups=[{"params": [param]}])
    with pytest.raises(ValueError, match="fully_shard over a mesh"):
        _check_can_differ(sharded, "auto")
