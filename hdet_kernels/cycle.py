"""One cycle of HDET: fan-out, T steps, losses and values of all replicas, controller, converge, and again.

The schedulers own a :class:`Cycle` and tell it two things: a step is finished (:meth:`Cycle.end_step`), and what the
schedule says now (:meth:`Spread.rates`). It knows nothing of how the schedule is computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from .controller import Run
from .converge import AverageState, Converger, Outcome, Report
from .ensemble import Ensemble
from .gradients import Displacement, fingerprint, weakly
from .history import SyncRecord
from .spread import Spread
from .window import LossWindow, scalar

log = logging.getLogger("hdet_kernels")

Gradients = Literal["auto", "shared", "local"]
Probe = Callable[[], float | Tensor]


class Cycle:
    """The state of a run between and at its syncs, on this replica."""

    def __init__(
        self,
        optimizer: Optimizer,
        spread: Spread,
        run: Run,
        ensemble: Ensemble,
        converger: Converger,
        *,
        probe: Probe | None,
        gradients: Gradients,
        average_state: AverageState,
        step: int,
        schedule: str,
    ) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.spread = spread
        self.run = run
        self.ensemble = ensemble
        self.converger = converger
        self.probe = probe
        self.gradients = gradients
        self.average_state = average_state
        self.step = step
        self.window = LossWindow()
        self.history: list[SyncRecord] = []
        self._group_count = len(optimizer.param_groups)
        self._fingerprint: Tensor | None = None
        self._shared: bool | None = None
        self._write_hyperparameters: Callable[[], None] | None = getattr(optimizer, "write_hyperparameters", None)
        self._away = False  # inside consensus(): the parameters are not this replica's
        takes_slopes = spread.controller is not None and spread.controller.reads == "slopes"
        self._displacement = Displacement(optimizer) if takes_slopes else None
        spread.fan_out(self.number)
        optimizer.register_step_pre_hook(weakly(self._before_optimizer_step))
        optimizer.register_load_state_dict_post_hook(weakly(self.write))

    @property
    def number(self) -> int:
        """The number of the current cycle, from 0."""
        return self.step // self.run.sync_every

    def write(self) -> None:
        """Give the optimizer and the user's setters this replica's values."""
        self.spread.write(self.optimizer.param_groups)

    def publish(self) -> None:
        """Let an optimizer that keeps its hyperparameters on the device write them there now: where its step is part of
        a captured CUDA graph, it would not get to do so itself."""
        if self._write_hyperparameters is not None:
            self._write_hyperparameters()

    # A step

    def end_step(self, loss: float | Tensor | None, last_step: int | None) -> bool:
        """The optimizer has finished a step; sync where one is due. Raises with nothing changed.

        ``last_step`` is the step after which there are no more, if the schedule knows one. Returns whether there was a
        sync: then the values are new, and :meth:`write` is due once the schedule has moved on."""
        if self._away:
            raise RuntimeError("scheduler.step() inside scheduler.consensus(): the block is for evaluating and saving")
        if len(self.optimizer.param_groups) != self._group_count:
            raise RuntimeError(
                f"the optimizer has {len(self.optimizer.param_groups)} parameter groups, the scheduler was built for "
                f"{self._group_count}: build the scheduler after the last add_param_group()"
            )
        if last_step is not None and self.step >= last_step:
            raise ValueError(
                f"step {self.step + 1} is past the end: total_steps is {last_step}; stop there, or build the scheduler "
                "with the number of steps that you mean to make"
            )
        mark = self.window.mark() if self._sync_due(self.step + 1) else None
        if loss is not None:
            self.window.record(loss)
        if self.spread.reads_losses and self.probe is None and not self.window.ever:
            raise RuntimeError(
                "auto_lr is on and needs the training loss, but none was recorded: call scheduler.step(loss), or "
                "scheduler.record_loss(loss) before scheduler.step() where a framework calls it bare; or pass "
                "auto_lr=False (fan-out and averaging only)"
            )
        if mark is None:
            self.step += 1
            return False
        try:
            outcome = self._meet()
        except BaseException:
            self.window.reset(mark)
            raise
        self._turn(outcome)
        return True

    def _sync_due(self, step: int) -> bool:
        return step % self.run.sync_every == 0 or step == self.run.total_steps

    def _before_optimizer_step(self) -> None:
        if self._displacement is not None:
            self._displacement.measure()
        if self.gradients == "auto" and self.ensemble.size > 1 and self._sync_due(self.step + 1):
            self._fingerprint = fingerprint(self.optimizer.param_groups)

    # A sync

    def _acting(self, step: int) -> bool:
        return self.spread.controller is not None and self.spread.controller.active(self.run, step)

    def _meet(self) -> Outcome:
        """Meet the other replicas at the end of step ``self.step + 1`` and average. Raises with nothing changed."""
        step = self.step + 1
        reads_losses = self._acting(step) and self.spread.reads_losses
        probe, failure = self._run_probe() if reads_losses else (None, None)
        try:
            return self.converger.converge(
                dataclasses.replace(self._report(step), probe=probe, failed=failure is not None),
                average_state=self._average_state(),
                known_shared=self._shared,
                needs_shared=self._displacement is not None,
                needs_loss=reads_losses and self.probe is None,
                skip_if_equal=not self.spread.diverges,
            )
        except RuntimeError as error:
            raise error from failure

    def _turn(self, outcome: Outcome) -> None:
        """Note what happened, let the controller move the base values, and take new places: a new cycle."""
        step = self.step + 1
        self._shared = outcome.shared
        self._note(step, "sync" if step % self.run.sync_every == 0 else "last", outcome)
        slopes = self._displacement.turn() if self._displacement else None
        if self._acting(step):
            losses = outcome.losses if np.isnan(outcome.probes).all() else outcome.probes
            self.spread.move(self.run, np.where(outcome.healthy, losses, np.nan), slopes)
        self.window.clear()
        self._fingerprint = None
        self.step = step
        self.spread.fan_out(self.number)

    def converge(self) -> None:
        """Average all replicas now, wherever in the cycle; the cycle goes on."""
        if self._away:
            raise RuntimeError("cannot average inside scheduler.consensus(): the parameters are averaged already")
        outcome = self.converger.converge(
            self._report(self.step), average_state=self._average_state(), known_shared=self._shared
        )
        self._note(self.step, "manual", outcome)

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """The averaged parameters and buffers inside the block, this replica's own again after it."""
        if self._away:
            raise RuntimeError(
                "scheduler.consensus() inside scheduler.consensus(): the parameters are averaged already"
            )
        own = [tensor.detach().clone() for tensor in self.converger.covered()]
        self._away = True
        try:
            self.converger.converge(self._report(self.step), include_state=False)
            yield
        finally:
            self._away = False
            torch._foreach_copy_([tensor.detach() for tensor in self.converger.covered()], own)

    def _report(self, step: int) -> Report:
        bases, _ = self.spread.table()
        # Six digits: the last ones may differ between machines of different kinds.
        digest = _hash([f"{base:.6e}" for base in bases])
        return Report(
            step,
            self.window.sum,
            self.window.count,
            gradients=self._fingerprint,
            config=self.config_hash,
            base=float(bases[0]),
            bases=digest,
        )

    def _average_state(self) -> AverageState:
        if self.average_state != "auto":
            return self.average_state
        return "auto" if self.gradients == "auto" else self.gradients == "local"

    def _run_probe(self) -> tuple[float | Tensor | None, Exception | None]:
        """The probe's loss, or what it raised: the other replicas wait, and must hear of it."""
        if self.probe is None:
            return None, None
        try:
            with torch.no_grad():
                return scalar(self.probe(), "what probe() returns"), None
        except Exception as error:
            return None, error

    def _note(self, step: int, kind: Literal["sync", "last", "manual"], outcome: Outcome) -> None:
        base, values = self.spread.table()
        names = [hyper.name for hyper in self.spread.hyperparameters]
        excluded = np.flatnonzero(~outcome.healthy).tolist()
        if excluded:
            log.warning("step %d: replicas %s were not finite; left out of the mean and given it", step, excluded)
        seen: Literal["shared", "local", "unknown"]
        if self.gradients != "auto":
            seen = self.gradients
        else:
            seen = "unknown" if outcome.shared is None else "shared" if outcome.shared else "local"
        record = SyncRecord(
            step=step,
            cycle=self.number,
            kind=kind,
            losses=outcome.losses.tolist(),
            probes=None if np.isnan(outcome.probes).all() else outcome.probes.tolist(),
            base=dict(zip(names, base.tolist(), strict=True)),
            values=dict(zip(names, values.tolist(), strict=True)),
            excluded=excluded,
            gradients=seen,
            bytes=outcome.bytes,
            collectives=outcome.collectives,
            seconds=outcome.seconds,
        )
        self.history.append(record)

    # Checkpoints

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """What must be equal on all replicas and in a checkpoint that is loaded, as plain values."""
        controller = self.spread.controller
        constants: dict[str, Any] = {}
        if dataclasses.is_dataclass(controller) and not isinstance(controller, type):
            constants = dataclasses.asdict(controller)
        return {
            "schedule": self.schedule,
            "hyperparameters": self.spread.config(),
            "sync_every": self.run.sync_every,
            "total_steps": self.run.total_steps,
            "seed": self.spread.seed,
            "controller": type(controller).__name__ if controller else None,
            "controller_constants": constants,
            "probe": self.probe is not None,
        }

    @functools.cached_property
    def config_hash(self) -> int:
        return _hash([self.config, self.gradients, self.average_state])

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors only: ``torch.load(weights_only=True)`` reads it."""
        return {
            "config": self.config,
            "size": self.ensemble.size,
            "replica": self.ensemble.replica,
            "step": self.step,
            "shared": self._shared,
            "spread": self.spread.state_dict(),
            "window": self.window.state_dict(),
            "displacement": self._displacement.state_dict() if self._displacement else None,
            "history": [record.to_dict() for record in self.history],
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise unless :meth:`load_state_dict` can take ``state``."""
        for key, here in self.config.items():
            if state["config"].get(key) != here:
                raise ValueError(
                    f"the checkpoint was made with {key}={state['config'].get(key)!r}, this scheduler has {here!r}: "
                    "build it with the arguments of the saved run"
                )
        into_cycle = state["step"] % self.run.sync_every
        if state["size"] != self.ensemble.size and into_cycle and state["step"] != self.run.total_steps:
            raise ValueError(
                f"the checkpoint has {state['size']} replicas and was saved {into_cycle} steps into a cycle, this run "
                f"has {self.ensemble.size}: another number of replicas can resume only where all are equal, at a "
                f"multiple of sync_every={self.run.sync_every}; save there"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume, in this replica's own place in the spread, whichever replica saved ``state``."""
        self.check_state_dict(state)
        if state["replica"] != self.ensemble.replica and state["step"] % self.run.sync_every:
            log.info(
                "resuming from replica %d's checkpoint, %d steps into a cycle: the parameters of the other replicas at "
                "that moment are not in it",
                state["replica"],
                state["step"] % self.run.sync_every,
            )
        self.step = state["step"]
        self._shared = state["shared"]
        self.spread.load_state_dict(state["spread"], self.optimizer.param_groups)
        self.window.load_state_dict(state["window"])
        if self._displacement is not None:
            self._displacement.load_state_dict(state["displacement"])
        self.history[:] = [SyncRecord(**record) for record in state["history"]]
        self.spread.fan_out(self.number)
        self._fingerprint = None
        self.write()


def _hash(value: Any) -> int:
    """48 bits of plain values, the same in every process."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
