"""Train one task by one method.

HDET's replicas are the rows of a stack, or gloo processes under DDP, with the same data and the same scheduler. Plain
methods train one model on the batches of all replicas together. Every method sees the same number of examples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import hdet_kernels as hk

from .methods import Method, hdet_method
from .peers import PEERS, Running, Setup, plain_optimizer, replica_optimizer
from .results import Record, Spec
from .tasks import Batch, Task


def train(task: Task, spec: Spec, device: torch.device, until: int | None = None) -> Record:
    """Train, and return the validation loss, the curve of training losses and the learning rates over time.

    ``until`` ends the run after so many of its steps.
    """
    start = time.perf_counter()
    torch.manual_seed(spec.seed)
    steps = spec.steps or task.steps
    model = task.model().to(device)
    batches = islice(batches_of(task, steps, spec.seed, device), until)
    if spec.method in PEERS or spec.method == "plain":
        found = _train_plain(task, spec, model, batches, steps)
    else:
        found = _train_replicas(task, spec, model, batches, steps)
    return {**spec.record(), **found, "seconds": time.perf_counter() - start}


def validation_loss(task: Task, model: nn.Module, rows: int = 8192) -> float:
    """Return the mean loss over all validation examples; infinity where it is not finite."""
    batch = task.validation()
    count, total = len(batch[0]), 0.0
    model.eval()
    with torch.no_grad():
        for first in range(0, count, rows):
            part = tuple(tensor[first : first + rows] for tensor in batch)
            total += float(task.loss(model, *part)) * len(part[0])
    return total / count if math.isfinite(total) else math.inf


def param_groups(task: Task, named: Iterator[tuple[str, Tensor]], spec: Spec) -> list[dict[str, Any]]:
    """Return one parameter group, or those of the task with their own learning rates, sorted by name."""
    lr = 1.0 if spec.lr is None else spec.lr
    if not spec.factors:
        return [{"params": [param for _, param in named], "lr": lr, "name": "all"}]
    groups: dict[str, list[Tensor]] = {}
    for name, param in named:
        groups.setdefault(task.group(name), []).append(param)
    return [{"params": groups[name], "lr": lr * spec.factors.get(name, 1.0), "name": name} for name in sorted(groups)]


def schedule_of(kind: str, optimizer: torch.optim.Optimizer, steps: int, warm_up: float) -> LRScheduler | None:
    """Return a torch scheduler whose peaks are the groups' learning rates, or None for an optimizer without one.

    OneCycleLR's warm-up is the given share of the steps, that of a cosine 5 %.
    """
    if kind == "onecycle":
        peaks = [group["lr"] for group in optimizer.param_groups]
        return OneCycleLR(optimizer, peaks, steps, pct_start=warm_up, cycle_momentum=False)
    if kind == "cosine":
        warm = max(round(0.05 * steps), 1)

        def share(step: int) -> float:
            if step < warm:
                return (step + 1) / warm
            return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm + 1)))

        return LambdaLR(optimizer, share)
    if kind == "annealed":
        return LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    if kind == "constant":
        return LambdaLR(optimizer, lambda step: 1.0)
    return None


def batches_of(task: Task, steps: int, seed: int, device: torch.device) -> Iterator[Batch]:
    """Yield the batches of a run, each for all replicas together."""
    generator = Generator(device).manual_seed(1000 + seed)
    for _ in range(steps):
        yield task.draw(task.replicas * task.batch, generator)


def _train_plain(task: Task, spec: Spec, model: nn.Module, batches: Iterator[Batch], steps: int) -> Record:
    groups = param_groups(task, model.named_parameters(), spec)
    peer = PEERS.get(spec.method)
    if peer is None:
        optimizer = plain_optimizer(task.optimizer, groups, spec.lr)
        running = Running(optimizer, lambda loss: optimizer.step())
    else:
        running = peer.build(Setup(model, groups, spec.lr, steps, task.optimizer))
    schedule = schedule_of(spec.schedule if peer is None else peer.schedule, running.optimizer, steps, task.warm_up)
    losses: list[Tensor] = []
    for batch in batches:
        running.optimizer.zero_grad()
        loss = task.loss(model, *batch)
        loss.backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        losses.append(loss.detach())
        running.step(losses[-1])
        if schedule is not None:
            schedule.step()
    running.finish()
    if running.averaged:
        refresh_norms(task, model, spec.seed)
    every = max(round(0.025 * steps), 1)
    curve = torch.stack(losses)[: steps // every * every].view(-1, every).mean(1).tolist()
    return {"val": validation_loss(task, model), "curve": curve, "every": every}


def refresh_norms(task: Task, model: nn.Module, seed: int, count: int = 50) -> None:
    """Replace the statistics of batch norms by those of ``count`` training batches at the present parameters.

    Schedule-Free's authors recommend it before an evaluation: the parameters are an average that no batch has seen.
    """
    if not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()):
        return
    model.train()
    with torch.no_grad():
        for batch in batches_of(task, count, seed, next(model.parameters()).device):
            task.loss(model, *batch)


def _train_replicas(task: Task, spec: Spec, model: nn.Module, batches: Iterator[Batch], steps: int) -> Record:
    method = hdet_method(spec, steps)
    replicas: _Stack | _Rank = _Rank(task, model, method) if dist.is_initialized() else _Stack(task, model, method)
    groups = param_groups(task, replicas.named_parameters(), spec)
    optimizer = replica_optimizer(task.optimizer, groups, groups[0]["lr"], task.clip)
    if method.noise:
        hk.warm_noisy_init_(replicas.parameters(), nu=method.noise, seed=spec.seed, ensemble=replicas.ensemble)
    keywords: dict[str, Any] = {
        "ensemble": replicas.ensemble,
        "seed": spec.seed,
        "tie_groups": False,  # groups are there to be explored apart
        "probe": replicas.probe if spec.probe and method.keywords.get("auto_lr", True) is not False else None,
        **method.keywords,
    }
    scheduler: hk.HDETOneCycleLR | hk.HDETScheduler
    if spec.schedule == "onecycle":
        peaks = None if spec.lr is None else [group["lr"] for group in optimizer.param_groups]
        scheduler = hk.HDETOneCycleLR(optimizer, peaks, steps, pct_start=task.warm_up, cycle_momentum=False, **keywords)
    else:
        base = schedule_of(spec.schedule, optimizer, steps, task.warm_up)
        if base is None:
            raise ValueError(f"schedule={spec.schedule!r} is not one of onecycle, cosine, constant")
        scheduler = hk.HDETScheduler(base, total_steps=steps, **keywords)
    rates: list[list[float]] = []
    for batch in batches:
        losses = replicas.backward(*batch)
        optimizer.step()
        replicas.zero_grad()
        before = scheduler.history_summary.syncs
        scheduler.step(losses)
        if scheduler.history_summary.syncs > before:
            rates.append([float(rate) for rate in scheduler.get_base_lr()])
    history = scheduler.history
    control = scheduler.cycle.spread.controller_state
    names = [group["name"] for group in optimizer.param_groups]
    return {
        "val": validation_loss(task, replicas.mean()),
        "curve": [sum(record.losses) / len(record.losses) for record in history],
        "every": scheduler.sync_every,
        "groups": names,
        "rates": rates,
        "values": [[record.values[f"lr/{i}"] for i in range(len(names))] for record in history],
        "mu": control.get("mu"),
        "returns": scheduler.history_summary.undone,
        "acts": scheduler.history_summary.events,
        "chosen": getattr(scheduler, "scouted", None),
    }


class _Stack:
    """All replicas as the rows of a stack on one device."""

    def __init__(self, task: Task, model: nn.Module, method: Method) -> None:
        self.task = task
        device = next(model.parameters()).device
        graphs = device.type == "cuda"
        self.stack = hk.ReplicaStack(model, task.replicas, gradients=method.gradients, cuda_graphs=graphs)
        self.ensemble = self.stack.ensemble
        self.parameters, self.named_parameters = self.stack.parameters, self.stack.named_parameters
        self.zero_grad, self.mean = self.stack.zero_grad, self.stack.module
        self._probe = task.probe()

    def backward(self, *batch: Tensor) -> Tensor:
        return self.stack.backward(self.task.loss, *batch)

    def probe(self) -> Tensor:
        self.stack.eval()  # so that batch norms use, and keep, the statistics of training
        losses = self.stack.losses(self.task.loss, *self._probe, same_batch=True)
        self.stack.train()
        return losses


class _Rank:
    """One replica in its own process."""

    def __init__(self, task: Task, model: nn.Module, method: Method) -> None:
        self.task, self.ensemble = task, None
        self.model = model
        self.wrapped = DistributedDataParallel(model) if method.gradients == "shared" else model
        self.parameters, self.named_parameters = model.parameters, model.named_parameters
        self.zero_grad: Callable[[], None] = model.zero_grad
        self._probe = task.probe()

    def backward(self, *batch: Tensor) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        loss = self.task.loss(self.wrapped, *(tensor.chunk(size)[rank] for tensor in batch))
        loss.backward()
        return loss.detach()

    def probe(self) -> Tensor:
        self.model.eval()
        loss = self.task.loss(self.model, *self._probe)
        self.model.train()
        return loss

    def mean(self) -> nn.Module:
        return self.model  # the last step ended in a sync
