"""Files of a model whose parameters lie in flat buffers: each tensor is saved alone, and none is lost."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hdet_kernels as hk
from tests.optim.tied_net import Net

#: A value that only one parameter has, to be looked for in files.
MARK = 123456.789

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def trained(steps: int = 2) -> tuple[Net, hk.FusedAdamW]:
    torch.manual_seed(0)
    net = Net()
    optimizer = hk.FusedAdamW(net.parameters(), lr=0.1)
    train(net, optimizer, steps)
    return net, optimizer


def train(net: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        tokens = (torch.arange(6) + step) % 7
        F.cross_entropy(net(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def assert_same_state(first: nn.Module, second: nn.Module) -> None:
    for (name, a), (other, b) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])])
@pytest.mark.parametrize("gradients", ["autograd", "fixed"])
def test_a_part_of_a_model_is_saved_without_the_rest(gradients: Any, device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(512, 512)).to(device)
    optimizer = hk.FusedAdamW(model.parameters(), gradients=gradients)
    with torch.no_grad():
        model[1].weight.fill_(MARK)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    mark = model[1].weight.detach()[0, 0].cpu().numpy().tobytes()
    first = list(model[0].parameters())
    parts = {
        "a module": model[0],
        "its state_dict": model[0].state_dict(),
        "a parameter": first[0],
        "state": [optimizer.state[param] for param in first],
        "gradients": [param.grad for param in first],
    }
    for what, part in parts.items():
        written = saved(part)
        assert len(written) < 10_000, what
        assert mark not in written, what
    assert mark in saved(model)


def test_the_file_of_a_whole_model_is_as_large_as_its_tensors() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    plain, before = copy.deepcopy(model), len(saved(model.state_dict()))
    optimizer = hk.FusedAdamW(model.parameters())
    assert len(saved(model.state_dict())) == before
    usual = torch.optim.AdamW(plain.parameters())
    for each in (model, plain):
        each(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    usual.step()
    assert len(saved(optimizer.state_dict())) < 1.01 * len(saved(usual.state_dict()))


def test_tied_parameters_stay_tied_through_a_file() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    twin = nn.Parameter(weight.data)  # another object on the same memory
    hk.FusedAdamW([weight, nn.Parameter(torch.ones(2)), twin])
    assert twin.data_ptr() == weight.data_ptr()
    loaded = torch.load(io.BytesIO(saved([weight, twin])), weights_only=True)
    assert loaded[0].data_ptr() == loaded[1].data_ptr()


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies_of_model_and_optimizer_train_alike(again: Any) -> None:
    net, optimizer = trained()
    other, its_optimizer = again((net, optimizer))
    addresses = {tensor.data_ptr() for tensor in net.state_dict().values() if tensor.numel()}
    assert not addresses & {tensor.data_ptr() for tensor in other.state_dict().values()}
    train(net, optimizer, 2)
    train(other, its_optimizer, 2)
    assert_same_state(net, other)


def test_a_stack_and_its_optimizer_are_saved_without_gaps() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(256, 256))
    stack = hk.ReplicaStack(model, 3, gradients="local")
    optimizer = hk.FusedAdamW(stack.parameters())
    for param in stack.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    first = next(stack.parameters())
    assert len(saved(stack.state_dict()["0.weight"])) < 10_000
    assert len(saved(first)) < 10_000
    state = optimizer.state_dict()["state"]
    assert len(saved(state[0])) < 10_000
    assert torch.equal(state[0]["exp_avg"], optimizer.state[first]["exp_avg"])
    tensors = [tensor for tensor in stack.state_dict().values() if isinstance(tensor, Tensor)]
    tensors += [tensor for entry in state.values() for tensor in entry.values()]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    optimizer.state[first]["exp_avg"].fill_(MARK)
    assert (optimizer.state_flats()["0/exp_avg"] == MARK).sum() == first.numel(), "the state itself is in the buffer"
