"""A scheduler of the package, with its optimizer and model, and the reference, through the same operations."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from tests.optim.cases import saved_and_loaded
from tests.properties.reference import GROUPS, PEAKS, WIDTH, Reference, Setup

Array = NDArray[np.float64]


class Model(nn.Module):
    """A vector for each parameter group. The loss is half the squared distance to a batch."""

    def __init__(self) -> None:
        super().__init__()
        start = torch.linspace(-1, 1, GROUPS * WIDTH, dtype=torch.float64).view(GROUPS, WIDTH)
        self.parts = nn.ParameterList([nn.Parameter(row.clone()) for row in start])

    def forward(self, x: Tensor) -> Tensor:
        return sum((part - x[:, j]).square().sum() for j, part in enumerate(self.parts)) / 2  # type: ignore[return-value]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    return loss


class Subject:
    """Model, optimizer and scheduler of the package in this process, which holds the replicas ``held``."""

    def __init__(self, setup: Setup, rank: int = 0) -> None:
        self.setup = setup
        self.module = Model()
        self.stack: hk.ReplicaStack | None = None
        self.model: nn.Module = self.module
        self.held = [rank]
        options: dict[str, Any] = {}
        if setup.kind == "stack":
            self.stack = hk.ReplicaStack(self.module, setup.replicas, gradients="shared" if setup.shared else "local")
            self.held, options = list(range(setup.replicas)), {"ensemble": self.stack.ensemble}
        elif setup.kind == "rank" and setup.shared:
            self.model = DistributedDataParallel(self.module)
        self.params = list((self.stack or self.module).parameters())
        make = hk.FusedSGD if setup.fused else torch.optim.SGD
        groups = [{"params": [param], "lr": lr} for param, lr in zip(self.params, PEAKS, strict=True)]
        self.optimizer: Any = make(groups, momentum=setup.momentum)
        if setup.warmup is None:
            options["auto_lr"] = False
        else:
            decay: Any = "floor" if setup.schedule == "one-cycle" else 0.0
            options["auto_lr"] = hk.SoftmaxController(warmup_steps=setup.warmup, decay=decay)
        if setup.log_spacing:
            options["explore"] = [hk.Explore("lr", spread=setup.spread, spacing="log")]
        options |= {"spread": setup.spread, "sync_every": setup.every}
        self.scheduler: Any
        if setup.schedule == "one-cycle":
            rates = list(PEAKS)
            self.scheduler = hk.HDETOneCycleLR(self.optimizer, rates, setup.total, cycle_momentum=False, **options)
        else:
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, setup.total)
            self.scheduler = hk.HDETScheduler(cosine, **options)

    def backward(self, x: Array) -> Tensor:
        """Return the losses of the replicas held here and leave their gradients."""
        self.optimizer.zero_grad()
        batch = torch.from_numpy(x)
        if self.stack is not None:
            return self.stack.backward(loss_of, batch)
        loss = loss_of(self.model, batch[self.held])
        loss.backward()
        return loss.detach()

    def step(self, *, skipped: bool) -> None:
        """Step the optimizer; ``skipped`` as a GradScaler tells it after an overflow."""
        if not self.setup.fused:
            if not skipped:
                self.optimizer.step()
            return
        self.optimizer.grad_scale, self.optimizer.found_inf = None, torch.full((1,), float(skipped))
        self.optimizer.step()
        del self.optimizer.grad_scale, self.optimizer.found_inf

    def parts(self) -> dict[str, Any]:
        return {"model": self.stack or self.module, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def rows(self, values: Sequence[Tensor]) -> Array:
        """Return tensors of the parameters, one for each group, as [replicas held here, J, D]."""
        shape = (len(self.held), WIDTH)
        return np.stack([value.detach().expand(shape).numpy() for value in values], axis=1)

    def rates(self) -> Array:
        groups = self.optimizer.param_groups
        rates = [group.get("per_replica", {}).get("lr") or (group["lr"],) for group in groups]
        return np.array(rates).T


class SchedulerTwins:
    """The package (``subject``) and the equations (``reference``), kept equal.

    ``skipped`` counts the skipped steps since two others came in a row. ``regrouped``: groups changed before the first
    step, so that the scheduler builds its cycle again, which takes a learning rate of the user for the schedule's.
    """

    def __init__(self, setup: Setup, rank: int = 0) -> None:
        self.setup, self.rank = setup, rank
        self.skipped, self._skipped_last, self.regrouped = 0, False, False
        self.subject = Subject(setup, rank)
        self.reference = Reference(setup, np.stack([part.detach().numpy() for part in Model().parts]))

    @property
    def over(self) -> bool:
        return self.reference.t >= self.setup.total

    def train(self, seed: int, *, records: int = 0, skipped: bool = False, frozen: int | None = None) -> None:
        """Make a step. ``records``: losses that are recorded before it; none: its own is passed to ``step``."""
        x = np.random.default_rng(seed).normal(size=(self.setup.replicas, GROUPS, WIDTH))
        if skipped:
            self.skipped += 1
        elif not self._skipped_last:
            self.skipped = 0
        self._skipped_last, self.regrouped = skipped, False
        losses = self.subject.backward(x)
        if frozen is not None:
            self.subject.params[frozen].grad = None
        apart = self.reference.theta - x
        expected = np.square(apart).sum((1, 2)) / 2
        np.testing.assert_allclose(losses.numpy(), expected[self._held], rtol=1e-9)
        if not skipped:
            self.reference.train(apart, [j != frozen for j in range(GROUPS)])
        self.subject.step(skipped=skipped)
        for number in range(records):
            self.subject.scheduler.record_loss(losses * (number + 1))
            self.reference.losses.append(expected * (number + 1))
        if records:
            self.subject.scheduler.step()
        else:
            self.reference.losses.append(expected)
            self.subject.scheduler.step(losses)
        self.reference.end_step()

    def converge(self) -> None:
        self.subject.scheduler.converge()
        self.reference.converge()

    def consensus(self) -> None:
        mean = self.reference.theta.mean(0)
        with self.subject.scheduler.consensus():
            held = self.subject.rows(self.subject.params)
            np.testing.assert_allclose(held, np.broadcast_to(mean, held.shape), rtol=1e-9, atol=1e-12)

    def edit(self, key: str, value: float, group: int) -> None:
        if key == "lr" and self.regrouped:
            return
        groups = self.subject.optimizer.param_groups
        if key == "momentum":
            self.reference.momentum = value
            for entries in groups:
                entries["momentum"] = value
            return
        groups[group][key] = value
        if key == "lr":
            self.reference.edited[group] = value
        else:
            self.reference.decay[group] = value

    def move(self, group: int) -> None:
        """Give a parameter new memory."""
        param = self.subject.params[group]
        param.data = param.data.clone()

    def add_param_group(self) -> None:
        """Add a parameter group, which the scheduler refuses with nothing changed, and remove it."""
        optimizer = self.subject.optimizer
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
        with pytest.raises(RuntimeError, match="parameter groups"):
            self.subject.scheduler.step(1.0)
        optimizer.param_groups.pop()
        self.regrouped |= self.reference.t == 0

    def save(self) -> tuple[Any, Reference]:
        parts = self.subject.parts()
        return saved_and_loaded({name: part.state_dict() for name, part in parts.items()}), copy.deepcopy(
            self.reference
        )

    def load(self, saved: tuple[Any, Reference], order: Sequence[str]) -> None:
        """Build everything anew and load a checkpoint, its three parts in this order."""
        state, expected = copy.deepcopy(saved)
        self.subject, self.reference = Subject(self.setup, self.rank), expected
        self.skipped, self._skipped_last, self.regrouped = 0, False, False
        parts = self.subject.parts()
        for name in order:
            parts[name].load_state_dict(state[name])

    @property
    def _held(self) -> list[int]:
        return self.subject.held

    def check(self) -> None:
        """Assert that parameters, momentum, learning rates and history are those of the equations."""
        subject, expected = self.subject, self.reference
        close = {"rtol": 1e-9, "atol": 1e-12}
        np.testing.assert_allclose(subject.rows(subject.params), expected.theta[self._held], **close)
        np.testing.assert_allclose(subject.scheduler.get_base_lr(), expected.base(), **close)
        if not expected.edited:
            np.testing.assert_allclose(subject.rates(), expected.rates()[self._held], **close)
        for j, param in enumerate(subject.params):
            buffer = subject.optimizer.state.get(param, {}).get("momentum_buffer")
            if buffer is not None:
                found = buffer.expand(len(self._held), WIDTH).numpy()
                np.testing.assert_allclose(found, expected.velocity[self._held, j], **close)
        assert subject.scheduler.cycle.step == expected.t
        assert len([record for record in subject.scheduler.history if record.kind != "manual"]) == expected.syncs
