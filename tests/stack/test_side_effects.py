"""Side effects of forward: buffers are kept, other tensors dropped, the template is not trained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hdet_kernels as hk
from tests.stack.cases import (
    WIDTH,
    Messages,
    R,
    ReassignedBuffers,
    batch,
    check_stack,
    diverged_stack,
    loss_of,
    separate_modules,
)

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


class ParameterInList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.kept = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kept[0], self.layer.bias)


def test_a_loss_of_the_templates_own_parameters_is_refused() -> None:
    module, keeper = nn.Linear(WIDTH, 1), ParameterInList()
    weight = module.weight
    with pytest.raises(RuntimeError, match=r"the module's own weight, not on the replicas'.*model that it is given"):
        hk.ReplicaStack(module, R).backward(lambda model, x: F.linear(x, weight, model.bias).mean(), batch())
    with pytest.raises(RuntimeError, match=r"the module's own layer\.weight, not"):
        hk.ReplicaStack(keeper, R).backward(lambda model, x: model(x).mean(), batch())
    assert all(p.grad is None for p in (*module.parameters(), *keeper.parameters()))


def test_a_loss_may_close_over_the_module() -> None:
    module = nn.Linear(WIDTH, 1)
    stack = diverged_stack(module)
    expected = separate_modules(stack, list(batch().chunk(R)))
    check_stack(stack, expected, stack.backward(lambda _, x: loss_of(module, x), batch()))


class AttributeSetter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, 1), 0
        self.constant = torch.full((WIDTH,), 2.0)
        self.register_buffer("later", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.layer(x * self.constant)
        self.later = self.seen.detach()
        return self.seen.square().mean()


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_tensors_assigned_to_attributes_are_dropped(chunk_size: int | None, warnings_logged: Messages) -> None:
    module = AttributeSetter()
    stack = diverged_stack(module)
    expected = separate_modules(stack, list(batch().chunk(R)))
    for _ in range(2):
        stack.zero_grad()
        check_stack(stack, expected, stack.backward(loss_of, batch(), chunk_size=chunk_size))
    assert not hasattr(module, "seen")
    assert module.later is None
    assert module.calls > 0, "values that are no tensors stay"
    assert len(warnings_logged()) == 1
    assert "forward sets later, seen" in warnings_logged()[0] or "forward sets seen, later" in warnings_logged()[0]
    stack.replica(0)


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    class Growing(ReassignedBuffers):
        def forward(self, x: Tensor) -> Tensor:
            self.mean = torch.cat([self.mean, self.mean])
            return self.layer(x).mean()

    with pytest.raises(RuntimeError, match=r"forward has set buffer mean of shape \(4,\) to a tensor of shape \(8,\)"):
        hk.ReplicaStack(Growing(), R).backward(loss_of, batch())
