"""One cycle of HDET: fan-out, T steps, losses and values of all replicas, controller, converge, and again.

The schedulers own a :class:`Cycle` and tell it two things: a step is finished (:meth:`Cycle.end_step`), and what the
schedule says now (:meth:`Spread.rates`). It knows nothing of how the schedule is computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.controller.protocol import Run
from hdet_kernels.converge import AverageRequest, AverageState, Converger, Outcome, Report
from hdet_kernels.converge.overlap import Correction, OverlappedAverage
from hdet_kernels.converge.plan import compared
from hdet_kernels.ensemble import Ensemble, held
from hdet_kernels.fanout.spread import Placement, Spread
from hdet_kernels.schedule.gradient_hooks import Displacement, fingerprint, weakly
from hdet_kernels.schedule.history import Kind, SyncRecord
from hdet_kernels.schedule.loss_window import Loss, LossWindow, checked_loss

log = logging.getLogger("hdet_kernels")

GradientMode = Literal["auto", "shared", "local"]
Probe = Callable[[], Loss]


@dataclasses.dataclass(frozen=True)
class _Pending:
    """An average that was started after ``step`` and is due after step ``due``; ``placed``: what the replicas had
    trained with; ``acting``: whether the controller acts on it."""

    step: int
    due: int
    placed: Placement
    acting: bool
    flight: OverlappedAverage[Outcome]


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
        gradients: GradientMode,
        average_state: AverageState,
        overlap_steps: int,
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
        self.overlap_steps = overlap_steps
        self.step = step
        self.window = LossWindow(ensemble.rows)
        self.history: list[SyncRecord] = []
        self._group_count = len(optimizer.param_groups)
        self._fingerprint: Tensor | None = None
        self._shared: bool | None = None
        self._write_hyperparameters: Callable[[], None] | None = getattr(optimizer, "write_hyperparameters", None)
        self._pending: _Pending | None = None
        self._begun = False  # a step was made, from where the outer optimizer starts
        self._away = False  # inside consensus(): the parameters are not this replica's
        takes_slopes = spread.controller is not None and spread.controller.reads == "slopes"
        self._displacement = Displacement(optimizer, apart=ensemble.size > 1) if takes_slopes else None
        self._fan_out()
        optimizer.register_step_pre_hook(weakly(self._before_optimizer_step))
        optimizer.register_load_state_dict_post_hook(weakly(self.write))

    @property
    def number(self) -> int:
        """The number of the current cycle, from 0."""
        return self.step // self.run.sync_every

    def _fan_out(self) -> None:
        looks, departs = self.run.syncs_before(self.step), self.run.departs_at(self.step)
        self.spread.fan_out(self.number, looks, in_pairs=self.run.in_pairs, departs=departs)

    def write(self) -> None:
        """Give the optimizer and the user's setters this replica's values."""
        self.spread.write(self.optimizer.param_groups)

    def publish(self) -> None:
        """The schedule has moved on: tell the optimizer what several replicas have now, and let one that keeps its
        hyperparameters on the device write them there: where its step is part of a captured CUDA graph, it would not
        get to do so itself."""
        self.spread.write_rates(self.optimizer.param_groups)
        if self._write_hyperparameters is not None:
            self._write_hyperparameters()

    # A step

    def end_step(self, loss: Loss | None, last_step: int | None) -> bool:
        """The optimizer has finished a step; sync where one is due, and land what is due. Raises with nothing changed,
        but that what belongs to the sync before may have landed.

        ``last_step`` is the step after which there are no more, if the schedule knows one. Returns whether there was a
        sync or a landing: then the values are new, and :meth:`write` is due once the schedule has moved on."""
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
        step = self.step + 1
        syncs = self.run.syncs_at(step)
        lands = self._pending is not None and (syncs or step >= self._pending.due)
        mark = self.window.mark() if syncs or lands else None
        if loss is not None:
            self.window.record(loss)
        if self.spread.reads_losses and self.probe is None and not self.window.ever:
            raise RuntimeError(
                "auto_lr is on and needs the training loss, but none was recorded: call scheduler.step(loss), or "
                "scheduler.record_loss(loss) before scheduler.step() where a framework calls it bare; or pass "
                "auto_lr=False (fan-out and averaging only)"
            )
        if self._takes_best and self.probe is None and not self.window.ever:
            raise RuntimeError(
                "merge='best' copies the replica whose loss is lowest, but none was recorded: call "
                "scheduler.step(loss), or scheduler.record_loss(loss) before scheduler.step() where a framework calls "
                "it bare; or pass probe="
            )
        if mark is not None:
            try:
                self._land(step)
                if syncs:
                    self._sync(step)
            except BaseException:
                self.window.reset(mark)
                raise
        if syncs:
            self.window.clear()
            self._fingerprint = None
        self.step = step
        if syncs:
            self._fan_out()
        return mark is not None

    def _before_optimizer_step(self) -> None:
        if not self._begun:  # only now: weights are loaded, and noise is added, after a scheduler was built too
            self._begun = True
            self.converger.begin()
        if self._displacement is not None:
            self._displacement.measure()
        if self.gradients == "auto" and self.ensemble.size > 1 and self.run.syncs_at(self.step + 1):
            self._fingerprint = fingerprint(self.optimizer.param_groups)

    # A sync

    @property
    def _takes_best(self) -> bool:
        return self.converger.merge == "best"

    def _acting(self, step: int) -> bool:
        return self.spread.controller is not None and self.spread.controller.active(self.run, step)

    def _sync(self, step: int) -> None:
        """Meet the other replicas at the end of ``step`` and average, or start to."""
        acting, placed = self._acting(step), self.spread.placement()
        reads_losses = acting and self.spread.reads_losses
        report, failure = self._report(step, compares=reads_losses or self._takes_best)
        asked = AverageRequest(
            average_state=self._average_state(),
            known_shared=self._known_shared(),
            needs_shared=self._displacement is not None,
            needs_loss=(reads_losses or self._takes_best) and self.probe is None,
            skip_if_equal=not self.spread.diverges,
        )
        with _caused_by(failure):
            if self.overlap_steps and step != self.run.total_steps:
                flight = self.converger.start(report, asked)
                self._pending = _Pending(step, step + self.overlap_steps, placed, acting, flight)
            else:
                self._turn(step, step, placed, acting, self.converger.converge(report, asked))

    def _land(self, step: int) -> None:
        """Apply the average that is on its way, if there is one, at the end of ``step``."""
        if (pending := self._pending) is not None:
            outcome = self.converger.land(pending.flight)
            self._pending = None
            if not outcome.healthy[held(self.ensemble)].all():
                self.window.clear()  # losses of parameters that were not sound until now
            self._turn(pending.step, step, pending.placed, pending.acting, outcome)

    def _turn(self, step: int, landed: int, placed: Placement, acting: bool, outcome: Outcome) -> None:
        """Note what happened at the sync after ``step``, and let the controller move the base values."""
        self._shared = outcome.shared
        kind: Kind = "sync" if step % self.run.sync_every == 0 else "early" if step in self.run.early else "last"
        self._note(step, landed, kind, placed, outcome)
        slopes = self._displacement.turn() if self._displacement else None
        if acting:
            losses = compared(outcome.losses, outcome.probes)
            self.spread.move(self.run, placed, np.where(outcome.healthy, losses, np.nan), slopes, step)

    def converge(self) -> None:
        """Average all replicas now, wherever in the cycle; the cycle goes on. As at a sync, but that there is no outer
        step where no step was made since the last average, and that without any loss the best is the mean."""
        if self._away:
            raise RuntimeError("cannot average inside scheduler.consensus(): the parameters are averaged already")
        if self._pending is not None:
            self._land(self.step)
            self.write()
            self.publish()
        moved = self._begun and not (self.history and self.history[-1].step == self.step)
        asked = AverageRequest(
            "converge", average_state=self._average_state(), known_shared=self._known_shared(), outer=moved
        )
        report, failure = self._report(self.step, compares=self._takes_best)
        with _caused_by(failure):
            outcome = self.converger.converge(report, asked)
        self._note(self.step, self.step, "manual", self.spread.placement(), outcome)

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """The averaged parameters and buffers inside the block, this replica's own again after it. An average that is
        on its way stays on its way: its corrections add up to nothing over the replicas."""
        if self._away:
            raise RuntimeError(
                "scheduler.consensus() inside scheduler.consensus(): the parameters are averaged already"
            )
        report, failure = self._report(self.step, compares=self._takes_best)
        with _caused_by(failure), self.converger.consensus(report):
            self._away = True
            try:
                yield
            finally:
                self._away = False

    def _report(self, step: int, *, compares: bool) -> tuple[Report, Exception | None]:
        """What this process says of its replicas, and what the probe raised, if it did: the others wait, and must hear
        of it. ``compares``: losses are looked at, and the probe runs."""
        probe, failure = self._run_probe() if compares else (None, None)
        hyperparameters, base = self.spread.hyperparameters, self.spread.placement().base
        settings = {"gradients": self.gradients, "average_state": self.average_state}
        report = Report(
            step,
            # A copy: the window goes on while an average is on its way.
            self.window.sum.clone() if isinstance(self.window.sum, Tensor) else self.window.sum,
            self.window.count,
            probe=probe,
            failed=failure is not None,
            gradients=self._fingerprint,
            settings={**self.config, **settings, "overlap_steps": self.overlap_steps},
            # Six digits: the last ones may differ between machines of different kinds.
            bases={hyper.name: f"{value:.6e}" for hyper, value in zip(hyperparameters, base, strict=True)},
        )
        return report, failure

    def _average_state(self) -> AverageState:
        if self.average_state != "auto":
            return self.average_state
        return "auto" if self.gradients == "auto" else self.gradients == "local"

    def _known_shared(self) -> bool | None:
        return self._shared if self.gradients == "auto" else self.gradients == "shared"

    def _run_probe(self) -> tuple[float | Tensor | None, Exception | None]:
        """The probe's loss, or what it raised."""
        if self.probe is None:
            return None, None
        try:
            with torch.no_grad():
                return checked_loss(self.probe(), "what probe() returns", self.ensemble.rows), None
        except Exception as error:
            return None, error

    def _note(self, step: int, landed: int, kind: Kind, placed: Placement, outcome: Outcome) -> None:
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
            cycle=(step - 1) // self.run.sync_every if kind != "manual" else self.number,
            kind=kind,
            losses=outcome.losses.tolist(),
            probes=None if np.isnan(outcome.probes).all() else outcome.probes.tolist(),
            base=dict(zip(names, placed.base.tolist(), strict=True)),
            values=dict(zip(names, placed.values.tolist(), strict=True)),
            excluded=excluded,
            gradients=seen,
            bytes=outcome.bytes,
            collectives=outcome.collectives,
            seconds=outcome.seconds,
            landed=landed,
            taken=outcome.taken,
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
            "outer": self.converger.settings()["outer"],
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors only: ``torch.load(weights_only=True)`` reads it."""
        return {
            "config": self.config,
            "size": self.ensemble.size,
            "replica": self.ensemble.replica,
            "rows": self.ensemble.rows,
            "step": self.step,
            "shared": self._shared,
            "spread": self.spread.state_dict(),
            "window": self.window.state_dict(),
            "displacement": self._displacement.state_dict() if self._displacement else None,
            "pending": self._pending_state(),
            "compression": self.converger.state_dict(),
            "outer": self.converger.outer_state_dict(),
            "begun": self._begun,
            "history": [record.to_dict() for record in self.history],
        }

    def _pending_state(self) -> dict[str, Any] | None:
        """The average on its way, with what it will land with: waits for that. One that failed is none."""
        if (pending := self._pending) is None or pending.flight.failed:
            return None
        correction, outcome = pending.flight.wait()
        if self._away:
            correction = correction.of_the_consensus()
        plain = {name: getattr(outcome, name) for name in ("shared", "bytes", "collectives", "seconds")}
        arrays = {name: getattr(outcome, name).tolist() for name in ("losses", "probes", "healthy")}
        return {
            "step": pending.step,
            "due": pending.due,
            "placed": pending.placed.state_dict(),
            "acting": pending.acting,
            "correction": correction.state_dict(),
            "outcome": {**plain, **arrays},
        }

    def _load_pending(self, state: dict[str, Any] | None) -> None:
        if state is None:
            self._pending = None
            return
        arrays = {name: np.array(state["outcome"][name]) for name in ("losses", "probes", "healthy")}
        flight = OverlappedAverage.landed(Correction.of(state["correction"]), Outcome(**{**state["outcome"], **arrays}))
        placed = Placement.of(state["placed"])
        self._pending = _Pending(state["step"], state["due"], placed, state["acting"], flight)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise unless :meth:`load_state_dict` can take ``state``."""
        for key, here in self.config.items():
            if state["config"].get(key) != here:
                raise ValueError(
                    f"the checkpoint was made with {key}={state['config'].get(key)!r}, this scheduler has {here!r}: "
                    "build it with the arguments of the saved run"
                )
        self.converger.check_outer_state_dict(state.get("outer"))
        into_cycle = state["step"] % self.run.sync_every
        saved, here = (state["size"], state.get("rows", 1)), (self.ensemble.size, self.ensemble.rows)
        if saved != here and into_cycle and state["step"] != self.run.total_steps:
            several = max(saved[1], here[1]) > 1
            of_saved, of_here = (f", {rows} in a process," if several else "" for _, rows in (saved, here))
            raise ValueError(
                f"the checkpoint has {saved[0]} replicas{of_saved} and was saved {into_cycle} steps into a cycle, this "
                f"run has {here[0]}{of_here.rstrip(',')}: another number of replicas"
                f"{' in a process' if saved[0] == here[0] else ''} can resume only where all are equal, at a multiple "
                f"of sync_every={self.run.sync_every}; save there"
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
        if self._pending is not None:
            _ = self._pending.flight.failed  # waits: what is on its way must not meet what follows
        self._load_pending(state.get("pending"))
        own = (state["replica"], state["size"]) == (self.ensemble.replica, self.ensemble.size)
        self.converger.load_state_dict(state.get("compression"), own=own)
        self.converger.load_outer_state_dict(state.get("outer"))
        self._begun = state.get("begun", True)
        self.history[:] = [SyncRecord(**record) for record in state["history"]]
        self._fan_out()
        self._fingerprint = None
        self.write()


@contextlib.contextmanager
def _caused_by(failure: Exception | None) -> Iterator[None]:
    """A RuntimeError of the block has ``failure`` as its cause, if there was one."""
    try:
        yield
    except RuntimeError as error:
        if failure is None:
            raise
        raise error from failure
