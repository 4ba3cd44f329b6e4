"""Flat buffers: mixed dtypes, gradients in any layout, tied parameters, and state that is views of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hdet_kernels.optim import FusedAdam, FusedAdamW, FusedSGD
from hdet_kernels.optim.watch import ITEMS_PER_STEP
from tests.ops.cases import BACKENDS, available
from tests.optim.cases import (
    assert_close,
    assert_equal,
    choose_backends,
    give_gradients,
    many_parameters,
    parameters,
    run,
)


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


@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "torch-cpu", "cpp-cpu"))
def test_state_is_made_of_views_of_flat_buffers(backend: tuple[str, str]) -> None:
    where, device = backend
    params = parameters(device=device)
    optimizer = FusedAdamW(params, amsgrad=True, backend=where)
    run(optimizer, params, [0])
    flats = list(optimizer.state_flats().values())
    assert len(flats) == 3
    optimizer.state[params[0]]["exp_avg"].fill_(123.0)
    assert (flats[0] == 123.0).sum() == params[0].numel()
    assert optimizer.state[params[-1]]["exp_avg"].stride() == params[-1].stride()


@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "torch-cpu", "cpp-cpu"))
def test_emptied_state_starts_again(backend: tuple[str, str]) -> None:
    where, device = backend
    ours, fresh = parameters(device=device), parameters(device=device)
    optimizer = FusedAdamW(ours, backend=where)
    run(optimizer, ours, range(2))
    optimizer.state.clear()
    with torch.no_grad():
        for mine, other in zip(ours, fresh, strict=True):
            mine.copy_(other)
    run(optimizer, ours, [5])
    run(FusedAdamW(fresh, backend=where), fresh, [5])
    assert_equal(ours, fresh)


def test_a_state_given_before_the_first_step_is_used() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = FusedAdamW([first, second])
    assert optimizer.state[second] == {}  # looked at, as torch's defaultdict allows
    first.grad = torch.ones(1)
    optimizer.step()
    optimizer.state[second] = {"step": torch.tensor(7.0), "exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}
    second.grad = torch.ones(1)
    optimizer.step()
    assert optimizer.state[second]["step"].item() == 8.0
    assert optimizer.state[first]["step"].item() == 2.0


def test_a_replaced_entry_starts_again() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = FusedSGD([param], lr=1.0, momentum=0.5)
    for _ in range(2):
        param.grad = torch.ones(2)
        optimizer.step()
    optimizer.state[param] = {}
    assert optimizer.state_dict()["state"] == {0: {}}
    optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.ones(2))
    assert list(optimizer.state_dict()["state"][0]) == ["momentum_buffer"]


def test_one_replaced_entry_among_many_is_noticed_within_a_round() -> None:
    params = many_parameters(3 * ITEMS_PER_STEP)
    optimizer = FusedSGD(params, lr=1.0, momentum=0.5)
    run(optimizer, params, [0])
    optimizer.state[params[-1]] = {"momentum_buffer": torch.full((4,), 100.0)}
    run(optimizer, params, range(1, 4))
    # Halved by each of the steps since it was noticed: at most three.
    assert optimizer.state[params[-1]]["momentum_buffer"].abs().max() > 10
    buffer = optimizer.state[params[-1]]["momentum_buffer"]
    (flat,) = optimizer.state_flats().values()
    assert flat.data_ptr() < buffer.data_ptr() < flat.data_ptr() + flat.nbytes


def test_an_incomplete_entry_is_refused_as_by_torch() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = FusedAdamW([param])
    run(optimizer, [param], [0])
    optimizer.state[param] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}
    before = param.detach().clone()
    with pytest.raises(KeyError, match=r"shape \(2,\) has step, exp_avg, but not exp_avg_sq"):
        run(optimizer, [param], [1])
    assert torch.equal(param.detach(), before)
    optimizer.state[param] = {}
    run(optimizer, [param], [1])
    assert optimizer.state[param]["step"].item() == 1.0
