"""Small runs without a learning rate, which the tests of the scouting phase share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from tests.training import batch, loss_of, network, with_averaging

REPLICAS, STEPS = 4, 50

#: 20 of 50 steps, in two rounds of 5 and 15, in which every replica is apart.
QUICK = hk.ScoutSettings(share=2 / 3, apart=1.0, fewest=4, lowest=1e-5, highest=1.0)
PHASE, ROUNDS, RUN = 20, (5, 15), 30

#: 20 of 50 steps, in a round of 6 apart and two of 7 in teams.
TEAMS = hk.ScoutSettings(share=2 / 3, apart=0.2, fewest=4, lowest=1e-5, highest=1.0)
TEAM_ROUNDS = (6, 7, 7)


class StackRun:
    """A stack that is trained on the batches of its steps.

    ``max_lr=None`` begins with a scouting phase, within ``steps``; ``first`` is the number of the first batch.
    """

    def __init__(
        self,
        max_lr: float | list[float] | None = None,
        steps: int = STEPS,
        *,
        first: int = 0,
        make_optimizer: Callable[..., Any] = hk.FusedAdamW,
        gradients: Any = "shared",
        dtype: torch.dtype = torch.float32,
        replicas: int = REPLICAS,
        device: str = "cpu",
        cuda_graphs: bool = False,
        **options: Any,
    ) -> None:
        model = network(batch_norm=True).to(device, dtype)
        self.dtype, self.device, self.replicas, self.step = dtype, device, replicas, first
        self.stack = hk.ReplicaStack(model, replicas, gradients=gradients, cuda_graphs=cuda_graphs)
        named = list(self.stack.named_parameters())
        inner = [param for name, param in named if name.startswith("inner")]
        others = [param for name, param in named if not name.startswith("inner")]
        self.optimizer = make_optimizer([{"params": inner}, {"params": others, "lr": 0.0025}], lr=0.01)
        if max_lr is None:
            options.setdefault("scout", QUICK)
        self.scheduler = hk.HDETOneCycleLR(
            self.optimizer,
            max_lr,
            steps,
            ensemble=self.stack.ensemble,
            **with_averaging({"cycle_momentum": True, **options}),
        )

    def train(self, steps: int) -> list[Any]:
        """Make steps; return the learning rates of all groups and replicas at each of them."""
        rates = []
        for _ in range(steps):
            groups = self.optimizer.param_groups
            rates.append([(group["lr"], group.get("per_replica", {}).get("lr")) for group in groups])
            x, y = (tensor.to(self.device, self.dtype) for tensor in batch(0, self.step, size=8 * self.replicas))
            losses = self.stack.backward(loss_of, x, y)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step(losses)
            self.step += 1
        return rates

    def tensors(self) -> dict[str, Any]:
        """Return everything that training changes."""
        state = self.optimizer.state_dict()["state"]
        model = {name: tensor.clone() for name, tensor in self.stack.state_dict().items()}
        return {"model": model, "state": {key: {n: t.clone() for n, t in e.items()} for key, e in state.items()}}

    def saved(self) -> dict[str, Any]:
        """Return a checkpoint, in memory of its own."""
        return {
            "model": self.tensors()["model"],
            "optimizer": _copied(self.optimizer.state_dict()),
            "scheduler": _copied(self.scheduler.state_dict()),
            "step": self.step,
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.stack.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        self.step = saved["step"]


class RankRun:
    """One of several ranks under DDP, or without it.

    ``ddp=False`` trains on local gradients, and ``tells`` passes the model to the scheduler; the others as above.
    """

    def __init__(
        self,
        rank: int,
        max_lr: float | None = None,
        steps: int = STEPS,
        *,
        first: int = 0,
        ddp: bool = True,
        tells: bool = True,
        make_optimizer: Callable[..., Any] = hk.FusedAdamW,
        **options: Any,
    ) -> None:
        self.rank, self.step = rank, first
        plain = network(batch_norm=True)
        self.model = DistributedDataParallel(plain) if ddp else plain
        self.optimizer = make_optimizer(plain.parameters(), lr=0.01)
        if max_lr is None:
            options.setdefault("scout", QUICK)
        self.scheduler = hk.HDETOneCycleLR(
            self.optimizer, max_lr, steps, model=self.model if tells else None, **options
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = loss_of(self.model, *batch(self.rank, self.step))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss)
            self.step += 1

    def tensors(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()["state"]
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "state": {key: {n: t.clone() for n, t in entry.items()} for key, entry in state.items()},
        }

    def saved(self) -> dict[str, Any]:
        model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        optimizer, scheduler = _copied(self.optimizer.state_dict()), _copied(self.scheduler.state_dict())
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": self.step}

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        self.step = saved["step"]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return type(value)(_copied(entry) for entry in value) if isinstance(value, list | tuple) else value
