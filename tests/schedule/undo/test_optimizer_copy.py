"""The whole state of an optimizer, copied and brought back: training goes on as it did the first time, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.schedule.undo.copies import reset_others, state_pairs, whole_state
from tests.schedule.cases import parameters
from tests.training import same

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "FusedAdamW": lambda params: hk.FusedAdamW(params, lr=0.1, amsgrad=True),
    "FusedSGD": lambda params: hk.FusedSGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "FusedAdagrad": lambda params: hk.FusedAdagrad(params, lr=0.1, initial_accumulator_value=0.5),
    "FusedLion": lambda params: hk.FusedLion(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
}


def train(optimizer: Any, params: list[nn.Parameter], steps: range) -> list[Tensor]:
    found = []
    for step in steps:
        for number, param in enumerate(params):
            param.grad = torch.linspace(-1, 1, param.numel()).reshape(param.shape) * (step + number + 0.5)
        optimizer.step()
        found += [param.detach().clone() for param in params]
    return found


def copied(optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, others = whole_state(optimizer, alike=False)
    return {name: tensor.clone() for name, tensor in tensors.items()}, others


def bring_back(optimizer: Any, kept: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    for _, now, saved in state_pairs(optimizer, kept[0]):
        now.copy_(saved)
    reset_others(optimizer, *kept)


@pytest.mark.parametrize("steps", [0, 2], ids=["start", "later"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_from_the_copy_as_it_did(name: str, steps: int) -> None:
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    train(optimizer, params, range(steps))
    kept, values = copied(optimizer), [param.detach().clone() for param in params]
    first = train(optimizer, params, range(steps, steps + 3))
    bring_back(optimizer, kept)
    for param, value in zip(params, values, strict=True):
        param.data.copy_(value)
    assert same(train(optimizer, params, range(steps, steps + 3)), first)


def test_a_state_that_is_no_tensor_is_copied_too() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.state[params[0]] = {"count": 3, "past": [torch.ones(2)], "new": None}
    kept = copied(optimizer)
    optimizer.state[params[0]]["count"] = 4
    optimizer.state[params[0]]["past"][0].zero_()
    optimizer.state[params[0]]["later"] = 1
    bring_back(optimizer, kept)
    assert same(dict(optimizer.state[params[0]]), {"count": 3, "past": [torch.ones(2)], "new": None})


def test_state_for_captured_graphs_is_reset_in_place() -> None:
    params = parameters()
    optimizer = torch.optim.NAdam(params, lr=0.1)
    kept = copied(optimizer)
    train(optimizer, params, range(2))
    optimizer.param_groups[0]["capturable"] = True
    before = {name: value.data_ptr() for name, value in optimizer.state[params[0]].items()}
    bring_back(optimizer, kept)
    state = optimizer.state[params[0]]
    assert {name: value.data_ptr() for name, value in state.items()} == before
    assert {name: float(value.abs().max()) for name, value in state.items()} == {
        "step": 0.0, "mu_product": 1.0, "exp_avg": 0.0, "exp_avg_sq": 0.0,
    }  # fmt: skip


def test_state_of_a_fused_optimizer_is_reset_in_place() -> None:
    params = parameters()
    optimizer = hk.FusedSGD(params, lr=0.1)
    kept = copied(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9  # as a schedule may do
    train(optimizer, params, range(2))
    before = copy.copy(optimizer.all_state_flats())
    bring_back(optimizer, kept)
    after = optimizer.all_state_flats()
    assert before.keys() == after.keys() == {"0/momentum_buffer", "0/step"}
    assert all(after[name].data_ptr() == flat.data_ptr() for name, flat in before.items())
    assert not any(flat.any() for flat in after.values())


def test_a_shared_state_is_brought_back_to_replicas_that_have_their_own_now() -> None:
    stack = hk.ReplicaStack(nn.Linear(2, 1), 3)
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.1)
    x = torch.ones(6, 2)

    def step() -> None:
        optimizer.zero_grad()
        stack.backward(lambda model, x: model(x).square().mean(), x)
        optimizer.step()

    step()
    kept = copied(optimizer)
    assert kept[0]["0/exp_avg"].dim() == 1
    optimizer.param_groups[0]["per_replica"] = {"betas[1]": [0.9, 0.95, 0.99]}
    step()
    assert optimizer.all_state_flats()["0/exp_avg"].dim() == 2
    bring_back(optimizer, kept)
    found = optimizer.all_state_flats()
    for row in range(3):
        assert torch.equal(found["0/exp_avg"][row], kept[0]["0/exp_avg"])
        assert torch.equal(found["0/step"].view(3, -1)[row], kept[0]["0/step"])


def test_replicas_that_are_alike_need_one_copy() -> None:
    stack = hk.ReplicaStack(nn.Linear(2, 1), 3, gradients="local")
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.1)
    for alike in (False, True):
        tensors, _ = whole_state(optimizer, alike=alike)
        assert tensors["0/exp_avg"].dim() == (1 if alike else 2)
