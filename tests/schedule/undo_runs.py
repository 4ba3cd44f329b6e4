"""Runs whose controller judges by a script, for the tests of returns to the start."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

import hdet_kernels as hk
from hdet_kernels.controller.protocol import Observation, Run, State
from tests.training import Trainer, batch, loss_of, network, with_averaging

TOTAL, SYNC = 16, 4

Kind = Literal["stack shared", "stack local", "ranks shared", "ranks local"]


@dataclass(frozen=True)
class Scripted:
    """Training breaks after the steps of a script, as they are counted over the whole run.

    Base values are halved with every return, and lowered by a tenth at every other sync.
    """

    broken: tuple[int, ...] = ()
    undo: int = 3
    last: int = TOTAL
    undo_on: Literal["auto", "cpu"] = field(default="auto", metadata={"saved": False})

    @property
    def reads(self) -> Literal["losses", "slopes"]:
        return "losses"

    def prepare(self, run: Run) -> Run:
        return run

    def active(self, run: Run, step: int) -> bool:
        return step <= self.last

    def start(self, count: int, run: Run | None = None) -> State:
        return {"factors": [1.0] * count, "moved": 0, "total": (run and run.total_steps) or 0}

    def update(self, run: Run, state: State, seen: Observation) -> State:
        return {**state, "factors": [0.9 * factor for factor in state["factors"]], "moved": state["moved"] + 1}

    def base(self, state: State, index: int, scheduled: Any) -> Any:
        return scheduled * state["factors"][index]

    def broke(self, run: Run, state: State, seen: Observation) -> bool:
        origin = state["total"] - (run.total_steps or 0)
        return origin + seen.step in self.broken

    def begun_anew(self, run: Run, state: State, seen: Observation) -> State:
        return {**state, "factors": [factor / 2 for factor in state["factors"]]}


@dataclass(frozen=True)
class Trying(Scripted):
    """Lower learning rates are tried after some steps; after others a trial is no better, or it is."""

    doubted: tuple[int, ...] = (SYNC,)
    no_better: tuple[int, ...] = ()
    better: tuple[int, ...] = ()

    def start(self, count: int, run: Run | None = None) -> State:
        return {**super().start(count, run), "trial": None}

    def _made(self, run: Run, state: State, seen: Observation) -> int:
        return int(state["total"] - (run.total_steps or 0) + seen.step)

    def doubts(self, run: Run, state: State, seen: Observation) -> bool:
        return self._made(run, state, seen) in self.doubted

    def begun_anew(self, run: Run, state: State, seen: Observation) -> State:
        return {**super().begun_anew(run, state, seen), "trial": None}

    def tried(self, run: Run, state: State, seen: Observation) -> State:
        return {**self.begun_anew(run, state, seen), "trial": seen.step}

    def worse(self, run: Run, state: State, seen: Observation) -> bool:
        return state["trial"] is not None and self._made(run, state, seen) in self.no_better

    def update(self, run: Run, state: State, seen: Observation) -> State:
        ends = self._made(run, state, seen) in self.better
        return {**super().update(run, state, seen), "trial": None if ends else state["trial"]}


class Early(Scripted):
    """A controller that wishes three more syncs in the first cycle."""

    def prepare(self, run: Run) -> Run:
        return replace(run, early=(2, 4, 8))


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "FusedAdamW": hk.FusedAdamW,
    "FusedSGD": lambda params, lr: hk.FusedSGD(params, lr=lr, momentum=0.9, dampening=0.1),
    # With a penalty in the gradient, replicas of a stack have moments of their own from the first step on.
    "FusedAdam": lambda params, lr: hk.FusedAdam(params, lr=lr, weight_decay=0.1),
    "FusedAdagrad": lambda params, lr: hk.FusedAdagrad(params, lr=lr, weight_decay=0.1),
    "torch AdamW": torch.optim.AdamW,
}


class Undoable:
    """Model, optimizer and scheduler of one process: two replicas in a stack, or one of several ranks.

    Args:
        schedule: returns the schedule of an optimizer that is wrapped; None: OneCycleLR.
        warm: begin with parameters, buffers and state that were trained before, apart in each replica.
        first_batch: the number of the batch of the first step.

    Attributes:
        start: everything before the first forward pass.
    """

    def __init__(
        self,
        kind: Kind,
        optimizer: str,
        rank: int = 0,
        *,
        dtype: Any = None,
        replicas: int = 2,
        schedule: Callable[[Any], Any] | None = None,
        warm: bool = False,
        first_batch: int = 0,
        **options: Any,
    ) -> None:
        self.stack: hk.ReplicaStack | None = None
        self.first_batch = first_batch
        options = {"total_steps": TOTAL, "sync_every": SYNC, "spread": 0.5} | options
        make_scheduler: Callable[..., Any] = hk.HDETOneCycleLR
        if schedule is None:
            options = {"max_lr": 0.05, "cycle_momentum": False} | options
        else:
            make_scheduler = lambda optimizer, **options: hk.HDETScheduler(schedule(optimizer), **options)  # noqa: E731
        make = OPTIMIZERS[optimizer]
        if kind.startswith("ranks"):
            more: Any = {"make_scheduler": make_scheduler, "lr": 1.0, "first_batch": first_batch}
            self.ranks = Trainer(
                *(rank,), ddp=kind == "ranks shared", make_optimizer=make, batch_norm=True, average_buffers=True,
                **more, **options,
            )  # fmt: skip
            self.module, self.optimizer, self.scheduler = self.ranks.module, self.ranks.optimizer, self.ranks.scheduler
        else:
            model, gradients = network(batch_norm=True).to(dtype or torch.float32), kind.split()[1]
            self.stack = hk.ReplicaStack(model, replicas, gradients=gradients)  # type: ignore[arg-type]
            self.optimizer = make(self.stack.parameters(), lr=1.0)
            self.scheduler = make_scheduler(self.optimizer, ensemble=self.stack.ensemble, **with_averaging(options))
        if warm:
            before = Undoable(kind, optimizer, rank, dtype=dtype, replicas=replicas, auto_lr=False).train(2)
            model_of(self).load_state_dict(model_of(before).state_dict())
            state = before.optimizer.state_dict()["state"]
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.start: dict[str, Any] = {}

    def train(self, steps: int, before_sync: Callable[[Undoable], None] | None = None) -> Undoable:
        self.start = self.start or self.everything()
        for _ in range(steps):
            step = self.scheduler.last_epoch
            if self.stack is None:
                poison = None if before_sync is None else (lambda _: before_sync(self))
                self.ranks.train(1, poison if (step + 1) % SYNC == 0 else None)
                continue
            losses = self.gradients(step)
            self.optimizer.step()
            if before_sync is not None and (step + 1) % SYNC == 0:
                before_sync(self)
            self.scheduler.step(losses)
        return self

    def gradients(self, step: int) -> Tensor:
        """Compute the gradients of a stack at a step, and return the losses."""
        assert self.stack is not None
        x, y = batch(0, self.first_batch + step, size=12)
        dtype = next(self.stack.parameters()).dtype
        self.optimizer.zero_grad()
        return self.stack.backward(loss_of, x.to(dtype), y.to(dtype)).detach()

    def poison(self) -> None:
        """Make all parameters NaN."""
        for param in self.params():
            param.data.fill_(float("nan"))

    def params(self) -> list[Tensor]:
        return list(model_of(self).parameters())

    def everything(self) -> dict[str, Any]:
        """Return copies of all that training changes."""
        return {
            "params": [param.detach().clone() for param in self.params()],
            "buffers": [buffer.detach().clone() for buffer in model_of(self).buffers()],
            "state": copy.deepcopy(self.optimizer.state_dict()["state"]),
        }

    def parts(self) -> list[Any]:
        return [model_of(self), self.optimizer, self.scheduler]

    def saved(self) -> bytes:
        file = io.BytesIO()
        torch.save([part.state_dict() for part in self.parts()], file)
        return file.getvalue()

    def load(self, saved: bytes, *, scheduler_first: bool = False) -> Undoable:
        loads = list(zip(self.parts(), torch.load(io.BytesIO(saved), weights_only=True), strict=True))
        for part, state in reversed(loads) if scheduler_first else loads:
            part.load_state_dict(state)
        return self

    def history(self) -> list[dict[str, Any]]:
        return [{**record.to_dict(), "seconds": 0.0} for record in self.scheduler.history]


def model_of(run: Undoable) -> Any:
    """Return the stack of a run, or the model of its rank."""
    return run.stack or run.module
