"""A small real training run that the multi-process tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk

WIDTH = 6


class Net(nn.Module):
    """Two layers with, on request, a BatchNorm between them, and a dropout whose rate is a plain attribute."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 16)
        self.norm: nn.Module = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout(0.0)
        self.outer = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.dropout(torch.tanh(self.norm(self.inner(x)))))
        return out


def network(batch_norm: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(batch_norm)


def batch(rank: int, step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Return the batch of a rank at a step: a function of both, so that a resumed run sees the same data."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(size, WIDTH, generator=generator)
    return x, (x.sum(dim=1, keepdim=True) / 2).sin()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def same(a: Any, b: Any) -> bool:
    """Return whether two nested results are equal bit for bit; NaN equals NaN."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


def with_averaging(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a scheduler, with those of :class:`hk.Averaging`, given by their own names, in one."""
    moved = {field.name: field.name for field in fields(hk.Averaging)} | {
        "average_state": "state",
        "average_buffers": "buffers",
    }
    own = {moved[name]: value for name, value in options.items() if name in moved}
    others = {name: value for name, value in options.items() if name not in moved}
    return {**others, "averaging": hk.Averaging(**own)} if own else others


class Trainer:
    """Model, optimizer and scheduler of one rank.

    Args:
        ddp: False trains on local gradients.
        average_buffers: pass the model to the scheduler, which then averages its buffers.
        first_batch: the number of the batch of the first step.
        scheduler: options of the scheduler.
    """

    def __init__(
        self,
        rank: int,
        *,
        ddp: bool = True,
        make_optimizer: Callable[..., Any] = torch.optim.AdamW,
        make_scheduler: Callable[..., Any] = hk.HDETOneCycleLR,
        batch_norm: bool = False,
        groups: bool = False,
        average_buffers: bool = False,
        lr: Any = 0.01,
        device: str = "cpu",
        first_batch: int = 0,
        **scheduler: Any,
    ) -> None:
        self.rank, self.first_batch = rank, first_batch
        self.device = device
        self.module = network(batch_norm).to(device)
        self.model: nn.Module = DistributedDataParallel(self.module) if ddp else self.module
        params: Any = self.model.parameters()
        if groups:
            params = [{"params": list(part.parameters())} for part in (self.module.inner, self.module.outer)]
        self.optimizer = make_optimizer(params, lr=lr)
        if make_scheduler is hk.HDETOneCycleLR:
            scheduler = {"max_lr": 0.01, "total_steps": 12, "sync_every": 4, **scheduler}
        if average_buffers:
            scheduler["model"] = self.module
        self.scheduler = make_scheduler(self.optimizer, **with_averaging(scheduler))
        self.rates: list[list[float]] = []

    @property
    def step(self) -> int:
        return int(self.scheduler.last_epoch)

    def loss(self) -> Tensor:
        x, y = batch(self.rank, self.first_batch + self.step)
        return F.mse_loss(self.model(x.to(self.device)), y.to(self.device))

    def train(self, steps: int, before_step: Callable[[Trainer], None] | None = None) -> Trainer:
        for _ in range(steps):
            self.rates.append([float(group["lr"]) for group in self.optimizer.param_groups])
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            self.optimizer.step()
            if before_step is not None:
                before_step(self)
            self.scheduler.step(loss)
        return self

    def parameters(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters()]).clone()

    def moments(self) -> Tensor:
        state = self.optimizer.state
        return torch.cat([state[p]["exp_avg"].reshape(-1) for p in self.module.parameters()]).clone()
