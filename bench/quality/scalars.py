"""Explore scalars other than the learning rate: does the controller move them towards the best value?

Dropout, label smoothing and attention temperature act in the loss: replicas need local gradients, and the probe is
evaluated without them. Weight decay acts in the optimizer's step. The best value is known from a grid of fixed values.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

import hdet_kernels as hk

from .results import Record
from .tasks import Task
from .train import validation_loss

# (model, value of the scalar, batch) → loss.
ScalarLoss = Callable[[Any, Tensor, tuple[Tensor, ...]], Tensor]


@dataclass(frozen=True)
class Scalar:
    """A scalar and the task that it is explored on.

    Args:
        task: Name of the task.
        lr: Learning rate of its runs.
        grid: Fixed values that are compared.
        starts: A value below and one above the best of the grid.
        bounds: Limits of the exploration.
        loss: The loss with the scalar, or None for an option of the optimizer.
    """

    task: str
    lr: float
    grid: tuple[float, ...]
    starts: tuple[float, float]
    bounds: tuple[float, float]
    loss: ScalarLoss | None


def _dropout(model: Any, rate: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    pixels, classes = batch
    return F.cross_entropy(model(pixels, dropout=rate), classes)


def _smoothed(model: Any, smoothing: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    pixels, classes = batch
    logits = model(pixels).log_softmax(-1)
    chosen = F.nll_loss(logits, classes)
    return (1 - smoothing) * chosen - smoothing * logits.mean()


def _temperature(model: Any, temperature: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    text, following = batch
    return F.cross_entropy(model(text, temperature).flatten(0, -2), following.flatten())


SCALARS: dict[str, Scalar] = {
    "dropout": Scalar("few digits", 2e-3, (0.02, 0.15, 0.5, 0.7, 0.9, 0.95), (0.15, 0.9), (0.001, 0.95), _dropout),
    "label smoothing": Scalar("few digits", 2e-3, (0.001, 0.01, 0.05, 0.2, 0.5), (0.001, 0.5), (1e-4, 0.9), _smoothed),
    "weight_decay": Scalar("few digits", 2e-3, (0.01, 0.1, 1.0, 10.0, 30.0), (0.01, 30.0), (1e-4, 60.0), None),
    "temperature": Scalar("language", 8e-3, (0.1, 0.3, 1.0, 3.0, 10.0), (0.1, 10.0), (0.01, 100.0), _temperature),
}


def train_scalar(
    task: Task, name: str, value: float, seed: int, device: torch.device, *, explores: bool, steps: int | None = None
) -> Record:
    """Train with the scalar fixed at ``value``, or explored from there.

    The record has the validation loss, computed without the scalar, and the final value of an explored scalar.
    """
    start = time.perf_counter()
    scalar, steps = SCALARS[name], steps or task.steps
    torch.manual_seed(seed)
    gradients: Literal["shared", "local"] = "shared" if scalar.loss is None else "local"
    model, graphs = task.model().to(device), device.type == "cuda"
    stack = hk.ReplicaStack(model, task.replicas, gradients=gradients, cuda_graphs=graphs)
    options = {name: value} if scalar.loss is None else {}
    optimizer = hk.FusedAdamW(stack.parameters(), lr=scalar.lr, **options)  # type: ignore[arg-type]
    stack.hyper[name] = value
    batch_of_probe = task.probe()

    def loss(model: Any, *batch: Tensor) -> Tensor:
        return task.loss(model, *batch) if scalar.loss is None else scalar.loss(model, stack.hyper[name], batch)

    def probe() -> Tensor:
        return stack.losses(task.loss, *batch_of_probe, same_batch=True)

    explore = hk.Explore(name, spread=0.5, base=value, bounds=scalar.bounds)
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        scalar.lr,
        steps,
        cycle_momentum=False,
        spread=0.0,
        explore=[explore] if explores else [],
        auto_lr=explores,
        probe=probe if explores else None,
        ensemble=stack.ensemble,
        seed=seed,
    )
    generator = Generator(device).manual_seed(1000 + seed)
    for _ in range(steps):
        losses = stack.backward(loss, *task.draw(task.replicas * task.batch, generator))
        optimizer.step()
        stack.zero_grad()
        scheduler.step(losses)
    found = {"val": validation_loss(task, stack.module()), "seconds": time.perf_counter() - start}
    if explores:
        found["end"] = value * math.exp(scheduler.cycle.spread.controller_state["mu"][-1])
    return {"task": scalar.task, "scalar": name, "value": value, "seed": seed, "explores": explores, **found}
