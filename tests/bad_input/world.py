"""The objects that malformed calls are made on: a small training run in the middle, and all of it that can change.

:class:`World` has a model, a fused optimizer and a scheduler after a few steps, and beside them an optimizer of torch
that no scheduler has touched. :class:`StackWorld` has a stack of two replicas instead. :meth:`World.snapshot` returns
all of their state as plain values that compare bit by bit.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.ops.backends import chosen

STEPS, SYNC = 8, 2


class World:
    """A model with BatchNorm, FusedAdamW in two groups and HDETOneCycleLR, three steps into a run of eight."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.inputs = torch.randn(8, 3)
        first, norm, last = self.model
        groups = [{"params": [*first.parameters(), *norm.parameters()]}, {"params": last.parameters()}]
        self.optimizer = hk.FusedAdamW(groups, lr=1e-3)
        self.scheduler = hk.HDETOneCycleLR(
            self.optimizer, [1e-2, 2e-2], STEPS, sync_every=SYNC, spread=0.1, auto_lr=False, model=self.model
        )
        #: An optimizer of torch, with two groups, that no scheduler has touched.
        self.bare_model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        self.bare = torch.optim.SGD([{"params": part.parameters()} for part in self.bare_model], lr=0.1, momentum=0.9)
        for _ in range(3):
            self.train()

    def train(self) -> None:
        """Take one good step."""
        self.optimizer.zero_grad()
        loss = self.model(self.inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step(loss)

    def snapshot(self) -> dict[str, Any]:
        return _snapshot(
            model=_module(self.model),
            bare_model=_module(self.bare_model),
            optimizer=_optimizer(self.optimizer),
            bare=_optimizer(self.bare),
            scheduler={"state": self.scheduler.state_dict()},
        )


class StackWorld:
    """A stack of two replicas with FusedSGD and HDETOneCycleLR, three steps into a run of eight."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.stack = hk.ReplicaStack(self.module, 2, gradients="local")
        self.stack.hyper["scale"] = 1.0
        self.inputs = torch.randn(8, 3)
        self.optimizer = hk.FusedSGD(self.stack.parameters(), lr=1e-3, momentum=0.9)
        self.scheduler = hk.HDETOneCycleLR(
            self.optimizer, 1e-2, STEPS, sync_every=SYNC, spread=0.1, auto_lr=False, ensemble=self.stack.ensemble
        )
        for _ in range(3):
            self.train()

    def loss(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return (self.stack.hyper["scale"] * model(inputs)).square().mean()

    def train(self) -> None:
        """Take one good step."""
        self.optimizer.zero_grad()
        losses = self.stack.backward(self.loss, self.inputs)
        self.optimizer.step()
        self.scheduler.step(losses)

    def snapshot(self) -> dict[str, Any]:
        stack = {
            "gradients": [parameter.grad for parameter in self.stack.parameters()],
            "hyper": dict(self.stack.hyper),
        }
        return _snapshot(
            module=_module(self.module),
            stack={"state": self.stack.state_dict(), **stack},
            optimizer=_optimizer(self.optimizer),
            scheduler={"state": self.scheduler.state_dict()},
        )


def _snapshot(**parts: dict[str, Any]) -> dict[str, Any]:
    """Return everything that a call could change, as values that compare bit by bit."""
    return {f"{part} {name}": frozen(value) for part, values in parts.items() for name, value in values.items()}


def _module(module: nn.Module) -> dict[str, Any]:
    parameters = list(module.parameters())
    return {
        "tensors": module.state_dict(),
        "gradients": [param.grad for param in parameters],
        "hooks": [len(part._forward_hooks) + len(part._backward_hooks) for part in module.modules()],
        "modes": [part.training for part in module.modules()],
        "places": [(param.data_ptr(), param.requires_grad, param.dtype) for param in parameters],
    }


def _optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = optimizer.param_groups
    return {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "members": [[id(param) for param in group["params"]] for group in groups],
        "state": optimizer.state_dict()["state"],
        "hooks": {name: len(value) for name, value in vars(optimizer).items() if name.endswith("_hooks")},
        "attributes": sorted(vars(optimizer)),
        "max_grad_norm": getattr(optimizer, "max_grad_norm", None),
    }


def process_snapshot() -> dict[str, Any]:
    """Return the state of this process that a call could change: generators, backend, modes."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    return {
        "torch's generator": frozen(torch.get_rng_state()),
        "numpy's generator": frozen(numpy),
        "python's generator": random.getstate(),
        "backend": chosen(),
        "default dtype": torch.get_default_dtype(),
        "gradients on": torch.is_grad_enabled(),
    }


def frozen(value: Any) -> Any:
    """Return ``value`` with tensors and floats as bytes, so that equal means bit-identical, NaN included."""
    if isinstance(value, Tensor) and (value.numel() > 10**6 or value.is_meta):
        return str(value.dtype), tuple(value.shape)  # a hostile one: nothing here is as large, or without values
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), str(value.device), whole.numpy().tobytes()
    if isinstance(value, float):
        return type(value).__name__, struct.pack("d", value)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):  # how long a sync took differs from run to run
        return {key: frozen(entry) for key, entry in value.items() if key != "seconds"}
    if isinstance(value, list | tuple):
        return type(value).__name__, [frozen(entry) for entry in value]
    return value


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the parts in which two snapshots differ."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]
