"""Runs of HDET in loops of Accelerate, each a function of a rank, for ``test_accelerate.py``."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hdet_kernels as hk
from hdet_kernels.demo.tasks import DigitsTask
from hdet_kernels.integrations.accelerate import prepare

TASK = DigitsTask()
BATCH = 16


def make_accelerator(rank: int, **options: Any) -> Accelerator:
    """Return an Accelerator of this rank in the group that exists, as after ``accelerate launch``."""
    size = str(dist.get_world_size())
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size})
    os.environ.update({"OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


class Loop:
    """The objects that a user prepares, and the loop over them.

    Args:
        rank: of this process.
        steps: of the schedule.
        batches: of an epoch, in each process.
        make_optimizer: of the parameters and ``lr``.
        accelerator: options of the Accelerator.
        options: of the scheduler.
    """

    def __init__(
        self,
        rank: int,
        *,
        steps: int = 16,
        batches: int = 16,
        make_optimizer: Callable[..., Any] = torch.optim.AdamW,
        accelerator: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.accelerator = make_accelerator(rank, **(accelerator or {}))
        inputs, targets = TASK.train
        count = batches * BATCH * self.accelerator.num_processes
        loader = DataLoader(TensorDataset(inputs[:count], targets[:count]), batch_size=BATCH)
        model = make_model()
        optimizer = make_optimizer(model.parameters(), lr=0.01)
        scheduler = hk.HDETOneCycleLR(optimizer, 0.01, steps, sync_every=4, model=model, **options)
        self.scheduler: Any
        self.scheduler, self.loader, self.model, self.optimizer = prepare(
            self.accelerator, scheduler, loader, model, optimizer
        )
        self.losses: list[float] = []
        self.norms: list[tuple[float, float]] = []  # of the gradients, before and after clipping
        self.optimizer_steps = 0

        def count_step(*_: object) -> None:
            self.optimizer_steps += 1

        self.optimizer.optimizer.register_step_post_hook(count_step)

    def train(self, batches: int | None = None, *, skip: int = 0, clip: float | None = None) -> Loop:
        """Train on one epoch, or on the next ``batches`` after the first ``skip`` of it."""
        loader = self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
        for index, (inputs, targets) in enumerate(loader):
            if index == batches:
                break
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(inputs), targets)
                self.accelerator.backward(loss)
                if clip is not None and self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                    left = nn.utils.get_total_norm([param.grad for param in self.model.parameters()])
                    self.norms.append((float(norm), float(left)))
                self.optimizer.step()
                self.scheduler.step(loss)
                self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))
        return self

    def accuracy(self) -> float:
        """Return the accuracy of the model on held-out digits, gathered from all processes."""
        unseen = DataLoader(TensorDataset(*TASK.unseen), batch_size=BATCH)
        shares = self.accelerator.prepare_data_loader(unseen)
        self.model.eval()
        with torch.no_grad():
            pairs = [(self.model(inputs).argmax(1), targets) for inputs, targets in shares]
        self.model.train()
        gathered = [self.accelerator.gather_for_metrics(pair) for pair in pairs]
        right = sum(int((guess == target).sum()) for guess, target in gathered)
        return right / sum(len(target) for _, target in gathered)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the model's tensors."""
        state = self.accelerator.unwrap_model(self.model).state_dict()
        return {name: tensor.detach().clone() for name, tensor in state.items()}


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the warnings of the library in a block."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hdet_kernels")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _as_torch(rank: int) -> dict[str, Any]:
    """Train by Accelerate and by a plain DDP loop on the same batches."""
    loop = Loop(rank).train()
    model = make_model()
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 16, sync_every=4, model=model)
    rates = []
    for batch in range(16):
        rows = slice((2 * batch + rank) * BATCH, (2 * batch + rank + 1) * BATCH)
        loss = F.cross_entropy(replicated(TASK.train[0][rows]), TASK.train[1][rows])
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
    return {
        "steps": (loop.optimizer_steps, loop.scheduler.last_epoch),
        "loop": loop.weights(),
        "plain": dict(model.state_dict()),
        "history": [[record.losses, record.values] for record in loop.scheduler.history],
        "plain history": [[record.losses, record.values] for record in scheduler.history],
        "metrics": loop.scheduler.metrics(),
        "base": loop.scheduler.get_base_lr(),
        "accuracy": loop.accuracy(),
        "rates": rates,
    }


