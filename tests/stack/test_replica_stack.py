"""ReplicaStack: construction, arguments, and its place among processes."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from tests.ranks import run_ranks
from tests.stack.cases import R, loss_of, mixed_model, number_rows


def test_the_example_of_the_docstring() -> None:
    stack = hk.ReplicaStack(nn.Linear(3, 5), replicas=8)
    x, y = torch.randn(16, 3), torch.randint(0, 5, (16,))
    losses = stack.backward(lambda model, x, y: F.cross_entropy(model(x), y), x, y)
    assert losses.shape == (8,)


def test_the_module_is_not_changed() -> None:
    module = mixed_model()
    before = copy.deepcopy(module.state_dict())
    stack = hk.ReplicaStack(module, R)
    stack.backward(lambda m, x: m(x), torch.randn(4 * R, 4))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.zero_()
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_torch_optimizers_train_the_rows(gradients: Any) -> None:
    """A torch optimizer moves every row by its own gradient, or by the shared one."""
    stack = number_rows(hk.ReplicaStack(nn.Linear(2, 1), R, gradients=gradients))
    before = [p.detach().clone() for p in stack.parameters()]
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
    stack.backward(loss_of, torch.randn(R, 2))
    optimizer.step()
    for parameter, was in zip(stack.parameters(), before, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.detach(), was - 0.1 * parameter.grad)


@pytest.mark.parametrize("replicas", [0, -1, 2.0, True, "2", None])
def test_replicas_must_be_a_positive_int(replicas: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="replicas must be a whole number of at least 1"):
        hk.ReplicaStack(nn.Linear(1, 1), replicas)


def test_other_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="gradients must be one of 'shared', 'local', got 'mean'"):
        hk.ReplicaStack(nn.Linear(1, 1), R, gradients="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cuda_graphs must be True or False, got 'yes'"):
        hk.ReplicaStack(nn.Linear(1, 1), R, cuda_graphs="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one whole replica each, got RowEnsemble"):
        hk.ReplicaStack(nn.Linear(1, 1), R, ensemble=RowEnsemble(2, SingleReplica()))


def _ensemble_of_rank(rank: int) -> tuple[int, int, list[int]]:
    stack = hk.ReplicaStack(nn.Linear(1, 1), 2, gradients="local")
    stack.backward(loss_of, torch.full((2, 1), float(rank + 1)))
    shapes = [len(p.grad) for p in stack.parameters() if p.grad is not None]
    return stack.ensemble.size, stack.ensemble.replica, shapes


def test_the_default_ensemble_is_the_process_group() -> None:
    assert run_ranks(2, _ensemble_of_rank) == [(4, 0, [2, 2]), (4, 2, [2, 2])]


def _initial_values(rank: int) -> list[Tensor]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    stack = hk.ReplicaStack(model, 2)
    return [tensor.detach().clone() for tensor in (*stack.parameters(), *stack.buffers(), model[0].bias)]


def test_all_processes_begin_with_the_values_of_the_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    bias = model[0].bias
    bias.requires_grad_(False)
    expected = [*(p for p in model.parameters() if p is not bias), *model.buffers()]
    for *stacked, frozen in run_ranks(2, _initial_values):
        assert torch.equal(frozen, bias)
        for found, own in zip(stacked, expected, strict=True):
            assert torch.equal(found, own.expand_as(found))


def _differing_stack(rank: int, what: str) -> str:
    with pytest.raises(RuntimeError) as raised:
        hk.ReplicaStack(nn.Linear(3, 4 + rank * (what == "module")), 2 + rank * (what == "replicas"))
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("replicas", r"disagree on the stack \(rank 0: replicas 2; rank 1: replicas 3\)"),
        ("module", r"disagree on the stack \(rank 0: .*weight float32 \(4, 3\).* rank 1: .*weight float32 \(5, 3\)"),
    ],
)
def test_processes_must_build_the_same_stack(what: str, message: str) -> None:
    for error in run_ranks(2, _differing_stack, what):
        assert re.search(message, error)


def test_cuda_graphs_change_nothing_on_a_cpu() -> None:
    x = torch.randn(R, 2)
    plain, recorded = (hk.ReplicaStack(nn.Linear(2, 1), R, cuda_graphs=cuda_graphs) for cuda_graphs in (False, True))
    recorded.load_state_dict(plain.state_dict())
    for _ in range(4):
        assert torch.equal(plain.backward(loss_of, x), recorded.backward(loss_of, x))
