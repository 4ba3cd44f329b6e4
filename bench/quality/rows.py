"""Train many runs of one task at once: each run is a row of a stack with a learning rate and a seed of its own.

A small model leaves most of a GPU idle, and a grid of learning rates is the same computation with other numbers. Rows
are never averaged: row r is plain training with learning rate ``lrs[r]`` on the batches of seed ``seeds[r]``.

With ``sync_every`` the loop also looks at all rows as a controller would: levels, and slopes of the loss in the
logarithm of the learning rate, from gradients and from the probe. ``observe`` records that for fits and replays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Generator, Tensor
from torch.optim.lr_scheduler import OneCycleLR

import hdet_kernels as hk
from bench.quality.observations import CLIMB, Array, Observed
from bench.quality.peers import replica_optimizer
from bench.quality.suite import COSTLY
from bench.quality.tasks import Batch, Task
from bench.quality.train import validation_loss
from hdet_kernels.optim.group_entries import write_per_replica
from hdet_kernels.schedule.gradients import SLOPE_STEPS


@dataclass
class Seen:
    """One sync of all rows; arrays are [rows]. Slopes are of the loss in the logarithm of the learning rate.

    Args:
        step: the step that the sync follows.
        level: mean training loss since the last sync; of several batches only.
        probe: loss on the probe.
        slope, error: from gradients: mean and standard error over the steps after the last sync, of the cycle before.
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
class Rows:
    """Outcome: validation losses [rows] and everything that was seen."""

    val: Array
    seen: list[Seen] = field(default_factory=list)


def one_cycle(steps: int, warm_up: float) -> Array:
    """Return OneCycleLR's learning rates of all steps for a peak of 1 after a share ``warm_up`` of them."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = OneCycleLR(optimizer, 1.0, steps, pct_start=warm_up, cycle_momentum=False)
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
    sync_every: int | None = None,
) -> Rows:
    """Train ``len(lrs)`` runs.

    Args:
        task: the task.
        lrs: peak learning rate of each run.
        seeds: seed of each run, of its initial parameters and its batches.
        device: where.
        steps: steps of each run; default: the task's.
        sync_every: steps between two looks; None: nothing is looked at.
    """
    steps = steps or task.steps
    count = task.replicas * task.batch
    stack = _stack(task, seeds, device)
    optimizer = replica_optimizer(task.optimizer, [{"params": list(stack.parameters())}], lrs[0], task.clip)
    group, peaks = optimizer.param_groups[0], np.array(lrs)
    distinct = sorted(set(seeds))
    generators = [Generator(device).manual_seed(1000 + seed) for seed in distinct]
    places = torch.tensor([distinct.index(seed) for seed in seeds], device=device)
    schedule = one_cycle(steps, task.warm_up)
    found, watch = Rows(np.zeros(0)), None
    if sync_every is not None:
        watch = _Watch(task, stack)
    for step in range(steps):
        values = tuple((peaks * schedule[step]).tolist())
        group["lr"] = values[0]
        write_per_replica(group, "lr", values[0], values)
        losses = stack.backward(task.loss, *_batch(task, generators, places, count))
        if watch is not None:
            watch.before_step(losses)
        optimizer.step()
        stack.zero_grad()
        if watch is not None and (step + 1) % sync_every == 0:  # type: ignore[operator]
            found.seen.append(watch.look(step + 1, np.full(len(lrs), schedule[step])))
    found.val = np.array([validation_loss(task, stack.replica(row)) for row in range(len(lrs))])
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


class _Watch:
    """Losses, displacements and slopes of all rows between two looks."""

    def __init__(self, task: Task, stack: hk.ReplicaStack) -> None:
        self.task, self.stack = task, stack
        self.params = [param.data for param in stack.parameters()]
        self.stacked = list(stack.parameters())
        self.probe = task.probe()
        self.last = [param.clone() for param in self.params]
        self.moved: list[Tensor] | None = None
        self.dots: list[Tensor] = []
        self.losses: list[Tensor] = []

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
        self.last = [param.clone() for param in self.params]
        return Seen(step, *numbers, rate=rate)

    def _probe_at(self, moved: list[Tensor], shift: float) -> Tensor:
        for param, move in zip(self.params, moved, strict=True):
            param.add_(move, alpha=shift)
        losses = self.stack.losses(self.task.loss, *self.probe, same_batch=True).clone()
        for param, move in zip(self.params, moved, strict=True):
            param.sub_(move, alpha=shift)
        return losses


# Learning rates as powers of two times the task's ``lr``, and seeds; fewer for the largest models.
POWERS, SEEDS = range(-6, 7), range(2)
FEWER_POWERS, FEWER_SEEDS = range(-4, 6), range(1)
# Steps between two syncs, as a share of the run.
SYNC_SHARE = 0.0125
SEEN = ("level", "probe", "slope", "error", "probe_slope", "rate")


def observe(task: Task, device: torch.device, *, steps: int | None = None) -> Observed:
    """Train all runs of a task at once and return what was seen while the learning rate climbed.

    Args:
        task: The task.
        device: Where.
        steps: Steps of each run; default: the task's.
    """
    powers, seeds = (FEWER_POWERS, FEWER_SEEDS) if task.name in COSTLY else (POWERS, SEEDS)
    total = steps or task.steps
    runs = [(task.lr * 2.0**power, seed) for seed in seeds for power in powers]
    lrs, chosen = [lr for lr, _ in runs], [seed for _, seed in runs]
    found = train_rows(task, lrs, chosen, device, steps=total, sync_every=max(round(SYNC_SHARE * total), 2))
    climb = [seen for seen in found.seen if seen.step <= CLIMB * total]
    return Observed(
        steps=total,
        warm_up=task.warm_up,
        lrs=np.array(lrs),
        seeds=np.array(chosen, dtype=np.float64),
        val=found.val,
        step=np.array([seen.step for seen in climb], dtype=np.float64),
        **{name: _stacked(climb, name) for name in SEEN},
    )


def _stacked(climb: list[Seen], name: str) -> Array:
    return np.array([getattr(seen, name) for seen in climb])
