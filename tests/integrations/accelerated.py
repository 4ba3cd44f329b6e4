"""A training loop of Accelerate on digits, with HDET, for tests on several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
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
