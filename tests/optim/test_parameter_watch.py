"""Parameters that were moved or regrouped between two steps are noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hdet_kernels.optim import FusedAdamW, FusedSGD
from tests.ops.cases import BACKENDS
from tests.optim.cases import assert_equal, choose_backends, many_parameters, parameters, run


@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "torch-cpu", "cpp-cpu"))
def test_a_parameter_that_moved_away_is_brought_back(backend: tuple[str, str]) -> None:
    where, device = backend
    ours, theirs = parameters(device=device), parameters(device=device)
    fused, other = FusedAdamW(ours, backend=where), FusedAdamW(theirs, backend=where)
    run(fused, ours, [0])
    run(other, theirs, [0])
    with torch.no_grad():
        ours[0].data = ours[0].data.clone() + 1
        theirs[0].add_(1)
    run(fused, ours, [1])
    run(other, theirs, [1])
    assert_equal(ours, theirs)
    ours[2].data = ours[2].data.double()
    before = [param.detach().clone() for param in ours]
    with pytest.raises(RuntimeError, match=r"float64.*before building the optimizer"):
        run(fused, ours, [2])
    assert_equal(ours, before)


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]
MOVES = [
    pytest.param({"dtype": torch.bfloat16}, r"torch.bfloat16 \(2, 3\) on cpu", id="dtype"),
    pytest.param({"device": "cuda"}, r"torch.float32 \(2, 3\) on cuda:0", id="device", marks=ON_GPU),
]


@pytest.mark.parametrize(("move", "now"), MOVES)
@pytest.mark.parametrize("gradients", ["autograd", "fixed"])
def test_a_model_that_is_moved_after_the_first_step_is_refused(move: dict[str, Any], now: str, gradients: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = FusedAdamW(model.parameters(), gradients=gradients)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    model.to(**move)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(
        RuntimeError, match=rf"was torch.float32 \(2, 3\) on cpu .* is {now} now; .* or build the optimizer"
    ):
        optimizer.step()
    assert all(bool((count == 1).all()) for count in optimizer.step_flats()), "no other step was made"


@pytest.mark.parametrize(("move", "now"), MOVES)
@pytest.mark.parametrize("gradients", ["autograd", "fixed"])
@pytest.mark.parametrize("noticed", ["step", "load_state_dict"])
def test_a_model_that_is_moved_before_the_first_step_is_followed(
    move: dict[str, Any], now: str, gradients: Any, noticed: str
) -> None:
    """Accelerate's prepare() moves the model of an optimizer to its device, and loads the optimizer's own state."""
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1].to(**move)
    optimizers = [FusedAdamW(model.parameters(), lr=0.1, gradients=gradients) for model in models]
    models[0].to(**move)
    if noticed == "load_state_dict":
        optimizers[0].load_state_dict(optimizers[0].state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(3):
            model(torch.ones(1, 3).to(model.weight)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not optimizers[0].buckets.moved()
    assert_equal(list(models[0].parameters()), list(models[1].parameters()))


def test_one_moved_parameter_among_many_is_noticed_at_the_next_step() -> None:
    params = many_parameters(1500)
    optimizer = FusedSGD(params, lr=1.0)
    for steps in range(1, 4):
        params[10].data = params[10].data.clone()
        for param in params:
            param.grad = torch.ones(4)
        optimizer.step()
        assert all(torch.equal(param.detach(), torch.full((4,), -float(steps))) for param in params)


def test_a_parameter_that_shrank_in_place_is_refused() -> None:
    param, other = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(2))
    optimizer = FusedSGD([param, other], lr=1.0)
    flat = optimizer.buckets.flats[0].clone()
    param.data = param.data[:2]
    param.sum().backward()
    with pytest.raises(RuntimeError, match=r"\(2,\).*\(8,\)"):
        optimizer.step()
    assert torch.equal(optimizer.buckets.flats[0], flat)


@pytest.mark.parametrize("gradients", ["autograd", "fixed"])
def test_a_parameter_moved_to_another_group_by_hand_gets_the_options_of_that_group(gradients: Any) -> None:
    params = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = FusedSGD(
        [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.5}], lr=1.0, gradients=gradients
    )
    groups = optimizer.param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())
    torch.cat(list(params)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(torch.cat(list(params)).detach(), torch.tensor([0.9, 0.5, 0.5]))
    state = optimizer.state_dict()
    del groups[1]
    assert len(optimizer.state_dict()["param_groups"]) == 1
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(state)


def test_parameters_exchanged_by_hand_are_trained() -> None:
    kept, old, new = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = FusedSGD([{"params": [kept]}, {"params": [old], "lr": 0.5}], lr=1.0, momentum=0.9)
    run(optimizer, [kept, old], range(2))
    momentum = optimizer.state[kept]["momentum_buffer"].clone()
    optimizer.param_groups[1]["params"][0] = new
    new.grad = torch.ones(2)
    before = old.detach().clone()
    kept.grad = torch.zeros(2)
    optimizer.step()
    assert torch.equal(new.detach(), torch.full((2,), 0.5))
    assert torch.equal(old.detach(), before)
    assert torch.equal(optimizer.state[kept]["momentum_buffer"], momentum * 0.9)
    del optimizer.param_groups[0]
    optimizer.step()
    assert torch.equal(new.detach(), torch.full((2,), 0.5 - 0.5 * 1.9))


@pytest.mark.parametrize("gradients", ["autograd", "fixed"])
def test_parameters_put_into_shared_memory_later_are_refused(gradients: Any) -> None:
    params = many_parameters(5)
    optimizer = FusedAdamW(params, gradients=gradients)
    run(optimizer, params, [0])
    for param in params:
        param.share_memory_()
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match=r"parameter 0 of shape \(4,\) was put into shared memory"):
        run(optimizer, params, [1])
    assert_equal(params, before)
    assert all(param.is_shared() for param in params)
