"""Flat groups: mixed dtypes, gradients in any layout, tied parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hdet_kernels.optim import FusedAdam, FusedAdamW, FusedSGD
from tests.ops.cases import BACKENDS, available
from tests.optim.cases import assert_close, assert_equal, choose_backends, give_gradients, many_parameters, parameters


@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "torch-cpu", "cpp-cpu", "triton-cpu"))
def test_each_dtype_has_a_flat_group_and_all_are_clipped_by_one_norm(backend: tuple[str, str]) -> None:
    where, device = backend
    params = [*parameters(torch.float32, device), *parameters(torch.float64, device, seed=1)]
    theirs = copy.deepcopy(params)
    fused = FusedAdam(params, max_grad_norm=1.0, backend=where)
    torchs = torch.optim.Adam(theirs, foreach=False)
    give_gradients(params, theirs, seed=0)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    fused.step()
    torchs.step()
    assert len(fused.buckets.flats) == 2
    assert_close(params, theirs)


@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "torch-cpu", "cpp-cpu"))
def test_gradients_of_another_layout(backend: tuple[str, str]) -> None:
    where, device = backend
    ours, theirs = parameters(device=device), parameters(device=device)
    give_gradients(ours, theirs, seed=0)
    assert ours[-1].grad is not None
    ours[-1].grad = ours[-1].grad.contiguous()
    ours[2].grad = ours[2].grad[:1].expand(4097)
    theirs[2].grad = ours[2].grad.clone()
    FusedAdamW(ours, backend=where).step()
    FusedAdamW(theirs, backend=where).step()
    assert_equal(ours, theirs)


@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "torch-cpu", "cpp-cpu"))
def test_a_parameter_that_was_transposed_in_place(backend: tuple[str, str]) -> None:
    where, device = backend
    start = torch.arange(9.0, device=device).view(3, 3)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.t().clone())
    optimizer = FusedSGD([ours], lr=0.5, backend=where)
    ours.data = ours.data.t()
    for param in (ours, theirs):
        param.grad = torch.empty_like(param).copy_(torch.arange(9.0).view(3, 3) + 1)
    optimizer.step()
    torch.optim.SGD([theirs], lr=0.5).step()
    assert_equal([ours], [theirs])


@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "torch-cpu", "cpp-cpu"))
def test_gradients_of_tied_parameters_are_summed(backend: tuple[str, str]) -> None:
    where, device = backend
    once, twice = parameters(device=device)[:1], parameters(device=device)[:1]
    alias = nn.Parameter(twice[0].data)
    fused = FusedAdamW([twice[0], alias], backend=where)
    give_gradients(once, seed=0)
    assert once[0].grad is not None
    twice[0].grad, alias.grad = once[0].grad * 0.25, once[0].grad * 0.75
    FusedAdamW(once, backend=where).step()
    fused.step()
    assert_close(once, twice)
    assert alias.data_ptr() == twice[0].data_ptr()
    assert fused.state[alias]["exp_avg"].data_ptr() == fused.state[twice[0]]["exp_avg"].data_ptr()


@pytest.mark.parametrize("backend", [available("torch", "cpu"), available("cpp", "cpu")])
def test_gradients_of_several_dtypes_among_many_parameters(backend: tuple[str, str]) -> None:
    params = many_parameters(1300)
    for param in params[600:]:
        param.grad_dtype = torch.bfloat16
    optimizer = FusedSGD(params, lr=1.0, backend=backend[0])
    for steps in range(1, 4):
        torch.stack([param.sum() for param in params]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.equal(param.detach(), torch.full((4,), -float(steps))) for param in params)
