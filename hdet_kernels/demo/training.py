"""Train in N processes of this machine: first with plain DDP and torch's OneCycleLR, then with HDET; all else is equal.

:func:`run_replicas` starts the processes and ends all of them in any case, :func:`train_both` runs in each.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from hdet_kernels.demo.tasks import Batch, TextTask, loss_of
from hdet_kernels.schedule.schedulers import HDETOneCycleLR

RunName = Literal["plain", "hdet"]
RUNS: tuple[RunName, ...] = ("plain", "hdet")

START_METHOD = "spawn"

#: Passes a message of a replica to the parent process.
Send = Callable[[object], None]

# The controller acts in the first 30 % of a run; with fewer steps it would act only a few times.
FEWEST_STEPS = 40


@dataclass(frozen=True)
class Options:
    """Options of one demo. ``steps`` and ``max_lr`` apply to each of its two runs."""

    replicas: int
    steps: int
    out: Path
    seed: int
    max_lr: float


def checked_options(*, replicas: int, steps: int | None, out: Path, seed: int, max_lr: float | None) -> Options:
    """Fill in the task's defaults and create ``out``; raise ValueError for what cannot be trained or written."""
    if replicas < 2:
        raise ValueError(f"--replicas must be at least 2, got {replicas}: HDET compares replicas with each other")
    steps = TextTask.steps if steps is None else steps
    if steps < FEWEST_STEPS:
        raise ValueError(
            f"--steps must be at least {FEWEST_STEPS}, got {steps}: the learning rate is adapted in the first 30 % "
            f"of the run; omit the option for {TextTask.steps}"
        )
    max_lr = TextTask.poor_lr if max_lr is None else max_lr
    if not (math.isfinite(max_lr) and max_lr > 0):
        raise ValueError(f"--max-lr must be a positive number, got {max_lr}; omit the option for {TextTask.poor_lr:g}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed must lie between 0 and 2**32 - 1, got {seed}")
    if (missing := TextTask.missing()) is not None:
        raise ValueError(missing)
    try:  # before two minutes of training
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot write to --out {out} ({reason}): choose a writable folder") from error
    return Options(replicas, steps, out, seed, max_lr)


@dataclass(frozen=True)
class Progress:
    """Progress of a run, sent by rank 0 to the parent process."""

    run: RunName
    step: int
    loss: float
    lr: float


@dataclass
class ReplicaRun:
    """Result of one run on one replica. Lists have one entry for each step."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    base: list[float] = field(default_factory=list)  # learning rates before the fan-out
    held_out: float = float("nan")  # of the averaged model
    seconds: float = 0.0  # of the training steps, including scheduler and syncs
    gradient_bytes: int = 0  # that DDP all-reduces
    history: list[dict[str, Any]] = field(default_factory=list)


def place(replicas: int) -> tuple[str, str]:
    """Return the process group backend and the device for ``replicas`` processes on this machine.

    NCCL requires a GPU for each process. Where processes share GPUs, or on the CPU, the backend is gloo.
    """
    gpus = torch.cuda.device_count()
    return "nccl" if gpus >= replicas else "gloo", "cuda" if gpus else "cpu"


def run_replicas(
    replicas: int, function: Callable[..., Any], *args: Any, on_message: Callable[[Any], None]
) -> list[Any]:
    """Return the results of ``function(rank, device, send, *args)`` on every rank, in the order of ranks.

    No process outlives the call, also if it is interrupted. ``on_message`` is called with all that a rank sends.

    Raises:
        ProcessException: a rank raised or died.
    """
    queue = mp.get_context(START_METHOD).SimpleQueue()
    results: dict[int, Any] = {}

    def receive() -> None:
        while not queue.empty():
            rank, is_result, value = queue.get()
            if is_result:
                results[rank] = value
            else:
                on_message(value)

    started: ProcessContext | None = None
    with tempfile.TemporaryDirectory(prefix="hdet-demo-") as folder:
        given = (replicas, os.path.join(folder, "store"), queue, function, args)
        try:
            with _interrupts_held_back():
                started = start_processes(_replica, given, replicas, join=False, daemon=True, start_method=START_METHOD)
            while not started.join(timeout=0.05):
                receive()
            receive()
        except BaseException as error:
            for process in started.processes if started else ():
                process.kill()
                process.join()
            if isinstance(error, ProcessException):  # what the ranks sent before one of them failed
                receive()
            raise
    return [results[rank] for rank in range(replicas)]


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Block SIGINT within the block, also in the processes that it starts.

    Ctrl-C goes to the whole process group, but only the parent handles it and ends its children: these inherit the
    signal mask and never receive it. A signal during the block reaches the parent at its end.
    """
    resource_tracker.ensure_running()  # otherwise the first process starts it, which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _replica(
    rank: int, replicas: int, store: str, queue: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    backend, kind = place(replicas)
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "gloo" and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works without a resolvable host name
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=replicas,
        timeout=datetime.timedelta(minutes=5),
        device_id=device if backend == "nccl" else None,
    )
    result = function(rank, device, lambda message: queue.put((rank, False, message)), *args)
    queue.put((rank, True, result))
    dist.barrier()  # a rank that leaves early would look dead to the others
    dist.destroy_process_group()


def train_both(rank: int, device: torch.device, send: Send, options: Options) -> list[ReplicaRun]:
    """Train both runs, one after the other, as replica ``rank`` of the default process group."""
    logging.getLogger("hdet_kernels").setLevel(logging.ERROR)  # what HDET did is printed under the table
    task = TextTask()
    return [_train(run, task, rank, device, send, options) for run in RUNS]


def _train(run: RunName, task: TextTask, rank: int, device: torch.device, send: Send, options: Options) -> ReplicaRun:
    torch.manual_seed(options.seed)  # the same initial model in both runs and on all replicas
    model = task.model().to(device)
    replicated = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.max_lr)
    scheduler: OneCycleLR | HDETOneCycleLR
    if run == "plain":
        scheduler = OneCycleLR(optimizer, options.max_lr, total_steps=options.steps)
    else:
        same_for_all = _on(device, task.probe(_generator(options, options.replicas)))
        probe = partial(loss_of, model, same_for_all)
        scheduler = HDETOneCycleLR(optimizer, options.max_lr, options.steps, probe=probe, seed=options.seed)
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
        if rank == 0 and ((step + 1) % tell_every == 0 or step + 1 == options.steps):
            send(Progress(run, step + 1, float(losses[step]), rate))
    seen.losses = losses.tolist()
    seen.seconds = time.perf_counter() - start

    # The last step of an HDET run ends in a sync, so that the model is the averaged one.
    seen.held_out = _held_out_loss(model, task, rank, device)
    if isinstance(scheduler, HDETOneCycleLR):
        seen.history = [record.to_dict() for record in scheduler.history]
    return seen


@torch.no_grad()
def _held_out_loss(model: nn.Module, task: TextTask, rank: int, device: torch.device) -> float:
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
