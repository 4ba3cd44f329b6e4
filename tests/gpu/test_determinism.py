"""The same steps from the same state give the same bits on a CUDA device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from tests.ops.cases import available
from tests.optim.cases import FUSED, fused_optimizer, give_gradients
from tests.ranks import run_ranks
from tests.stack.trainer import data
from tests.training import Trainer, loss_of, network, with_averaging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

BACKENDS = [available("cuda", "cuda"), available("triton", "cuda")]

# Large enough for many blocks, and no multiple of a block.
SIZES = (1_000_003, 4097, 1)

#: dtype of the parameters and options of the optimizer.
PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp32-clipped": (torch.float32, {"max_grad_norm": 1.0}),
    "bf16-master": (torch.bfloat16, {"max_grad_norm": 1.0}),
    "bf16-stochastic": (torch.bfloat16, {"stochastic_rounding": True}),
    "state-bf16-stochastic": (torch.float32, {"state_dtype": torch.bfloat16, "stochastic_rounding": True}),
    "fixed": (torch.float32, {"gradients": "fixed", "max_grad_norm": 1.0}),
}


def assert_same_bits(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return copies of all parameters and of their state."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [value for param in params for value in optimizer.state[param].values()]
    return [tensor.detach().clone() for tensor in (*params, *states) if isinstance(tensor, Tensor)]


def stepped(backend: str, name: str, dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(size, generator=generator).to("cuda", dtype)) for size in SIZES]
    optimizer = fused_optimizer(name, params, backend=backend, **options)
    for seed in range(4):
        if options.get("gradients") == "fixed":
            generator.manual_seed(seed)
            for param in params:
                assert param.grad is not None
                param.grad.copy_(torch.randn(param.shape, generator=generator))
        else:
            give_gradients(params, seed=seed)
        optimizer.step()
    return tensors_of(optimizer)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_are_deterministic(backend: tuple[str, str], name: str, precision: str) -> None:
    dtype, options = PRECISIONS[precision]
    assert_same_bits(stepped(backend[0], name, dtype, options), stepped(backend[0], name, dtype, options))


def trained_stack(gradients: Any, make: Callable[..., Any], **options: Any) -> list[Tensor]:
    stack = hk.ReplicaStack(network().cuda(), 4, gradients=gradients)
    optimizer = make(stack.parameters(), lr=0.01, max_grad_norm=1.0)
    settings = {"total_steps": 24, "sync_every": 4, "ensemble": stack.ensemble, **options}
    scheduler = hk.HDETOneCycleLR(optimizer, 0.01, **with_averaging(settings))
    for step in range(12):
        losses = stack.backward(loss_of, *(part.cuda() for part in data(step)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses)
    return tensors_of(optimizer)


@pytest.mark.parametrize("options", [{}, {"outer": hk.Outer(lr=0.7, momentum=0.9)}], ids=["mean", "outer"])
@pytest.mark.parametrize("make", [hk.FusedAdamW, hk.FusedLion], ids=["adamw", "lion"])
@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_steps_and_syncs_of_a_stack_are_deterministic(
    gradients: str, make: Callable[..., Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    first, second = (trained_stack(gradients, make, **options) for _ in range(2))
    assert_same_bits(first, second)


#: Options of averaging over processes.
AVERAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_bytes": 64},
    "bf16": {"compress": "bf16"},
    "int8 overlapped": {"compress": "int8", "overlap_steps": 2},
}


def _trained_ranks(rank: int) -> list[Tensor]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    found = []
    for options in AVERAGES.values():
        trainer = Trainer(rank, device="cuda", ddp=False, make_optimizer=hk.FusedAdamW, auto_lr=False, **options)
        found.append(trainer.train(12).parameters().cpu())
    return found


def test_averages_over_processes_are_deterministic() -> None:
    for first, second in zip(run_ranks(2, _trained_ranks), run_ranks(2, _trained_ranks), strict=True):
        assert_same_bits(first, second)
