"""amsgrad with state in 8 bits, where the second moment is a share of the largest one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.converge import AverageRequest, Report, converger_of
from hdet_kernels.optim.coded_state import decoded_entries
from tests.optim.cases import saved_and_loaded

SIZE = 300  # a block and a part of one
MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")


def adam(params: Any, **options: Any) -> hk.FusedAdam:
    return hk.FusedAdam(params, **{"lr": 1e-3, "amsgrad": True, "state_dtype": "int8"} | options)


def stepped(optimizer: hk.FusedAdam, steps: int, seed: int = 0) -> None:
    """Take steps with gradients whose sizes span four orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            size = torch.logspace(-4, 0, param.numel()).view_as(param)
            param.grad = torch.randn(param.shape, generator=generator) * size
        optimizer.step()


def numbers(optimizer: hk.FusedAdam, index: int = 0) -> dict[str, Tensor]:
    return decoded_entries(list(optimizer.state.values())[index])


def test_the_largest_moment_does_not_grow_by_rounding() -> None:
    """The second moment is rounded at random in every step, and the maximum of that must not exceed the true one."""
    coded, exact = (nn.Parameter(torch.zeros(2048)) for _ in range(2))
    optimizers = adam([coded]), adam([exact], state_dtype=torch.float32)
    for optimizer in optimizers:
        stepped(optimizer, 1000)
    ratio = numbers(optimizers[0])["max_exp_avg_sq"] / optimizers[1].state[exact]["max_exp_avg_sq"]
    assert abs(ratio.log().mean().item()) < 0.02
    # Of one number: half of an eighth by its own rounding, and the rest by that of the second moment.
    assert ratio.min() > 0.85
    assert ratio.max() < 1.2


def test_amsgrad_is_switched_off_and_on() -> None:
    param = nn.Parameter(torch.zeros(SIZE))
    optimizer = adam([param], lr=0.0)
    stepped(optimizer, 50)
    kept = {name: value.clone() for name, value in numbers(optimizer).items()}
    assert (optimizer.state[param]["exp_avg_sq_scale"] < 0).all(), "a share"
    for amsgrad in (False, True):
        optimizer.param_groups[0]["amsgrad"] = amsgrad
        param.grad = torch.zeros(SIZE)
        optimizer.step()
        assert bool((optimizer.state[param]["exp_avg_sq_scale"] < 0).all()) == amsgrad
        optimizer.load_state_dict(saved_and_loaded(optimizer.state_dict()))
        now = numbers(optimizer)
        if amsgrad:  # a second moment that was rounded up in between may be the largest now
            assert (now["max_exp_avg_sq"] >= kept["max_exp_avg_sq"]).all()
        else:
            assert torch.equal(now["max_exp_avg_sq"], kept["max_exp_avg_sq"])
        # Both codes round one number by some per cent, those far below the block's largest by more.
        largest = kept["exp_avg_sq"] > 1e-3 * kept["exp_avg_sq"].max()
        assert ((now["exp_avg_sq"] / kept["exp_avg_sq"] - 1).abs()[largest] < 0.15).all()


def test_a_group_without_amsgrad_beside_one_with_it() -> None:
    """Both lie in the same buffers. What the first one's part of the largest moment has been must not matter."""
    params = [nn.Parameter(torch.zeros(SIZE)) for _ in range(2)]
    optimizer = adam([{"params": params[:1], "amsgrad": False}, {"params": params[1:]}])
    stepped(optimizer, 3)
    saved = saved_and_loaded(optimizer.state_dict())
    assert "max_exp_avg_sq" not in saved["state"][0]
    optimizer.param_groups[0]["amsgrad"] = True
    stepped(optimizer, 3)
    optimizer.load_state_dict(saved)
    plain = adam([{"params": [nn.Parameter(p.detach().clone())], "amsgrad": i == 1} for i, p in enumerate(params)])
    plain.load_state_dict(hk.optim.decoded_state_dict(saved))
    for each in (optimizer, plain):
        assert (each.state_dict()["state"][0]["exp_avg_sq_scale"] >= 0).all()
        each.load_state_dict(saved_and_loaded(each.state_dict()))
        for index in range(2):
            for name in MOMENTS if index else MOMENTS[:1]:
                found = numbers(each, index)[name].flatten()
                expected = hk.optim.decoded_state_dict(saved)["state"][index][name]
                assert torch.equal(found, expected.flatten())


def test_codes_of_another_memory_order_are_decoded_by_their_own_largest_moments() -> None:
    shape = (20, 3, 4, 5)
    optimizers = []
    for layout in (torch.channels_last, torch.contiguous_format):
        optimizers.append(adam([nn.Parameter(torch.zeros(shape).to(memory_format=layout))]))
        stepped(optimizers[-1], 20, seed=len(optimizers))
    source, target = optimizers
    target.load_state_dict(saved_and_loaded(source.state_dict()))
    mine, theirs = numbers(target), numbers(source)
    assert torch.equal(mine["max_exp_avg_sq"], theirs["max_exp_avg_sq"])
    assert torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])
    stepped(target, 1)


def test_a_second_moment_without_what_it_is_a_share_of_is_refused() -> None:
    optimizer = adam([nn.Parameter(torch.zeros(SIZE))])
    stepped(optimizer, 2)
    optimizer.param_groups[0]["amsgrad"] = False
    before = copy.deepcopy(optimizer.state_dict())
    damaged = copy.deepcopy(before)
    for name in ("max_exp_avg_sq", "max_exp_avg_sq_scale"):
        del damaged["state"][0][name]
    with pytest.raises(ValueError, match="exp_avg_sq in 8 bits as a share of max_exp_avg_sq, which it has not"):
        optimizer.load_state_dict(damaged)
    for name, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, before["state"][0][name])


def step_stack(stack: hk.ReplicaStack, optimizer: hk.FusedAdam) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        stack.backward(lambda model, x: model(x).square().mean(), torch.randn(12, SIZE, generator=generator))
        optimizer.step()


def test_stacks_separate_share_and_average_both_moments() -> None:
    torch.manual_seed(0)
    stack = hk.ReplicaStack(nn.Linear(SIZE, 3), 2)
    optimizer = adam(stack.parameters())
    step_stack(stack, optimizer)
    weight = next(iter(stack.parameters()))
    shared = {name: value.clone() for name, value in decoded_entries(optimizer.state[weight]).items()}
    optimizer.separate_state()
    for row in decoded_entries(optimizer.state[weight])["exp_avg_sq"]:
        assert torch.equal(row, shared["exp_avg_sq"])
    other_stack = hk.ReplicaStack(nn.Linear(SIZE, 3), 3)
    other = adam(other_stack.parameters())
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for name in MOMENTS:
        found = decoded_entries(other.state[next(iter(other_stack.parameters()))])[name]
        torch.testing.assert_close(found, shared[name], rtol=1e-6, atol=0)

    local = hk.ReplicaStack(nn.Linear(SIZE, 3), 2, gradients="local")
    optimizer = adam(local.parameters())
    step_stack(local, optimizer)
    before = {name: flat.clone() for name, flat in optimizer.state_flats().items()}
    converger = converger_of(optimizer, local.ensemble, model=local)
    assert converger.converge(Report(1), AverageRequest(average_state=True)).state
    for name, flat in optimizer.state_flats().items():
        mean, largest = before[name].mean(0), before["0/max_exp_avg_sq"].mean(0)
        allowed = largest / 16 if name.endswith("_sq") else 0.0079 * mean.abs().max()
        assert torch.equal(flat[0], flat[1])
        assert ((flat[0] - mean).abs() <= allowed).all()
