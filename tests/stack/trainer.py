"""A training run of a stack: stack, optimizer and scheduler."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hdet_kernels as hk
from tests.training import batch, loss_of, network, with_averaging

REPLICAS = 4

# A run with a sync at 30 % of its steps (12), where the learning rate is explored no longer, and at 90 % (36).
SHORT: dict[str, Any] = {"total_steps": 40, "sync_every": 4}

# The same with weight decay explored after the learning rate.
DECAY: dict[str, Any] = {"explore": [hk.Explore("weight_decay", base=0.1)], "replicas": 8, **SHORT}


def data(step: int, replicas: int = REPLICAS) -> tuple[Tensor, Tensor]:
    """Return the batches of all replicas at a step, concatenated."""
    x, y = (torch.cat(parts) for parts in zip(*(batch(r, step) for r in range(replicas)), strict=True))
    return x, y


class StackTrainer:
    """A stack with its optimizer and scheduler."""

    def __init__(
        self,
        *,
        replicas: int = REPLICAS,
        gradients: Any = "shared",
        make_optimizer: Any = hk.FusedAdamW,
        make_scheduler: Any = hk.HDETOneCycleLR,
        lr: Any = 0.01,
        batch_norm: bool = False,
        **options: Any,
    ) -> None:
        self.stack = hk.ReplicaStack(network(batch_norm), replicas, gradients=gradients)
        self.optimizer = make_optimizer(self.stack.parameters(), lr=lr)
        options = {"ensemble": self.stack.ensemble, **options}
        if make_scheduler is hk.HDETOneCycleLR:
            options = {"max_lr": 0.01, "total_steps": 24, "sync_every": 4, **options}
        self.scheduler = make_scheduler(self.optimizer, **with_averaging(options))
        self.loss_fn = loss_of

    def train(self, steps: int) -> StackTrainer:
        for _ in range(steps):
            losses = self.stack.backward(self.loss_fn, *data(self.scheduler.last_epoch, self.stack.replicas))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step(losses)
        return self

    def parameters(self) -> Tensor:
        """Return the parameters of all replicas, [R, n]."""
        return torch.cat([p.detach().flatten(1) for p in self.stack.parameters()], dim=1)

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = (self.stack, self.optimizer, self.scheduler)
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, saved: bytes) -> StackTrainer:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip((self.stack, self.optimizer, self.scheduler), states, strict=True):
            part.load_state_dict(state)
        return self


def probed_trainer(**options: Any) -> StackTrainer:
    """Return a trainer with a probe: losses are compared on one batch, the same at every sync."""
    trainers: list[StackTrainer] = []
    options = {"total_steps": 160, "sync_every": 16, **options}

    def probe() -> Tensor:
        return trainers[0].stack.losses(loss_of, *batch(0, 999), same_batch=True)

    trainers.append(StackTrainer(probe=probe, **options))
    return trainers[0]


def learning_rates(trainer: StackTrainer, group: int = 0) -> list[float]:
    """Return the learning rate of each replica in a parameter group."""
    return [float(rate) for rate in trainer.optimizer.param_groups[group]["per_replica"]["lr"]]


def two_groups(params: Any, lr: float) -> hk.FusedAdamW:
    """Return an optimizer with the first parameter in one group and the others in a second."""
    first, *others = params
    return hk.FusedAdamW([{"params": [first]}, {"params": others}], lr=lr)


def departures(trainer: StackTrainer) -> np.ndarray:
    """Return [groups, replicas], which replicas have another learning rate than the base one."""
    base = trainer.scheduler.get_base_lr()
    return np.array([[rate != float(base[g]) for rate in learning_rates(trainer, g)] for g in range(len(base))])


def shifted_loss(stack: hk.ReplicaStack, seen: list[Tensor]) -> Any:
    """Return a loss whose targets are shifted by the explored scalar ``shift``. Appends what it reads to ``seen``."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(stack.hyper["shift"])
        return F.mse_loss(model(x), y + stack.hyper["shift"])

    return loss_fn
