"""The cycle of the published method, by the contract for frontends: torch's OneCycleLR around it is ``compat.py``.

It uses the names of :mod:`hdet_kernels.frontend` alone, as a frontend outside of this package would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.frontend import (
    AverageRequest,
    Ensemble,
    LossWindow,
    Outcome,
    Placement,
    Report,
    Run,
    SoftmaxController,
    Spread,
    SyncCallbacks,
    SyncRecord,
    announced_size,
    converger_of,
    default_ensemble,
    fingerprint,
    look_at_gradients,
)

log = logging.getLogger("hdet_kernels")

_REMEDY = "call torch.distributed.init_process_group() before the first step"

#: Records of syncs that are kept.
MOST_RECORDS = 1000


class PublishedCycle:
    """The published method on an optimizer whose schedule is torch's OneCycleLR.

    Args:
        optimizer: with the groups that OneCycleLR has filled.
        run: the run.
        controller: the paper's; None without auto-LR.
        spread: α.
        step: steps that were made before.
    """

    def __init__(
        self, optimizer: Optimizer, run: Run, controller: SoftmaxController | None, spread: float, step: int
    ) -> None:
        self.optimizer, self.alpha, self.step = optimizer, spread, step
        self.controller = controller if spread else None  # replicas that do not differ cannot be compared
        self.run = run if self.controller is None else self.controller.prepare(run)
        self.window = LossWindow()
        self.history: list[SyncRecord] = []
        self.callbacks = SyncCallbacks()
        self.shared: bool | None = None  # whether gradients were shared at the last sync
        self.started = self.in_consensus = False
        self._moved = False  # whether the optimizer made a step since the last average
        self._join(default_ensemble())
        self._gradients: Tensor | None = None
        optimizer.register_step_pre_hook(_weak_hook(self._before_optimizer_step))
        optimizer.register_load_state_dict_post_hook(_weak_hook(self._write))

    def _join(self, ensemble: Ensemble) -> None:
        """Become one of the replicas of ``ensemble``. The groups have the schedule's learning rates."""
        groups = self.optimizer.param_groups
        self.ensemble = ensemble
        self.spread = Spread.of(groups, ensemble, self.controller, run=self.run, spread=self.alpha)
        self.spread.begin_cycle(self.run, self.step)
        self.converger = converger_of(self.optimizer, ensemble)

    def take_group(self) -> None:
        """Take the default process group, if it was initialised after this was built.

        Raises:
            RuntimeError: if a step was made before, as the only replica, or if there is still no group.
        """
        if self.ensemble.size > 1:
            return
        if (found := default_ensemble()).size > 1:
            if self.started:
                raise RuntimeError(
                    f"a process group of {found.size} processes was initialised after the first step of a single "
                    f"replica: {_REMEDY}"
                )
            self.spread.give_back(self.optimizer.param_groups)
            self._join(found)
            self._write()
        elif (size := announced_size()) > 1 and not dist.is_initialized():
            raise RuntimeError(
                f"WORLD_SIZE is {size} in the environment, but no process group is initialised, and each process would "
                f"train one replica for itself: {_REMEDY}"
            )

    def _before_optimizer_step(self, *call: Any) -> Any:
        return look_at_gradients(self._look, *call)

    def _look(self) -> None:
        if not self.started:
            self.take_group()
        self.started = self._moved = True
        if self.ensemble.size > 1 and self.run.syncs_at(self.step + 1):
            self._gradients = fingerprint(self.optimizer.param_groups)

    def _write(self) -> None:
        self.spread.write(self.optimizer.param_groups)

    def end_step(self, loss: float | Tensor | None) -> bool:
        """Record the loss of a step, and average if a sync is due; return whether it was.

        Raises with nothing changed.
        """
        if self.in_consensus:
            raise RuntimeError("scheduler.step() inside scheduler.consensus(): the block is for evaluating and saving")
        self.take_group()
        step, syncs = self.step + 1, self.run.syncs_at(self.step + 1)
        mark = self.window.mark() if syncs else None
        if loss is not None:
            self.window.record(loss)
        if self.controller is not None and not self.window.ever:
            raise RuntimeError(
                "enable_auto_lr=True compares losses, and none was recorded: call scheduler.step(loss), or "
                "scheduler.record_loss(loss) before scheduler.step()"
            )
        if mark is not None:
            try:
                self._sync(step)
            except BaseException:
                self.window.reset(mark)
                raise
        self.step, self.started = step, True
        if syncs:
            self.window.clear()
            self.spread.begin_cycle(self.run, step)
            self._gradients = None
        return syncs

    def tell(self) -> None:
        """Call the callbacks with the last record."""
        self.callbacks.call(self.history[-1:], first=self.ensemble.replica == 0)

    @property
    def in_sync(self) -> bool:
        """Whether the parameters of this process are the average of all replicas."""
        averaged = self.history[-1].step == self.step if self.history else not self.step
        return self.in_consensus or self.ensemble.size == 1 or (averaged and not self._moved)

    def follow(self) -> list[float | Tensor]:
        """Give this replica its learning rates, after the schedule has moved on, and return them."""
        self.spread.follow(self.optimizer.param_groups)
        # A step that is part of a captured CUDA graph cannot read the groups.
        if callable(publish := getattr(self.optimizer, "write_hyperparameters", None)):
            publish()
        return self.rates()

    def rates(self) -> list[float | Tensor]:
        """Return the learning rates of this replica; tensors as copies."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def _sync(self, step: int) -> None:
        placed = self.spread.placement()
        acts = self.controller is not None and self.controller.active(self.run, step)
        request = AverageRequest(known_shared=self.shared, needs_loss=acts, skip_if_equal=not self.spread.diverges)
        outcome = self.converger.converge(self._report(step), request)
        if acts:
            self.spread.move(self.run, self.spread.observe(placed, outcome.compared, step))
        self.shared = outcome.shared
        self._record(step, "sync" if step % self.run.sync_every == 0 else "last", placed, outcome)

    def _report(self, step: int) -> Report:
        return Report(
            step,
            self.window.sum,
            self.window.count,
            gradients=self._gradients,
            settings=self.config(),
            bases=self.spread.bases(),
        )

    def _record(self, step: int, kind: Literal["sync", "last", "manual"], placed: Placement, outcome: Outcome) -> None:
        record = SyncRecord.of(
            outcome,
            placed,
            [hyper.name for hyper in self.spread.hyperparameters],
            step=step,
            cycle=step // self.run.sync_every if kind == "manual" else (step - 1) // self.run.sync_every,
            kind=kind,
        )
        if record.excluded:
            log.warning(
                "step %d: replicas %s were not finite; left out of the mean and given it", step, record.excluded
            )
        self.history.append(record)
        del self.history[:-MOST_RECORDS]
        self._moved = False

    def converge(self) -> None:
        """Average all replicas now."""
        if self.in_consensus:
            raise RuntimeError("cannot average inside scheduler.consensus(): the parameters are averaged already")
        self.take_group()
        request = AverageRequest("converge", known_shared=self.shared)
        outcome = self.converger.converge(self._report(self.step), request)
        self._record(self.step, "manual", self.spread.placement(), outcome)
        self.tell()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Hold the averaged model inside the block."""
        if self.in_consensus:
            raise RuntimeError(
                "scheduler.consensus() inside scheduler.consensus(): the parameters are averaged already"
            )
        self.take_group()
        with self.converger.consensus(self._report(self.step)):
            self.in_consensus = True
            try:
                yield
            finally:
                self.in_consensus = False

    # Checkpoints

    def config(self) -> dict[str, Any]:
        """Return the settings that must be equal on all replicas, and in a checkpoint that is loaded."""
        return {
            "schedule": "OneCycleLR",
            "hyperparameters": self.spread.config(),
            "sync_every": self.run.sync_every,
            "total_steps": self.run.total_steps,
            "seed": self.spread.seed,
            "controller": type(self.controller).__name__ if self.controller else None,
            "controller_constants": dataclasses.asdict(self.controller) if self.controller else {},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state in this process, as plain values."""
        return {
            "config": self.config(),
            "size": self.ensemble.size,
            "replica": self.ensemble.replica,
            "step": self.step,
            "shared": self.shared,
            "spread": self.spread.state_dict(),
            "window": self.window.state_dict(),
            "history": [record.to_dict() for record in self.history],
        }

    def check_state_dict(self, state: object) -> dict[str, Any]:
        """Return ``state``; raise ValueError unless it is that of a run with these settings."""
        if not isinstance(state, dict) or (missing := [name for name in self.state_dict() if name not in state]):
            lacks = f"its 'hdet' has no {', '.join(missing)}" if isinstance(state, dict) else "it has no 'hdet' entry"
            raise ValueError(f"this is not a checkpoint of OneCycleAutoLR: {lacks}")
        for name, here in self.config().items():
            saved = state["config"].get(name)
            if saved != here:
                raise ValueError(
                    f"the checkpoint has {name}={saved!r}, this scheduler {here!r}: build it with the same arguments"
                )
        if state["size"] != self.ensemble.size and not self.run.syncs_at(state["step"]) and state["step"]:
            raise ValueError(
                f"the checkpoint of step {state['step']} is of {state['size']} replicas in the middle of a cycle, and "
                f"there are {self.ensemble.size} here: load one that was saved at a multiple of model_sync_interval"
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that :meth:`check_state_dict` returned, at this replica's own place in the spread."""
        self.step, self.shared = state["step"], state["shared"]
        self.spread.load_state_dict(state["spread"], self.optimizer.param_groups)
        self.window.load_state_dict(state["window"])
        self.history = [SyncRecord(**record) for record in state["history"]]
        self.started, self._moved = True, False
        self.spread.begin_cycle(self.run, self.step)
        self._write()


def _weak_hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook for an optimizer that calls ``method`` as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def hook(_: Optimizer, *call: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*call)

    return hook
