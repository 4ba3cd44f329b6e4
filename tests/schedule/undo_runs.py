"""Runs whose controller judges by a script, for the tests of returns to the last sound average."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

import hdet_kernels as hk
from hdet_kernels.controller.protocol import Judgement, Observation, Run, State
from tests.training import Trainer, batch, loss_of, network, with_averaging

TOTAL, SYNC = 16, 4

Kind = Literal["stack shared", "stack local", "ranks shared", "ranks local"]


@dataclass(frozen=True)
class Scripted:
    """Judges the syncs by a script, ("sound" or "broken" by step), and halves the base values with every return."""

    script: tuple[tuple[int, Judgement], ...] = ()
    undo: int = 3
    last: int = TOTAL

    @property
    def reads(self) -> Literal["losses", "slopes"]:
        return "losses"

    def prepare(self, run: Run) -> Run:
        return run

    def active(self, run: Run, step: int) -> bool:
        return step <= self.last

    def start(self, count: int, run: Run | None = None) -> State:
        return {"factors": [1.0] * count, "moved": 0}

    def update(self, run: Run, state: State, seen: Observation) -> State:
        return {"factors": [0.9 * factor for factor in state["factors"]], "moved": state["moved"] + 1}

    def base(self, state: State, index: int, scheduled: Any) -> Any:
        return scheduled * state["factors"][index]

    def judge(self, run: Run, state: State, seen: Observation) -> Judgement:
        return dict(self.script).get(seen.step, "unclear")

    def undone(self, run: Run, state: State, seen: Observation) -> State:
        return {**state, "factors": [factor / 2 for factor in state["factors"]]}


class Early(Scripted):
    """A controller that wishes three more syncs in the first cycle."""

    def prepare(self, run: Run) -> Run:
        return replace(run, early=(2, 4, 8))


def script(**judgements: Judgement) -> tuple[tuple[int, Judgement], ...]:
    """Return a script from keywords such as ``s4="sound"``."""
    return tuple((int(name[1:]), judgement) for name, judgement in judgements.items())


SOUND_THEN_BROKEN = script(s4="sound", s8="broken")

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "FusedAdamW": hk.FusedAdamW,
    "FusedSGD": lambda params, lr: hk.FusedSGD(params, lr=lr, momentum=0.9, dampening=0.1),
    # With a penalty in the gradient, replicas of a stack have moments of their own from the first step on.
    "FusedAdam": lambda params, lr: hk.FusedAdam(params, lr=lr, weight_decay=0.1),
    "FusedAdagrad": lambda params, lr: hk.FusedAdagrad(params, lr=lr, weight_decay=0.1),
    "torch AdamW": torch.optim.AdamW,
}


class Undoable:
    """Model, optimizer and scheduler of one process: two replicas in a stack, or one of several ranks."""

    def __init__(
        self, kind: Kind, optimizer: str, rank: int = 0, *, dtype: Any = None, replicas: int = 2, **options: Any
    ) -> None:
        self.stack: hk.ReplicaStack | None = None
        options = {
            "max_lr": 0.05,
            "total_steps": TOTAL,
            "sync_every": SYNC,
            "spread": 0.5,
            "cycle_momentum": False,
        } | options
        make = OPTIMIZERS[optimizer]
        if kind.startswith("ranks"):
            self.ranks = Trainer(
                rank, ddp=kind == "ranks shared", make_optimizer=make, batch_norm=True, average_buffers=True, **options
            )
            self.module, self.optimizer, self.scheduler = self.ranks.module, self.ranks.optimizer, self.ranks.scheduler
            return
        gradients: Any = kind.split()[1]
        self.stack = hk.ReplicaStack(network(batch_norm=True).to(dtype or torch.float32), replicas, gradients=gradients)
        self.optimizer = make(self.stack.parameters(), lr=0.01)
        self.scheduler = hk.HDETOneCycleLR(self.optimizer, ensemble=self.stack.ensemble, **with_averaging(options))

    def train(self, steps: int, before_sync: Callable[[Undoable], None] | None = None) -> Undoable:
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
        x, y = batch(0, step, size=12)
        dtype = next(self.stack.parameters()).dtype
        self.optimizer.zero_grad()
        return self.stack.backward(loss_of, x.to(dtype), y.to(dtype)).detach()

    def poison(self) -> None:
        """Make all parameters NaN."""
        for param in self.params():
            param.data.fill_(float("nan"))

    def params(self) -> list[Tensor]:
        return list((self.stack or self.module).parameters())

    def everything(self) -> dict[str, Any]:
        """Return copies of all that training changes."""
        return {
            "params": [param.detach().clone() for param in self.params()],
            "buffers": [buffer.detach().clone() for buffer in (self.stack or self.module).buffers()],
            "state": copy.deepcopy(self.optimizer.state_dict()["state"]),
        }

    def parts(self) -> list[Any]:
        return [self.stack or self.module, self.optimizer, self.scheduler]

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
