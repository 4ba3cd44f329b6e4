"""Train many runs of one task at once: each run is a row of a stack with a learning rate and a seed of its own.

A small model leaves most of a GPU idle, and a grid of learning rates is the same computation with other numbers. Rows
are never averaged: row r is plain training with learning rate ``lrs[r]`` on the batches of seed ``seeds[r]``.

The same loop emulates HDET with shared gradients: the mean of its replicas follows the base learning rate, and the
slope of their losses is the product of the next gradients with the last displacement (``docs/controller.md``). So a
design of a controller can be tried on a whole task, from all starts, in the time of a few runs. Results that are
reported come from runs of HDET itself (``train.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.optim.lr_scheduler import OneCycleLR

import hdet_kernels as hk
from hdet_kernels.optim.group_entries import write_per_replica

from .optimizers import replica_optimizer
from .tasks import Batch, Task
from .train import validation_loss

Array = NDArray[np.float64]

# Steps after a sync whose gradients are multiplied with the last displacement.
SLOPE_STEPS = 8


@dataclass
class Seen:
    """One sync of all rows; arrays are [rows]. Slopes are of the loss in the logarithm of the learning rate.

    Args:
        step: the step that the sync follows.
        level: mean training loss since the last sync; of several batches only.
        probe: loss on the probe.
        slope, error: from gradients: mean and standard error over steps after the last sync, of the cycle before it.
        probe_slope: from the probe, of the cycle that ends here.
        rate: base learning rate of the cycle over the run's own peak.
    """

    step: int
    level: Array
    probe: Array
    slope: Array
    error: Array
    probe_slope: Array
    rate: Array


@dataclass
class Moves:
    """What a controller answers: μ of every row, and which rows go back to their last sound parameters or keep them."""

    mu: Array
    undo: NDArray[np.bool_] | None = None
    keep: NDArray[np.bool_] | None = None


@dataclass
class Rows:
    """Outcome: validation losses [rows], mean training losses of the last fifth, and everything that was seen."""

    val: Array
    last: Array = field(default_factory=lambda: np.zeros(0))
    seen: list[Seen] = field(default_factory=list)
    mu: list[Array] = field(default_factory=list)


def one_cycle(steps: int) -> Array:
    """Return OneCycleLR's learning rates of all steps for a peak of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = OneCycleLR(optimizer, 1.0, steps, cycle_momentum=False)
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return np.array(rates)


