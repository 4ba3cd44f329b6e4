"""A model whose parameters divide unevenly, its training under ``fully_shard``, and meshes of four processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a model whose parameters divide unevenly, and leave some of four processes without a part."""
    torch.manual_seed(0)
    layers = nn.Embedding(11, 6), nn.Linear(6, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 1), nn.Flatten(0)
    return nn.Sequential(*layers).to(dtype)


def shard(module: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    for part in (module[1], module):
        fully_shard(part, mesh=mesh, **options)
    return module


def backward(module: nn.Module, rank: int, step: int) -> float:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs, targets = torch.randint(11, (8,), generator=generator), torch.randn(8, generator=generator)
    loss = (module(inputs).float() - targets).square().mean()
    loss.backward()
    return loss.item()


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int], clip: float | None = None
) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(backward(module, rank, step))
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return losses


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def numbers(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return parameters and state in full. All processes of the mesh must ask."""
    state = [entry[name] for entry in optimizer.state.values() for name in sorted(entry)]
    return [whole(tensor) for tensor in (*module.parameters(), *state)]


def meshes() -> dict[str, DeviceMesh]:
    return {
        "hsdp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        "fsdp": init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)),
    }
