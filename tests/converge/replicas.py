"""The replicas of one process that train on gradients of their own: one, or the rows of a stack."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hdet_kernels as hk
from tests.training import batch, loss_of, network, with_averaging


class Replicas:
    """Model, optimizer and scheduler of one rank.

    Args:
        rank: decides the batches.
        rows: replicas of a stack; 0 for one replica without a stack.
        dtype: of the parameters.
        make: makes the optimizer.
        device: of the parameters.
        options: of the scheduler, with those of ``averaging=`` by their own names.
    """

    def __init__(
        self, rank: int, rows: int, dtype: torch.dtype, make: Callable[..., Any], device: str = "cpu", **options: Any
    ) -> None:
        self.rank, self.rows, self.dtype, self.device = rank, rows, dtype, device
        self.model: Any = network().to(device, dtype)
        if rows:
            self.model = hk.ReplicaStack(self.model, rows, gradients="local")
            options["ensemble"] = self.model.ensemble
        else:
            options["gradients"] = "local"
        self.optimizer = make(self.model.parameters(), lr=0.01)
        self.scheduler = hk.HDETOneCycleLR(self.optimizer, **with_averaging(options))

    def optimize(self) -> Tensor:
        """The optimizer's part of a step."""
        step = self.scheduler.last_epoch
        first = self.rank * max(self.rows, 1)
        parts = zip(*(batch(first + row, step) for row in range(max(self.rows, 1))), strict=True)
        x, y = (torch.cat(part).to(self.device, self.dtype) for part in parts)
        self.optimizer.zero_grad()
        if self.rows:
            loss: Tensor = self.model.backward(loss_of, x, y)
        else:
            loss = loss_of(self.model, x, y)
            loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, steps: int) -> Replicas:
        for _ in range(steps):
            self.scheduler.step(self.optimize())
        return self

    def numbers(self) -> Tensor:
        """[rows, n], in fp64 on the CPU: the parameters as they are averaged, their masters where there are any."""
        buckets = getattr(self.optimizer, "buckets", None)
        tensors = buckets.views(buckets.full) if buckets else list(self.model.parameters())
        return torch.cat([t.detach().double().reshape(max(self.rows, 1), -1) for t in tensors], dim=1).cpu()

    def state(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in (self.model, self.optimizer, self.scheduler)]

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save(self.state(), file)
        return file.getvalue()

    def load(self, saved: bytes) -> Replicas:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip((self.model, self.optimizer, self.scheduler), states, strict=True):
            part.load_state_dict(state)
        return self