def _accumulated(rank: int) -> dict[str, Any]:
    """Accumulate two batches a step, in bf16, with clipping and a fused optimizer; the last step has one batch."""
    options = {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}
    loop = Loop(rank, steps=8, batches=15, make_optimizer=hk.FusedAdamW, accelerator=options)
    dtypes = set()
    loop.model.module[0].register_forward_hook(lambda *call: dtypes.add(call[-1].dtype))
    loop.train(clip=0.5)
    return {
        "steps": (loop.optimizer_steps, loop.scheduler.last_epoch),
        "losses": loop.losses,
        "history": [record.losses[rank] for record in loop.scheduler.history],
        "gradients": [record.gradients for record in loop.scheduler.history],
        "norms": loop.norms,
        "dtypes": dtypes,
        "weights": loop.weights(),
    }


def _at_a_sync(rank: int, folder: Path) -> dict[str, Any]:
    """Save at a sync, and resume in new objects."""
    optimizers: dict[str, Any] = {"torch": torch.optim.AdamW, "fused": hk.FusedAdamW}
    outcome: dict[str, Any] = {}
    for name, make in optimizers.items():
        whole = Loop(rank, make_optimizer=make, auto_lr=False).train(8)
        whole.accelerator.save_state(str(folder / name))
        whole.train(8, skip=8)
        resumed = Loop(rank, make_optimizer=make, auto_lr=False)
        resumed.accelerator.load_state(str(folder / name))
        resumed.train(8, skip=8)
        outcome[name] = whole.weights(), resumed.weights(), resumed.scheduler.last_epoch
    return outcome


def _between_syncs(rank: int, folder: Path) -> dict[str, Any]:
    """Save and evaluate two steps after a sync, resume, and stop early."""
    loop = Loop(rank, make_optimizer=hk.FusedAdamW, auto_lr=False).train(6)
    own = loop.weights()
    seen_by_hook: list[dict[str, Tensor]] = []
    loop.accelerator.register_save_state_pre_hook(lambda *_: seen_by_hook.append(loop.weights()))
    loop.accelerator.save_state(str(folder / "mid"))
    after = loop.weights()
    refused = ""
    try:
        loop.accelerator.save_model(loop.model, folder / "refused")
    except RuntimeError as error:
        refused = str(error)
    other = torch.nn.Linear(2, 2)  # not trained by the scheduler
    loop.accelerator.save_model(other, folder / "other")
    with loop.scheduler.consensus():
        average, accuracy = loop.weights(), loop.accuracy()
        loop.accelerator.save_model(loop.model, folder / "model")
    loop.scheduler.end()
    ended, records = loop.weights(), len(loop.scheduler.history)
    loop.scheduler.end()
    loop.accelerator.save_model(loop.model, folder / "ended")
    resumed = Loop(rank, make_optimizer=hk.FusedAdamW, auto_lr=False)
    with logged() as messages:
        resumed.accelerator.load_state(str(folder / "mid"))
    loaded = resumed.weights()
    resumed.train(10, skip=6)
    return {
        "own": own,
        "after": after,
        "hook": seen_by_hook[0],
        "refused": refused,
        "average": average,
        "accuracy": accuracy,
        "ended": ended,
        "ended twice": len(loop.scheduler.history) - records,
        "loaded": loaded,
        "logged": messages,
        "resumed steps": resumed.scheduler.last_epoch,
        "resumed": resumed.weights(),
    }


