"""Train as one replica: first with plain DDP and torch's OneCycleLR, then with HDET. All else is equal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from hdet_kernels.demo.options import Options
from hdet_kernels.demo.tasks import TASKS, Batch, Task, loss_of
from hdet_kernels.schedule.schedulers import HDETOneCycleLR

RunName = Literal["plain", "hdet"]
RUNS: tuple[RunName, ...] = ("plain", "hdet")


@dataclass(frozen=True)
class Progress:
    """Progress of a run, sent by rank 0 to the parent process."""

    run: RunName
    step: int
    steps: int
    loss: float
    lr: float


@dataclass
class ReplicaRun:
    """Result of one run on one replica. Lists have one entry for each step.

    Args:
        losses: Training losses.
        rates: Learning rates of this replica.
        base: Learning rates before the fan-out.
        held_out: Loss of the averaged model on held-out data.
        seconds: Time of the training steps, including scheduler and syncs.
        gradient_bytes: Bytes that DDP all-reduces in the run.
        history: The syncs, as dicts.
    """

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    base: list[float] = field(default_factory=list)
    held_out: float = float("nan")
    seconds: float = 0.0
    gradient_bytes: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


def train_both(rank: int, device: torch.device, send: Callable[[object], None], options: Options) -> list[ReplicaRun]:
    """Train both runs, one after the other, as replica ``rank`` of the default process group."""
    task: Task = TASKS[options.task]()
    return [_train(run, task, rank, device, send if rank == 0 else _silent, options) for run in RUNS]


def _train(
    run: RunName, task: Task, rank: int, device: torch.device, send: Callable[[object], None], options: Options
) -> ReplicaRun:
    torch.manual_seed(options.seed)  # the same initial model in both runs and on all replicas
    model = task.model().to(device)
    replicated = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.max_lr)
    scheduler = _scheduler(run, optimizer, model, task, device, options)
    order = _generator(options, rank)  # the same batches in both runs
    losses = torch.zeros(options.steps, device=device)
    seen = ReplicaRun(gradient_bytes=options.steps * sum(p.nbytes for p in model.parameters()))
    tell_every = max(options.steps // 200, 1)

    dist.barrier()
    start = time.perf_counter()
    for step in range(options.steps):
        rate = optimizer.param_groups[0]["lr"]
        seen.rates.append(rate)
        seen.base.append(float(scheduler.get_base_lr()[0]) if isinstance(scheduler, HDETOneCycleLR) else rate)
        loss = loss_of(replicated, _on(device, task.batch(order)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, HDETOneCycleLR):
            scheduler.step(loss)
        else:
            scheduler.step()
        losses[step] = loss.detach()
        if (step + 1) % tell_every == 0 or step + 1 == options.steps:
            send(Progress(run, step + 1, options.steps, float(losses[step]), rate))
    seen.losses = losses.tolist()
    seen.seconds = time.perf_counter() - start

    # The last step of an HDET run ends in a sync, so that the model is the averaged one.
    seen.held_out = _held_out_loss(model, task, rank, device)
    if isinstance(scheduler, HDETOneCycleLR):
        seen.history = [record.to_dict() for record in scheduler.history]
    return seen


def _scheduler(
    run: RunName,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    task: Task,
    device: torch.device,
    options: Options,
) -> OneCycleLR | HDETOneCycleLR:
    if run == "plain":
        return OneCycleLR(optimizer, options.max_lr, total_steps=options.steps)
    same_for_all = _on(device, task.probe(_generator(options, options.replicas)))
    return HDETOneCycleLR(
        optimizer,
        options.max_lr,
        total_steps=options.steps,
        probe=lambda: loss_of(model, same_for_all),
        seed=options.seed,
    )


@torch.no_grad()
def _held_out_loss(model: nn.Module, task: Task, rank: int, device: torch.device) -> float:
    """Return the mean loss on the held-out data; every replica evaluates a part of it."""
    inputs, targets = task.held_out()
    share = inputs[rank :: dist.get_world_size()], targets[rank :: dist.get_world_size()]
    count = share[1].numel()
    total = torch.tensor([float(loss_of(model, _on(device, share))) * count, count], device=device)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _generator(options: Options, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(options.seed * 1_000_003 + stream)


def _on(device: torch.device, batch: Batch) -> Batch:
    return batch[0].to(device), batch[1].to(device)


def _silent(_: object) -> None:
    return None
