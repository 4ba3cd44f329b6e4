"""Interface of a task, and what tasks share.

Batches are drawn for all replicas at once from one generator, so that a stack, processes and a plain run of the same
seed see the same examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

Batch = tuple[Tensor, ...]


class Task(Protocol):
    """Interface of a task.

    A run has ``steps`` optimizer steps on ``batch`` examples for each of ``replicas`` replicas. The best learning rate
    of plain training is within a few powers of two of ``lr``. ``data`` is the name of its data set, ``architecture``
    the kind of its model: mlp, residual, linear, embeddings, factorisation, convolution, transformer, recurrent or
    autoencoder. ``optimizer`` is a key of ``OPTIMIZERS``. Gradients are clipped to the norm ``clip``, or not at all,
    and OneCycleLR's learning rate climbs during a share ``warm_up`` of the run. A task ``overfits`` where the held-out
    loss rises while that of training falls, so that the best learning rate is one that no training loss shows.
    """

    name: ClassVar[str]
    data: ClassVar[str]
    title: ClassVar[str]
    steps: ClassVar[int]
    batch: ClassVar[int]
    lr: ClassVar[float]
    architecture: ClassVar[str]
    optimizer: ClassVar[str]
    replicas: ClassVar[int]
    clip: ClassVar[float | None]
    warm_up: ClassVar[float]
    overfits: ClassVar[bool]

    def model(self) -> nn.Module: ...

    def draw(self, count: int, generator: Generator) -> Batch:
        """Draw ``count`` training examples."""

    def probe(self) -> Batch:
        """Return held-out examples for the controller, disjoint from :meth:`validation`."""

    def validation(self) -> Batch: ...

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor: ...

    @staticmethod
    def group(name: str) -> str:
        """Return the group of a parameter: embedding, no-decay, transformer or dense."""


class Defaults:
    """The optimizer, the number of replicas, the warm-up and the parameter groups of most tasks."""

    optimizer: ClassVar[str] = "adamw"
    replicas: ClassVar[int] = 8
    clip: ClassVar[float | None] = None
    warm_up: ClassVar[float] = 0.3
    overfits: ClassVar[bool] = False

    @staticmethod
    def group(name: str) -> str:
        if name.startswith(("tables", "bytes", "words", "positions")):
            return "embedding"
        return no_decay(name) or ("transformer" if name.startswith("block") else "dense")


class Examples(Defaults):
    """Examples as tensors on the device; the first dimension counts examples."""

    train: Batch
    unseen: Batch

    def divide(self, unseen: Tensor, device: torch.device, *tensors: Tensor) -> None:
        """Split the tensors into training and held-out examples."""
        self.train = tuple(tensor[~unseen].to(device) for tensor in tensors)
        self.unseen = tuple(tensor[unseen].to(device) for tensor in tensors)

    def draw(self, count: int, generator: Generator) -> Batch:
        rows = torch.randint(len(self.train[0]), (count,), generator=generator, device=self.train[0].device)
        return tuple(part[rows] for part in self.train)

    def probe(self) -> Batch:
        return tuple(part[0::2][: self.probes] for part in self.unseen)

    def validation(self) -> Batch:
        return tuple(part[1::2] for part in self.unseen)

    probes = 2048


class Classes(Examples):
    """Inputs with a class number each."""

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        inputs, classes = batch
        return F.cross_entropy(model(inputs), classes)


def in_bfloat16(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss that is computed under autocast in bfloat16, wherever a task is trained or evaluated."""

    def under_autocast(model: Any, *batch: Tensor) -> Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            return loss(model, *batch)

    return under_autocast


def no_decay(name: str) -> str | None:
    """Return the group of biases and norms, or None for another parameter."""
    return "no-decay" if name.endswith("bias") or "norm" in name else None