def _refused(rank: int) -> list[str]:
    """Return the messages of calls that cannot work."""

    def message(*objects: Any) -> str:
        try:
            prepare(*objects)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    accelerator = make_accelerator(rank)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 16, auto_lr=False)
    messages = [
        message(model, optimizer, scheduler),
        message(accelerator, model, optimizer),
        message(accelerator, accelerator.prepare_scheduler(scheduler)),
    ]
    accelerator.state.num_processes = 1  # as after Accelerator() on CPUs, without cpu=True
    messages.append(message(accelerator, model, optimizer, scheduler))
    accelerator.state.num_processes = 2
    # Accelerate takes these on GPUs only. Here its state is given what it would note of them.
    accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
    messages.append(message(accelerator, model, optimizer, scheduler))
    accelerator.state.distributed_type = DistributedType.FSDP
    return [*messages, message(accelerator, model, optimizer, scheduler)]


def _prepared_before(rank: int) -> dict[str, Any]:
    """Build a scheduler on what Accelerate prepared, without a learning rate, and one that Accelerate prepares."""
    accelerator = make_accelerator(rank)
    inputs, targets = TASK.train[0][:BATCH], TASK.train[1][:BATCH]

    def train(scheduler: Any, steps: int) -> int:
        for step in range(steps):
            loss = F.cross_entropy(model(inputs.roll(step + rank, 0)), targets.roll(step + rank, 0))
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step(loss)
            optimizer.zero_grad()
        return int(scheduler.last_epoch)

    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    scheduler = prepare(accelerator, hk.HDETOneCycleLR(optimizer, None, 68, sync_every=4, model=model))
    train(scheduler, 68)
    found = scheduler.scouted, copy.deepcopy(accelerator.unwrap_model(model).state_dict())
    plain = accelerator.prepare(hk.HDETOneCycleLR(optimizer, 0.01, 60, sync_every=4, model=model))
    try:
        train(plain, 5)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return {"found": found, "refused": refused}


def _with_a_scaler(rank: int, make: Any) -> dict[str, Any]:
    """Train with the gradient scaler that Accelerate makes for fp16 on GPUs; the third of eight steps overflows."""
    accelerator = make_accelerator(rank)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    model = make_model()
    optimizer = make(model.parameters(), lr=0.01)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 8, sync_every=4, model=model, auto_lr=False)
    model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler)
    inputs, targets = TASK.train[0][:BATCH], TASK.train[1][:BATCH]
    still = []
    for step in range(8):
        before = copy.deepcopy(list(model.parameters()))
        loss = F.cross_entropy(model(inputs.roll(step + rank, 0)), targets.roll(step + rank, 0))
        accelerator.backward(loss * torch.inf if step == 2 else loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        still.append(all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)))
        scheduler.step(loss)
        optimizer.zero_grad()
    weights = copy.deepcopy(accelerator.unwrap_model(model).state_dict())
    return {"still": still, "steps": scheduler.last_epoch, "syncs": len(scheduler.history), "weights": weights}


def _counted_with_the_whole_loader(rank: int) -> list[str]:
    """Return the warnings of a schedule whose steps were counted before the loader was divided."""
    with logged() as messages:
        Loop(rank, steps=2 * 10, batches=5)
    found = [text for text in messages if "epochs" in text]
    with logged() as messages:
        Loop(rank, steps=15, batches=5)
    assert not [text for text in messages if "epochs" in text]
    return found


def run_all(rank: int, folder: Path) -> dict[str, Any]:
    """Run everything in one group of ranks: a start costs seconds."""
    return {
        "as torch": _as_torch(rank),
        "accumulated": _accumulated(rank),
        "at a sync": _at_a_sync(rank, folder),
        "between syncs": _between_syncs(rank, folder),
        "prepared before": _prepared_before(rank),
        "scaler, torch": _with_a_scaler(rank, torch.optim.AdamW),
        "scaler, fused": _with_a_scaler(rank, hk.FusedAdamW),
        "counted": _counted_with_the_whole_loader(rank),
        "refused": _refused(rank),
    }
