"""Optimizers and replicas for tests of schedulers in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from hdet_kernels.ensemble import SingleReplica


class Place(SingleReplica):
    """Replica ``replica`` of ``size`` that show the same control row and are equal at every sync."""

    def __init__(self, size: int = 1, replica: int = 0) -> None:
        self.size = self.processes = size
        self.replica = self.process = replica

    def averages(self, device: torch.device) -> bool:
        return True

    def gather(self, rows: Tensor) -> Tensor:
        return rows.reshape(1, 1, -1).repeat(self.size, 1, 1)


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes or ((3, 2), (4,))]


def adam(**options: Any) -> Adam:
    return Adam(parameters(), **{"lr": 0.1, **options})


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Everything in the groups but the parameters, by value."""
    return [copy.deepcopy({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]


def advance(optimizer: Optimizer, scheduler: Any, *args: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    scheduler.step(*args)