def train_rows(
    task: Task,
    lrs: Sequence[float],
    seeds: Sequence[int],
    device: torch.device,
    *,
    steps: int | None = None,
    examples: int | None = None,
    sync_every: int | None = None,
    control: Callable[[Seen], Moves] | None = None,
) -> Rows:
    """Train ``len(lrs)`` runs.

    Args:
        task: the task.
        lrs: peak learning rate of each run.
        seeds: seed of each run, of its initial parameters and its batches.
        device: where.
        steps: steps of each run; default: the task's.
        examples: examples of each step; default: those of all replicas of the task.
        sync_every: steps between two looks; None: nothing is looked at.
        control: called at every look; returns μ, by which learning rates are multiplied as exp(μ).
    """
    steps = steps or task.steps
    count = examples or task.replicas * task.batch
    stack = _stack(task, seeds, device)
    optimizer = replica_optimizer(task.optimizer, [{"params": list(stack.parameters())}], lrs[0])
    group, peaks, mu = optimizer.param_groups[0], np.array(lrs), np.zeros(len(lrs))
    distinct = sorted(set(seeds))
    generators = [Generator(device).manual_seed(1000 + seed) for seed in distinct]
    places = torch.tensor([distinct.index(seed) for seed in seeds], device=device)
    schedule = one_cycle(steps)
    found, watch = Rows(np.zeros(0)), None
    late = torch.zeros(len(lrs), device=device)
    fifth = max(steps // 5, 1)
    if sync_every is not None:
        watch = _Watch(task, stack, optimizer, sync_every)
    for step in range(steps):
        values = tuple((peaks * np.exp(mu) * schedule[step]).tolist())
        group["lr"] = values[0]
        write_per_replica(group, "lr", values[0], values)
        losses = stack.backward(task.loss, *_batch(task, generators, places, count))
        if step >= steps - fifth:
            late += losses / fifth
        if watch is not None:
            watch.before_step(losses)
        optimizer.step()
        stack.zero_grad()
        if watch is not None and (step + 1) % sync_every == 0:  # type: ignore[operator]
            rate = schedule[step] * np.exp(mu)
            found.seen.append(watch.look(step + 1, rate))
            if control is not None:
                moves = control(found.seen[-1])
                mu = moves.mu
                watch.apply(moves)
            found.mu.append(mu.copy())
            watch.turn()
    found.last = late.double().cpu().numpy()
    found.val = np.array([_validation(task, stack, row) for row in range(len(lrs))])
    return found


def _stack(task: Task, seeds: Sequence[int], device: torch.device) -> hk.ReplicaStack:
    models = {}
    for seed in sorted(set(seeds)):
        torch.manual_seed(seed)
        models[seed] = task.model().to(device)
    graphs = device.type == "cuda"
    stack = hk.ReplicaStack(models[seeds[0]], len(seeds), gradients="local", cuda_graphs=graphs)
    with torch.no_grad():
        for name, rows in stack.named_parameters():
            for row, seed in enumerate(seeds):
                rows[row].copy_(models[seed].get_parameter(name))
    return stack


def _batch(task: Task, generators: Sequence[Generator], places: Tensor, count: int) -> Batch:
    drawn = [task.draw(count, generator) for generator in generators]
    if len(drawn) == 1:
        return tuple(part.repeat(len(places), *[1] * (part.dim() - 1)) for part in drawn[0])
    return tuple(torch.stack(parts)[places].flatten(0, 1) for parts in zip(*drawn, strict=True))


def _validation(task: Task, stack: hk.ReplicaStack, row: int) -> float:
    loss = validation_loss(task, stack.replica(row))
    return loss if math.isfinite(loss) else math.inf


class _Watch:
    """Losses, displacements and slopes of all rows between two looks."""

    def __init__(self, task: Task, stack: hk.ReplicaStack, optimizer: torch.optim.Optimizer, every: int) -> None:
        self.task, self.stack, self.optimizer, self.every = task, stack, optimizer, every
        self.params = [param.data for param in stack.parameters()]
        self.stacked = list(stack.parameters())
        self.probe = task.probe()
        self.last = [param.clone() for param in self.params]
        self.moved: list[Tensor] | None = None
        self.dots: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.kept: list[Tensor] | None = None
        self.start = [tensor.clone() for tensor in (*self.params, *stack.buffers())]

    def before_step(self, losses: Tensor) -> None:
        self.losses.append(losses.clone())
        if self.moved is not None and len(self.dots) < SLOPE_STEPS:
            rows = len(losses)
            self.dots.append(
                torch.stack(
                    [
                        (param.grad.reshape(rows, -1) * moved.reshape(rows, -1)).sum(1)
                        for param, moved in zip(self.stacked, self.moved, strict=True)
                        if param.grad is not None
                    ]
                ).sum(0)
            )

    @torch.no_grad()
    def look(self, step: int, rate: Array) -> Seen:
        moved = [now - before for now, before in zip(self.params, self.last, strict=True)]
        at = [self._probe_at(moved, shift) for shift in (-0.2, 0.0, 0.2)]
        dots = torch.stack(self.dots) if self.dots else torch.zeros(1, len(rate), device=at[0].device)
        n = len(dots)
        error = dots.std(0) / math.sqrt(n) if n > 1 else torch.full_like(dots[0], math.inf)
        level = torch.stack(self.losses).mean(0)
        slope_of_probe = (at[2] - at[0]) / 0.4
        numbers = torch.stack([level, at[1], dots.mean(0), error, slope_of_probe]).double().cpu().numpy()
        self.moved, self.dots, self.losses = moved, [], []
        return Seen(step, *numbers, rate=rate)

    def _probe_at(self, moved: list[Tensor], shift: float) -> Tensor:
        for param, move in zip(self.params, moved, strict=True):
            param.add_(move, alpha=shift)
        losses = self.stack.losses(self.task.loss, *self.probe, same_batch=True).clone()
        for param, move in zip(self.params, moved, strict=True):
            param.sub_(move, alpha=shift)
        return losses

    def _everything(self) -> list[Tensor]:
        state = [value for param in self.stacked for value in self.optimizer.state[param].values()]
        return [*self.params, *self.stack.buffers(), *state]

    @torch.no_grad()
    def apply(self, moves: Moves) -> None:
        """Restore and keep the rows that a controller says."""
        if moves.undo is None or moves.keep is None:
            return
        device = self.params[0].device
        if self.kept is None:
            state = self._everything()[len(self.start) :]
            self.kept = [*self.start, *(torch.zeros_like(tensor) for tensor in state)]
        for kept, now in zip(self.kept, self._everything(), strict=True):
            shape = (-1,) + (1,) * (now.dim() - 1)
            undo = torch.tensor(moves.undo, device=device).view(shape)
            keep = torch.tensor(moves.keep, device=device).view(shape)
            now.copy_(torch.where(undo, kept, now))
            kept.copy_(torch.where(keep, now, kept))

    @torch.no_grad()
    def turn(self) -> None:
        self.last = [param.clone() for param in self.params]
