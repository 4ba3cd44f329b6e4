"""One cycle of HDET: fan out, train T steps, compare and average the replicas, let the controller move, and again.

The schedulers own a :class:`Cycle` and tell it two things: a step is finished (:meth:`Cycle.end_step`), and what the
schedule says now (:meth:`.Spread.rates`). It does not know how the schedule is computed.

A sync reads top to bottom, from :meth:`Cycle._sync`: report on the replicas held here, average with the others (or
start to), move the base values or undo what broke, record what happened. ``checkpoint.py`` saves and restores a cycle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.controller.findings import ExplainingController, Findings
from hdet_kernels.controller.protocol import MeasuredSlopes, Observation, Run
from hdet_kernels.converge import AverageRequest, AverageState, Converger, NoneSound, Outcome, Report
from hdet_kernels.converge.converger import handshake_cost
from hdet_kernels.ensemble import Ensemble, held
from hdet_kernels.fanout.spread import Placement, Spread
from hdet_kernels.schedule.gradient_hooks import Displacement, fingerprint
from hdet_kernels.schedule.guards.equal_losses import EqualLosses
from hdet_kernels.schedule.guards.step_count import StepCount
from hdet_kernels.schedule.history.history_file import HistoryFile
from hdet_kernels.schedule.history.records import History, Kind, SyncRecord
from hdet_kernels.schedule.loss_window import Loss, LossWindow, checked_loss, run_probe
from hdet_kernels.schedule.options import GradientMode, Probe
from hdet_kernels.schedule.overlapping import Overlapping
from hdet_kernels.schedule.undo.undoing import Undoing

log = logging.getLogger("hdet_kernels")


class Cycle:
    """The state of a run between and at its syncs, in this process."""

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
        buffers: Callable[[], Sequence[Tensor]],
        history_file: HistoryFile | None = None,
        before: int = 0,
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
        self.step = self.first = step
        self.buffers = buffers
        self.before = before  # steps that were made before step 0: those of a scouting phase
        self.window = LossWindow(ensemble.rows)
        self.steps = StepCount()
        self.equal_losses = EqualLosses()
        self.history = History()
        self.history_file = history_file
        self.shared: bool | None = None  # whether gradients were shared at the last sync; None: not known
        self.overlapping: Overlapping | None = None
        self.started = False  # whether a step was made; the outer optimizer starts from the parameters before it
        self.in_consensus = False  # the parameters are the average now, and not this replica's own
        self.averaged = True  # no step was made since the last average
        self.expects_state = False  # a checkpoint was loaded whose optimizer had state
        self.replaced = False  # another scheduler was built on the optimizer
        self.displacement = Displacement.of(optimizer, run, ensemble, tied=spread.tied)
        self.undoing = Undoing.of(optimizer, spread, converger, self.displacement, buffers)
        self._group_count = len(optimizer.param_groups)
        self._fingerprint: Tensor | None = None
        self._write_hyperparameters: Callable[[], None] | None = getattr(optimizer, "write_hyperparameters", None)
        self.fan_out()

    @property
    def number(self) -> int:
        """The number of the current cycle, from 0."""
        return self.step // self.run.sync_every

    @property
    def in_sync(self) -> bool:
        """Whether the parameters in this process are the average of all replicas now."""
        if self.in_consensus or self.averaged or self.ensemble.size == 1:
            return True
        # Replicas that were averaged once, and have equal values and gradients since then, stay equal.
        stays = not self.spread.diverges and self._known_shared() is True and self.overlapping is None
        return stays and self.history.last_step is not None

    @property
    def begun(self) -> bool:
        """Whether a step was made, here or in the run of a checkpoint."""
        return self.started or self.step != self.first

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings, as plain values, that must be equal on all replicas and in a checkpoint that is loaded."""
        controller = self.spread.controller
        return {
            "schedule": self.schedule,
            "hyperparameters": self.spread.config(),
            "sync_every": self.run.sync_every,
            "total_steps": self.run.total_steps,
            "seed": self.spread.seed,
            "controller": type(controller).__name__ if controller else None,
            "controller_constants": plain_fields(controller),
            "probe": self.probe is not None,
            "outer": self.converger.settings()["outer"],
        }

    def fan_out(self) -> None:
        """Give every replica its multipliers for the cycle that begins now."""
        self.spread.begin_cycle(self.run, self.step)
        self._fingerprint = None

    def write(self) -> None:
        """Write this replica's values to the optimizer's groups and the user's setters."""
        self.spread.write(self.optimizer.param_groups)

    def publish(self) -> None:
        """Write the learning rates of this step where the optimizer reads them: by replica, and on the device.

        A step that is part of a captured CUDA graph cannot write its hyperparameter table itself.
        """
        self.spread.write_rates(self.optimizer.param_groups)
        if self._write_hyperparameters is not None:
            self._write_hyperparameters()

    # A step

    def end_step(self, loss: Loss | None, last_step: int | None) -> bool:
        """End a step of the optimizer: record the loss, sync if one is due, and apply an overlapping average if due.

        Raises with nothing changed, except that an average of the sync before may have been applied.

        Args:
            loss: training loss of the step, if it was not recorded before.
            last_step: last step of the schedule, if it has one.

        Returns:
            Whether values changed: then :meth:`write` is due once the schedule has moved on.
        """
        self._check_step(last_step)
        checked = None if loss is None else checked_loss(loss, "the loss", self.ensemble.rows)
        self.steps.check(self.optimizer.param_groups, self.ensemble.rank)
        step = self.step + 1
        syncs = self.run.syncs_at(step)
        lands = self.overlapping is not None and (syncs or step >= self.overlapping.due)
        mark = self.window.mark() if syncs or lands else None
        if checked is not None:
            self.window.add(checked)
        self._check_losses()
        if mark is not None:
            try:
                returned = self._land(step)
                if syncs:
                    self._sync(step, acting=self._acting(step) and not returned)
            except BaseException:
                self.window.reset(mark)
                raise
        self.step = step
        self.averaged = syncs and self.overlapping is None
        self.steps.scheduler_stepped(self.optimizer.param_groups)
        if syncs:
            self.window.clear()
            self.steps.synced()
            self.fan_out()
        return mark is not None

    def _check_step(self, last_step: int | None) -> None:
        if self.replaced:
            raise RuntimeError(
                "the optimizer has another HDET scheduler now, or was released from this one: step the newest scheduler"
            )
        if self.in_consensus:
            raise RuntimeError("scheduler.step() inside scheduler.consensus(): the block is for evaluating and saving")
        if len(self.optimizer.param_groups) != self._group_count:
            raise RuntimeError(
                f"the optimizer has {len(self.optimizer.param_groups)} parameter groups, the scheduler was built for "
                f"{self._group_count}: build the scheduler after the last add_param_group()"
            )
        if last_step is not None and self.step >= last_step:
            raise ValueError(
                f"step {self.before + self.step + 1} is past the end: total_steps is {self.before + last_step}; stop "
                "there, or build the scheduler with the number of steps that you mean to make"
            )

    def _check_losses(self) -> None:
        """Raise if losses decide at a sync and none was ever recorded."""
        if self.probe is not None or self.window.ever:
            return
        record = (
            "none was recorded: call scheduler.step(loss), or scheduler.record_loss(loss) before scheduler.step() "
            "where a framework calls it bare; or pass probe="
        )
        if self.spread.reads_losses:
            name = type(self.spread.controller).__name__
            raise RuntimeError(f"{name} needs losses, and {record}, or auto_lr=False (fan-out and averaging only)")
        if self._takes_best:
            raise RuntimeError(f"merge='best' copies the replica whose loss is lowest, but {record}")

    def before_optimizer_step(self) -> None:
        """Read the parameters before the first step and the gradients before every step. A hook of the optimizer."""
        if not self.started:  # not at construction: weights may be loaded, or noise added, after that
            self.started = True
            self.converger.begin()
            if self.displacement is not None:
                self.displacement.begin()
            if self.undoing is not None:
                self.undoing.keep_start(self.run, self.step)
        self.averaged = False
        if self.expects_state:
            self._check_state()
        if self.displacement is not None:
            self.displacement.measure()
        if self.gradients == "auto" and self.ensemble.size > 1 and self.run.syncs_at(self.step + 1):
            self._fingerprint = fingerprint(self.optimizer.param_groups)

    def _check_state(self) -> None:
        """Warn, once after a checkpoint was loaded, if the optimizer's part of it did not arrive."""
        self.expects_state = False
        if not any(self.optimizer.state.values()):
            log.warning(
                "the scheduler was resumed at step %d, and the optimizer has no state, which it had there: its moments "
                "begin at zero. Load its state_dict() too. torch.distributed.checkpoint loads only into state that "
                "exists: take the optimizer's state_dict from torch.distributed.checkpoint.state_dict.get_state_dict",
                self.before + self.step,
            )

    # A sync

    def _sync(self, step: int, *, acting: bool) -> None:
        """Sync with the other replicas at the end of ``step``: average, or start an overlapping average.

        ``acting``: whether the controller acts on it.
        """
        placed = self.spread.placement()
        compares = (acting and self.spread.reads_losses) or self._takes_best
        report, failure = self._report(step, compares=compares)
        request = AverageRequest(
            average_state=self._average_state(),
            known_shared=self._known_shared(),
            needs_shared=self.displacement is not None and not self.spread.reads_losses,
            needs_loss=compares and self.probe is None,
            skip_if_equal=not self.spread.diverges,
        )
        with _caused_by(failure):
            try:
                if self.overlap_steps and step != self.run.total_steps:
                    average = self.converger.start(report, request)
                    self.overlapping = Overlapping(step, step + self.overlap_steps, placed, acting, average)
                    return
                outcome = self.converger.converge(report, request)
            except NoneSound as none:
                self._recover(step, step, placed, none)
                return
            self._finish_sync(step, step, placed, acting, outcome)

    def _report(self, step: int, *, compares: bool) -> tuple[Report, Exception | None]:
        """Return the report on the replicas held here, and the exception of the probe if it raised.

        The others wait in the collective and must learn of a failed probe. ``compares``: losses decide, so the probe
        runs.
        """
        probe, failure = self._run_probe() if compares else (None, None)
        settings = {"gradients": self.gradients, "average_state": self.average_state}
        report = Report(
            step,
            # A copy: the window goes on while an average overlaps.
            self.window.sum.clone() if isinstance(self.window.sum, Tensor) else self.window.sum,
            self.window.count,
            probe=probe,
            failed=failure is not None,
            gradients=self._fingerprint,
            settings={**self.config, **settings, "overlap_steps": self.overlap_steps},
            bases=self.spread.bases(),
            kept=self.undoing.kept if self.undoing else None,
            stepped=self.steps.since_sync if self.steps.counts else None,
        )
        return report, failure

    def _finish_sync(self, step: int, landed: int, placed: Placement, acting: bool, outcome: Outcome) -> int | None:
        """Let the controller act on the sync that followed ``step`` and was applied after ``landed``, and record it.

        Returns:
            The step of the earlier average that was taken again; None if there was no return.
        """
        slopes = self._turn(step, outcome.shared)
        self._look_at_losses(step, placed, outcome)
        undone, findings = None, None
        if acting:  # before anything is recorded, because a controller may raise
            seen = self.spread.observe(placed, outcome.compared, step, slopes)
            if self.undoing is None:
                self.spread.move(self.run, seen)
            else:
                undone = self.undoing.act(self.run, seen, outcome, landed=landed)
            findings = self._findings(seen)
        self.shared = outcome.shared
        self._record(step, landed, self._kind(step), placed, outcome, undone, findings)
        return undone

    def _look_at_losses(self, step: int, placed: Placement, outcome: Outcome) -> None:
        """Warn if losses that are compared were averaged before. The rows of a stack cannot be, by mistake."""
        if not (self.spread.reads_losses or self._takes_best) or self.ensemble.rows > 1:
            return
        if self.probe is None:
            self.equal_losses.look(step, outcome.losses, placed.values, "the training losses")
        else:
            self.equal_losses.look(step, outcome.probes, placed.values, "the losses on the probe")

    def _findings(self, seen: Observation) -> Findings | None:
        """Return slopes and posteriors for the record of the sync that the controller acted on, if it tells any."""
        controller = self.spread.controller
        if not isinstance(controller, ExplainingController):
            return None
        return controller.findings(self.run, self.spread.controller_state, seen)

    def _turn(self, step: int, shared: bool | None) -> MeasuredSlopes | None:
        """Return the slopes that were measured since the last sync, if gradients are shared; end it after the last."""
        if self.displacement is None:
            return None
        slopes = self.displacement.turn(self._of_all_parts if self.ensemble.parts > 1 else None)
        if not self.displacement.ended and (shared is False or not self._acts_after(step)):
            self.displacement.end()
        return None if shared is False else slopes

    def _of_all_parts(self, row: Tensor) -> Tensor:
        """Return the row of every process that holds a part of this replica, [parts, columns]. Collective."""
        ensemble = self.ensemble
        return ensemble.gather(row.expand(ensemble.rows, -1))[ensemble.replica]

    def _recover(self, step: int, landed: int, placed: Placement, none: NoneSound) -> None:
        """Return to the last sound average at a sync at which no replica is finite; raise ``none`` if there is none."""
        if self.undoing is None or not self.undoing.can_go_back(none.kept):
            raise none
        log.warning("%s", str(none).partition(". Nothing was")[0])
        slopes = self._turn(step, None)
        unknown = np.full(self.ensemble.size, np.nan)
        undone = self.undoing.go_back(self.run, self.spread.observe(placed, unknown, step, slopes))
        outcome = Outcome.of_none(none.agreement, handshake_cost(self.ensemble), 0.0)
        self._record(step, landed, self._kind(step), placed, outcome, undone)

    def _land(self, step: int) -> bool:
        """Apply the overlapping average, if there is one, at the end of ``step``. Return whether replicas returned."""
        if (overlapping := self.overlapping) is None:
            return False
        try:
            outcome = self.converger.land(overlapping.average, kept=self.undoing.kept if self.undoing else None)
        except NoneSound as none:
            self._recover(overlapping.step, step, overlapping.placed, none)
            self.overlapping = None
            self.window.clear()
            return True
        self.overlapping = None
        if not outcome.healthy[held(self.ensemble)].all():
            self.window.clear()  # these losses are of parameters that were not finite until now
        undone = self._finish_sync(overlapping.step, step, overlapping.placed, overlapping.acting, outcome)
        if undone is not None:
            self.window.clear()  # these losses are of what was undone
        return undone is not None

    # What a sync needs to know

    def _kind(self, step: int) -> Kind:
        return "sync" if step % self.run.sync_every == 0 else "early" if step in self.run.early else "last"

    @property
    def _takes_best(self) -> bool:
        return self.converger.merge == "best"

    def _acting(self, step: int) -> bool:
        return self.spread.controller is not None and self.spread.controller.active(self.run, step)

    def _acts_after(self, step: int) -> bool:
        return self.spread.controller is not None and self.run.acts_after(self.spread.controller, step)

    def _average_state(self) -> AverageState:
        if self.average_state != "auto":
            return self.average_state
        return "auto" if self.gradients == "auto" else self.gradients == "local"

    def _known_shared(self) -> bool | None:
        return self.shared if self.gradients == "auto" else self.gradients == "shared"

    def _run_probe(self) -> tuple[float | Tensor | None, Exception | None]:
        """Return the probe's loss, or its exception."""
        return (None, None) if self.probe is None else run_probe(self.probe, self.ensemble.rows)

    def _record(
        self,
        step: int,
        landed: int,
        kind: Kind,
        placed: Placement,
        outcome: Outcome,
        undone: int | None = None,
        findings: Findings | None = None,
    ) -> None:
        names = [hyper.name for hyper in self.spread.hyperparameters]
        excluded = np.flatnonzero(~outcome.healthy).tolist()
        if excluded and undone is None:
            log.warning("step %d: replicas %s were not finite; left out of the mean and given it", step, excluded)
        gradients: Literal["shared", "local", "unknown"]
        if self.gradients != "auto":
            gradients = self.gradients
        else:
            gradients = "unknown" if outcome.shared is None else "shared" if outcome.shared else "local"
        record = SyncRecord(
            step=self.before + step,
            cycle=(step - 1) // self.run.sync_every if kind != "manual" else self.number,
            kind=kind,
            losses=outcome.losses.tolist(),
            probes=None if np.isnan(outcome.probes).all() else outcome.probes.tolist(),
            base=dict(zip(names, placed.base.tolist(), strict=True)),
            values=dict(zip(names, placed.values.tolist(), strict=True)),
            excluded=excluded,
            gradients=gradients,
            bytes=outcome.bytes,
            collectives=outcome.collectives,
            seconds=outcome.seconds,
            landed=self.before + landed,
            taken=outcome.taken,
            undone=None if undone is None else self.before + undone,
            distance=outcome.distance,
            **(findings.by_name(names) if findings else {}),
        )
        self.add_record(record)

    def add_record(self, record: SyncRecord) -> None:
        """Append a record to the history, and to its file if there is one."""
        if self.history_file is not None:
            self.history_file.append(record, self.history)
        self.history.add(record)

    # Averages between syncs

    def converge(self) -> None:
        """Average all replicas now, wherever in the cycle; the cycle goes on.

        It differs from a sync in two ways: there is no outer step if no step was made since the last average, and
        without any loss ``merge="best"`` is the mean.
        """
        if self.in_consensus:
            raise RuntimeError("cannot average inside scheduler.consensus(): the parameters are averaged already")
        if self.overlapping is not None:
            self._land(self.step)
            self.write()
            self.publish()
        moved = self.started and self.history.last_step != self.before + self.step
        request = AverageRequest(
            "converge", average_state=self._average_state(), known_shared=self._known_shared(), outer=moved
        )
        report, failure = self._report(self.step, compares=self._takes_best)
        with _caused_by(failure):
            outcome = self.converger.converge(report, request)
        self.averaged = True
        self._record(self.step, self.step, "manual", self.spread.placement(), outcome)

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Hold the averaged parameters and buffers inside the block, and this replica's own again after it.

        An overlapping average stays under way: the sum of its corrections over the replicas is zero.
        """
        if self.in_consensus:
            raise RuntimeError(
                "scheduler.consensus() inside scheduler.consensus(): the parameters are averaged already"
            )
        report, failure = self._report(self.step, compares=self._takes_best)
        with _caused_by(failure), self.converger.consensus(report):
            self.in_consensus = True
            try:
                yield
            finally:
                self.in_consensus = False


@contextlib.contextmanager
def _caused_by(failure: Exception | None) -> Iterator[None]:
    """Make ``failure``, if there is one, the cause of a RuntimeError in the block."""
    try:
        yield
    except RuntimeError as error:
        if failure is None:
            raise
        raise error from failure


def plain_fields(controller: object) -> dict[str, Any]:
    """Return the fields of a dataclass as dicts, lists and numbers, as a checkpoint gives them back."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, tuple | list) else value

    if not dataclasses.is_dataclass(controller) or isinstance(controller, type):
        return {}
    fields: dict[str, Any] = plain(dataclasses.asdict(controller))
    return fields
