"""The tensors of a module that get rows, and the modules that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble
from hdet_kernels.stack.template import merge_tied
from tests.ranks import run_ranks
from tests.stack.cases import R, mixed_model


def test_trainable_parameters_and_buffers_get_rows() -> None:
    module = mixed_model()
    stack = hk.ReplicaStack(module, R)
    own = dict(module.named_parameters())
    assert [name for name, _ in stack.named_parameters()] == ["inner.weight", "inner.bias", "norm.weight", "norm.bias"]
    assert len(list(stack.parameters())) == 4, "tied parameters are one, frozen ones are shared"
    for name, parameter in stack.named_parameters():
        assert isinstance(parameter, hk.StackedParameter)
        assert (parameter.replicas, parameter.shares_gradient, parameter.requires_grad) == (R, True, True)
        assert torch.equal(parameter, own[name].expand(R, *own[name].shape))
        assert parameter[0].stride() == own[name].stride()
    buffers = dict(module.named_buffers())
    assert {name for name, _ in stack.named_buffers()} == buffers.keys()
    for name, buffer in stack.named_buffers():
        assert torch.equal(buffer, buffers[name].expand(R, *buffers[name].shape))
    assert (stack.ensemble.size, stack.ensemble.rows, stack.ensemble.replica) == (R, R, 0)
    assert isinstance(stack.ensemble, RowEnsemble)
    assert "3 × MixedModel of" in repr(stack)


def test_rows_have_the_memory_format_of_the_parameter() -> None:
    module = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    weight = next(iter(hk.ReplicaStack(module, R).parameters()))
    assert weight[1].is_contiguous(memory_format=torch.channels_last)
    assert weight.stride() == (54, *module.weight.stride())


def test_parameters_that_share_their_memory_are_tied() -> None:
    module = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    module["b"].weight = nn.Parameter(module["a"].weight.data)
    stack = hk.ReplicaStack(module, R)
    assert [name for name, _ in stack.named_parameters()] == ["a.weight", "a.bias", "b.bias"]
    stack.backward(lambda m, x: m["b"](m["a"](x)).square().mean(), torch.ones(R, 3))
    reference = stack.replica(0)
    loss = reference["b"](reference["a"](torch.ones(1, 3))).square().mean()  # type: ignore[index]
    both = [p for n, p in reference.named_parameters() if n.endswith("weight")]
    gradients = torch.autograd.grad(loss, both)
    weight = next(iter(stack.parameters()))
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[0], gradients[0] + gradients[1])


def overlapping() -> nn.Module:
    module = nn.Module()
    memory = torch.zeros(6)
    module.a, module.b = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])
    return module


def transposed() -> nn.Module:
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(2, 3))
    module.b = nn.Parameter(module.a.data.t())
    return module


def aliased() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("seen", module.weight.data)
    return module


def holding(parameter: Tensor) -> nn.Module:
    module = nn.Module()
    module.p = nn.Parameter(parameter)
    return module


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (lambda: torch.zeros(2), TypeError, "needs a torch.nn.Module, got a Tensor"),
        (nn.ReLU, ValueError, "ReLU has no parameters that require a gradient"),
        (lambda: nn.Linear(1, 1).requires_grad_(False), ValueError, "nothing to train"),
        (lambda: nn.LazyLinear(2), ValueError, "weight is not initialised yet: run a forward pass"),
        (lambda: nn.Linear(2, 2, device="meta"), ValueError, "on the meta device"),
        (lambda: holding(torch.zeros(2, dtype=torch.complex64)), TypeError, "p is of torch.complex64; only real"),
        (lambda: holding(torch.zeros(1).expand(3)), ValueError, "elements share memory"),
        (overlapping, ValueError, "share a part of their memory"),
        (transposed, ValueError, "share their memory but differ in shape or strides"),
        (aliased, ValueError, "buffer seen shares its memory with parameter weight"),
        (lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")), ValueError, "1.weight is on the meta"),
    ],
    ids=[
        *("tensor", "none", "frozen", "lazy", "meta", "complex", "expanded", "overlap", "transposed", "aliased"),
        "partly-meta",
    ],
)
def test_modules_that_cannot_be_stacked_are_refused(
    module: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hk.ReplicaStack(module(), R)


def test_wrapped_and_sharded_modules_are_refused() -> None:
    for messages in run_ranks(2, _refusals):
        assert "pass ddp.module" in messages[0]
        assert "0 is wrapped in DistributedDataParallel" in messages[1]
        assert "weight is a sharded parameter (DTensor" in messages[2]


def _refusals(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = nn.Linear(2, 2)
    sharded.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()]))
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    messages = []
    for module in (ddp, nn.Sequential(ddp), sharded):
        with pytest.raises(TypeError) as caught:
            hk.ReplicaStack(module, 2)
        messages.append(str(caught.value))
    return messages


def test_tied_tensors_are_merged_under_all_names() -> None:
    memory = torch.zeros(4)
    trained, frozen = nn.Parameter(memory), nn.Parameter(memory, requires_grad=False)
    other, empty = torch.zeros(4), torch.zeros(0)
    merged = merge_tied([("a", frozen), ("b", other), ("c", trained), ("d", empty), ("e", torch.zeros(0))])
    assert list(merged) == [("a", "c"), ("b",), ("d",), ("e",)]
    assert merged["a", "c"] is trained, "trained under one of its names"
