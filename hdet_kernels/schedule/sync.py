"""The syncs of a run: average the replicas, let the controller move the base values, record what happened.

A sync reads top to bottom, from :meth:`Syncing.sync`: report on the replicas held here, average with the others (or
start to), move the base values or undo what broke, record it. :class:`.Cycle` decides when one is due.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.controller.protocol import ExplainingController, Findings, MeasuredSlopes, Observation, Run
from hdet_kernels.converge import (
    AverageRequest,
    AverageState,
    Converger,
    Correction,
    NoneSound,
    Outcome,
    OverlappedAverage,
    Report,
)
from hdet_kernels.converge.averaging import handshake_cost
from hdet_kernels.ensemble import Ensemble, held
from hdet_kernels.fanout.spread import Placement, Spread
from hdet_kernels.schedule.arguments import GradientMode, Probe
from hdet_kernels.schedule.gradients import Displacement
from hdet_kernels.schedule.guards import StepCount
from hdet_kernels.schedule.history import History, HistoryFile, Kind, SyncRecord
from hdet_kernels.schedule.losses import EqualLosses, LossWindow, run_probe
from hdet_kernels.schedule.undo.undoing import Undoing

log = logging.getLogger("hdet_kernels")


@dataclass(eq=False, repr=False)
class Syncing:
    """Everything that a sync of this process reads and changes.

    Args:
        optimizer: the innermost one.
        spread: the values of all replicas.
        run: the facts of the run, and the controller's wishes.
        ensemble: the replicas.
        converger: averages them.
        probe: the loss of this replica on a batch that is the same for all, if replicas are compared by one.
        gradients: whether replicas share their gradients; ``"auto"``: found out at every sync.
        average_state: whether the optimizer's state is averaged too; ``"auto"``: where gradients are local.
        overlap_steps: steps after a sync at which its average is applied; 0: at once.
        step: steps that the schedule has made.
        schedule: its name in checkpoints.
        buffers: returns the buffers that are averaged.
        history_file: the file that gets a line for every record, if there is one.
        before: steps that were made before step 0: those of a scouting phase.

    Attributes:
        window: the losses since the last sync.
        steps: the steps of scheduler and optimizer, which must go together.
        history: the records of syncs.
        shared: whether gradients were shared at the last sync; None: not known.
        overlapping: the average that runs beside the training, if there is one.
        displacement: measures slopes of the learning rates, if the controller reads them.
        undoing: the last sound average and returns to it, if the controller undoes what broke.
    """

    optimizer: Optimizer
    spread: Spread
    run: Run
    ensemble: Ensemble
    converger: Converger
    _: KW_ONLY
    probe: Probe | None
    gradients: GradientMode
    average_state: AverageState
    overlap_steps: int
    step: int
    schedule: str
    buffers: Callable[[], Sequence[Tensor]]
    history_file: HistoryFile | None = None
    before: int = 0

    def __post_init__(self) -> None:
        self.window = LossWindow(self.ensemble.rows)
        self.steps = StepCount()
        self.equal_losses = EqualLosses()
        self.history = History()
        self.shared: bool | None = None
        self.overlapping: Overlapping | None = None
        self.displacement = Displacement.of(self.optimizer, self.run, self.ensemble, tied=self.spread.tied)
        self.undoing = Undoing.of(self.optimizer, self.spread, self.converger, self.displacement, self.buffers)
        self._fingerprint: Tensor | None = None

    @property
    def number(self) -> int:
        """The number of the current cycle, from 0."""
        return self.step // self.run.sync_every

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

    def sync(self, step: int, *, acting: bool) -> None:
        """Sync with the other replicas at the end of ``step``: average, or start an overlapping average.

        ``acting``: whether the controller acts on it.
        """
        placed = self.spread.placement()
        compares = (acting and self.spread.reads_losses) or self._takes_best
        report, failure = self._report(step, compares=compares)
        measured: list[Tensor | None] = []
        request = AverageRequest(
            average_state=self._average_state(),
            known_shared=self._known_shared(),
            needs_shared=self.displacement is not None and not self.spread.reads_losses,
            needs_loss=compares and self.probe is None,
            skip_if_equal=not self.spread.diverges,
            agreed=lambda: measured.append(self._measured_by_parts()),
        )
        with caused_by(failure):
            try:
                if self.overlap_steps and step != self.run.total_steps:
                    average = self.converger.start(report, request)
                    self.overlapping = Overlapping(step, step + self.overlap_steps, placed, acting, average)
                    return
                outcome = self.converger.converge(report, request)
            except NoneSound as none:
                self._recover(step, step, placed, none)
                return
            self._finish_sync(step, step, placed, acting, outcome, measured[0])

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

    def _finish_sync(
        self, step: int, landed: int, placed: Placement, acting: bool, outcome: Outcome, measured: Tensor | None
    ) -> int | None:
        """Let the controller act on the sync that followed ``step`` and was applied after ``landed``, and record it.

        ``measured``: what :meth:`_measured_by_parts` returned before anything was averaged.

        Returns:
            The step of the earlier average that was taken again; None if there was no return.
        """
        slopes = self._turn(step, outcome.shared, measured)
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

    def _turn(self, step: int, shared: bool | None, measured: Tensor | None) -> MeasuredSlopes | None:
        """Return the slopes that were measured since the last sync, if gradients are shared; end it after the last."""
        if self.displacement is None:
            return None
        slopes = self.displacement.turn(measured)
        if not self.displacement.ended and (shared is False or not self._acts_after(step)):
            self.displacement.end()
        return None if shared is False else slopes

    def _measured_by_parts(self) -> Tensor | None:
        """Return what each process that holds a part of this replica has measured, [parts, columns]. Collective.

        None where one process holds a whole replica, or nothing is measured.
        """
        ensemble = self.ensemble
        if self.displacement is None or ensemble.parts == 1:
            return None
        return ensemble.gather(self.displacement.row().expand(ensemble.rows, -1))[ensemble.replica]

    def _recover(self, step: int, landed: int, placed: Placement, none: NoneSound) -> None:
        """Return to the last sound average at a sync at which no replica is finite; raise ``none`` if there is none."""
        if self.undoing is None or not self.undoing.can_go_back(none.kept):
            raise none
        log.warning("%s", str(none).partition(". Nothing was")[0])
        slopes = self._turn(step, None, self._measured_by_parts())
        unknown = np.full(self.ensemble.size, np.nan)
        undone = self.undoing.go_back(self.run, self.spread.observe(placed, unknown, step, slopes))
        outcome = Outcome.of_none(none.agreement, handshake_cost(self.ensemble), 0.0)
        self._record(step, landed, self._kind(step), placed, outcome, undone)

    def land(self, step: int) -> bool:
        """Apply the overlapping average, if there is one, at the end of ``step``. Return whether replicas returned."""
        if (overlapping := self.overlapping) is None:
            return False
        measured = self._measured_by_parts()
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
        undone = self._finish_sync(overlapping.step, step, overlapping.placed, overlapping.acting, outcome, measured)
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
        record = SyncRecord.of(
            outcome,
            placed,
            [hyper.name for hyper in self.spread.hyperparameters],
            step=self.before + step,
            cycle=(step - 1) // self.run.sync_every if kind != "manual" else self.number,
            kind=kind,
            gradients=self.gradients,
            landed=self.before + landed,
            undone=None if undone is None else self.before + undone,
            findings=findings,
        )
        if record.excluded and undone is None:
            log.warning(
                "step %d: replicas %s were not finite; left out of the mean and given it", step, record.excluded
            )
        self.add_record(record)

    def add_record(self, record: SyncRecord) -> None:
        """Append a record to the history, and to its file if there is one."""
        if self.history_file is not None:
            self.history_file.append(record, self.history)
        self.history.add(record)


@contextlib.contextmanager
def caused_by(failure: Exception | None) -> Iterator[None]:
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


_ARRAYS = ("losses", "probes", "healthy")
_PLAIN = ("shared", "bytes", "collectives", "seconds", "kept", "distance")


@dataclass(frozen=True)
class Overlapping:
    """An average under way.

    Args:
        step: the step that its sync followed.
        due: the step after which it is applied.
        placed: what the replicas had trained with.
        acting: whether the controller acts on it.
        average: the average itself.
    """

    step: int
    due: int
    placed: Placement
    acting: bool
    average: OverlappedAverage[Outcome]

    def state_dict(self, *, in_consensus: bool) -> dict[str, Any] | None:
        """Wait for the average and return it with its result; None if it failed.

        Args:
            in_consensus: whether the parameters that are saved with it are the average of all replicas.
        """
        if self.average.failed:
            return None
        correction, outcome = self.average.wait()
        if in_consensus:
            correction = correction.of_the_consensus()
        plain = {name: getattr(outcome, name) for name in _PLAIN}
        arrays = {name: getattr(outcome, name).tolist() for name in _ARRAYS}
        return {
            "step": self.step,
            "due": self.due,
            "placed": self.placed.state_dict(),
            "acting": self.acting,
            "correction": correction.state_dict(),
            "outcome": {**plain, **arrays},
        }

    @staticmethod
    def of(state: dict[str, Any]) -> Overlapping:
        """Return the average that :meth:`state_dict` saved; it has arrived already."""
        arrays = {name: np.array(state["outcome"][name]) for name in _ARRAYS}
        average = OverlappedAverage.landed(
            Correction.of(state["correction"]), Outcome(**{**state["outcome"], **arrays})
        )
        return Overlapping(state["step"], state["due"], Placement.of(state["placed"]), state["acting"], average)
