"""The converger of an optimizer: of its flat buffers where it has some, and of its state where that has a mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.converge import AverageRequest, Report, converger_of
from hdet_kernels.ensemble import RowEnsemble, SingleReplica


def test_a_fused_optimizer_is_averaged_in_its_buffers() -> None:
    optimizer = hk.FusedAdamW(nn.Linear(3, 2).parameters())
    assert converger_of(optimizer, SingleReplica()).tensors.buckets is optimizer.buckets


def test_parameters_state_and_counts_of_a_stack_become_the_mean() -> None:
    stack = hk.ReplicaStack(nn.Linear(2, 1), 2, gradients="local")
    optimizer = hk.FusedAdamW(stack.parameters())
    for param in stack.parameters():
        param.grad = torch.arange(param.numel(), dtype=torch.float32).reshape(param.shape)
    optimizer.step()
    before = [p.detach().clone() for p in stack.parameters()]
    state = {name: flat.clone() for name, flat in optimizer.state_flats().items()}
    converger = converger_of(optimizer, stack.ensemble, model=stack, backup=False)
    outcome = converger.converge(Report(1), AverageRequest(average_state=True))
    assert outcome.state
    for now, then in zip(stack.parameters(), before, strict=True):
        torch.testing.assert_close(now.detach(), then.mean(0, keepdim=True).expand_as(then))
    for name, flat in optimizer.state_flats().items():
        torch.testing.assert_close(flat, state[name].mean(0, keepdim=True).expand_as(flat))


class Coded(torch.optim.SGD):
    """An optimizer with state of integer codes, as that of 8-bit optimizers."""

    def code(self, param: Tensor) -> None:
        self.state[param]["codes"] = torch.zeros(3, dtype=torch.uint8)


def test_state_without_a_mean_raises_where_it_is_needed() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    optimizer = Coded([param], lr=0.1)
    optimizer.code(param)
    converger_of(optimizer, RowEnsemble(2), needs_state=False).converge(Report(1))
    with pytest.raises(TypeError, match="the state 'codes' of parameter 0"):
        converger_of(optimizer, RowEnsemble(2)).converge(Report(1))


def test_an_unknown_option_raises() -> None:
    with pytest.raises(TypeError, match="compression"):
        converger_of(torch.optim.SGD([nn.Parameter(torch.ones(2))]), SingleReplica(), compression="bf16")
