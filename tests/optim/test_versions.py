"""Version counters of parameters: a backward through a graph from before a write in place raises, as in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from tests.ops.cases import BACKENDS
from tests.optim.cases import FUSED, choose_backends, fused_optimizer, give_gradients, parameters

STALE = "modified by an inplace operation"


def recorded() -> tuple[nn.Parameter, Tensor]:
    """Return a parameter with a gradient, and a loss whose graph needs the parameter's present values."""
    param = nn.Parameter(torch.ones(3))
    loss = (param * param).sum()
    param.grad = torch.ones(3)
    return param, loss


@pytest.mark.parametrize("name", FUSED)
def test_a_backward_through_a_graph_from_before_the_step_raises(name: str) -> None:
    param, loss = recorded()
    fused_optimizer(name, [param]).step()
    with pytest.raises(RuntimeError, match=STALE):
        loss.backward()
    (param * param).sum().backward()


@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "torch-cpu", "cpp-cpu"))
def test_versions_count_the_steps(backend: tuple[str, str]) -> None:
    where, device = backend
    params = parameters(device=device)
    optimizer = hk.FusedAdamW(params, backend=where)
    give_gradients(params, seed=0)
    before = [param._version for param in params]
    params[2].grad = None
    for _ in range(2):
        optimizer.step()
    # Without a gradient a parameter is not written, as in torch.
    assert [param._version - start for param, start in zip(params, before, strict=True)] == [2, 2, 0, 2, 2, 2]


def test_fixed_gradients_tied_parameters_and_inference_mode() -> None:
    param, loss = recorded()
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    fixed = hk.FusedSGD([param, frozen], gradients="fixed")
    version = frozen._version
    other, its_loss = recorded()
    twin = nn.Parameter(other.data)
    twin.grad, other.grad = torch.ones(3), None
    tied = hk.FusedSGD([other, twin])
    last, last_loss = recorded()
    fixed.step()
    tied.step()
    inferring = hk.FusedAdamW([last])
    with torch.inference_mode():
        inferring.step()
    for each in (loss, its_loss, last_loss):
        with pytest.raises(RuntimeError, match=STALE):
            each.backward()
    assert frozen._version == version


def test_the_option_is_off() -> None:
    param, loss = recorded()
    optimizer = hk.FusedSGD([param], lr=1.0, advance_versions=False)
    optimizer.step()
    loss.backward()
    assert torch.equal(param.grad, torch.ones(3)), "1 + 2 · 0: from the new values"  # type: ignore[arg-type]


def converge(scheduler: hk.HDETOneCycleLR) -> None:
    scheduler.converge()


def evaluate(scheduler: hk.HDETOneCycleLR) -> None:
    with scheduler.consensus():
        pass


@pytest.mark.parametrize("write", [converge, evaluate])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sync_advances_them(write: Callable[[hk.HDETOneCycleLR], None], dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = hk.FusedSGD([param], lr=0.1)
    scheduler = hk.HDETOneCycleLR(optimizer, max_lr=0.1, total_steps=10, auto_lr=False)
    loss = (param * param).sum()
    write(scheduler)
    with pytest.raises(RuntimeError, match=STALE):
        loss.backward()
