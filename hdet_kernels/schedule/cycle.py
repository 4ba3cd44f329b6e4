"""One cycle of HDET: fan out, train T steps, compare and average the replicas, let the controller move, and again.

The schedulers own a :class:`Cycle` and tell it two things: a step is finished (:meth:`Cycle.end_step`), and what the
schedule says now (:meth:`.Spread.rates`). It does not know how the schedule is computed. ``checkpoint.py`` saves and
restores it.

A sync reads top to bottom from :func:`sync` on: report on the replicas held here, average with the others (or start
to), move the base values or undo what broke, record it.
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

from hdet_kernels.controller.protocol import Findings, MeasuredSlopes, Run
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
from hdet_kernels.converge.handshake import handshake_cost
from hdet_kernels.ensemble import Ensemble, held
from hdet_kernels.fanout.spread import Placement, Spread
from hdet_kernels.optim.base import Pairs
from hdet_kernels.optim.foreign import has_modes, keeps_numbers, modes_of, same_modes
from hdet_kernels.schedule.acts import Act, Before, Progress, Return, explained, peaks_of
from hdet_kernels.schedule.arguments import GradientMode, Probe
from hdet_kernels.schedule.gradients import Displacement, Fingerprint
from hdet_kernels.schedule.guards import StepCount
from hdet_kernels.schedule.history import History, HistoryFile, Kind, SyncRecord
from hdet_kernels.schedule.losses import NONE_RECORDED, EqualLosses, Loss, LossWindow, checked_loss, run_probe
from hdet_kernels.schedule.undo.undoing import KeptStart, Undoing

log = logging.getLogger("hdet_kernels")

_ARRAYS = ("losses", "probes", "healthy")
_PLAIN = ("shared", "bytes", "collectives", "seconds", "kept", "distance")


@dataclass(frozen=True)
class Overlapping:
    """An average that runs beside the training, with all that the cycle needs when its result is applied."""

    step: int  # the step that its sync followed
    due: int  # the step after which it is applied
    placed: Placement  # what the replicas had trained with
    acting: bool  # whether the controller acts on it
    average: OverlappedAverage[Outcome]

    def state_dict(self, *, in_consensus: bool) -> dict[str, Any] | None:
        """Wait for the average and return it with its result; None if it failed.

        ``in_consensus``: the parameters that are saved with it are the average of all replicas.
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
        arrays = {name: np.array(state["outcome"][name]) for name in _ARRAYS}
        average = OverlappedAverage.landed(
            Correction.of(state["correction"]), Outcome(**{**state["outcome"], **arrays})
        )
        return Overlapping(state["step"], state["due"], Placement.of(state["placed"]), state["acting"], average)


@dataclass(eq=False, repr=False)
class Cycle:
    """The state of a run between and at its syncs, in this process.

    Attributes:
        window: the losses since the last sync.
        steps: the steps of scheduler and optimizer, which must go together.
        history: the records of syncs.
        shared: whether gradients were shared at the last sync; None: not known.
        overlapping: the average that runs beside the training, if there is one.
        displacement: measures slopes of the learning rates, if the controller reads them.
        undoing: the start of the run and returns to it, if the controller undoes what broke.
        origin: steps that were made before the schedule began again, because training broke; 0 before that.
        first: steps that the schedule had made when the run began.
        anchor: a step since the schedule began again, and the step of the whole schedule that it was at.
        whole: the run as it was at first; :attr:`run` is the one over the steps since then.
        fingerprint: of the gradients of the last step before a sync, which tells whether all replicas have the same.
        started: whether a step was made; the outer optimizer starts from the parameters before it.
        in_consensus: the parameters are the average now, and not this replica's own.
        averaged: no step was made since the last average.
        expects_state: a checkpoint was loaded whose optimizer had state.
        replaced: another scheduler was built on the optimizer.
    """

    optimizer: Optimizer  # the innermost one
    spread: Spread
    run: Run
    ensemble: Ensemble
    converger: Converger
    _: KW_ONLY
    probe: Probe | None
    gradients: GradientMode  # "auto": found out at every sync
    average_state: AverageState  # "auto": where gradients are local, or the state differs
    overlap_steps: int  # steps after a sync at which its average is applied; 0: at once
    step: int  # steps since the schedule began; at first those that it had made before
    schedule: str  # its name in checkpoints
    buffers: Callable[[], Sequence[Tensor]]  # returns those that are averaged
    history_file: HistoryFile | None = None
    before: int = 0  # steps that were made before step 0: those of a scouting phase

    def __post_init__(self) -> None:
        self.window = LossWindow(self.ensemble.rows)
        self.steps = StepCount()
        self.equal_losses = EqualLosses()
        self.history = History()
        self.shared: bool | None = None
        self.overlapping: Overlapping | None = None
        self.displacement = Displacement.of(self.optimizer, self.run, self.ensemble, tied=self.spread.tied)
        self.origin, self.whole = 0, self.run
        self._returned: Return | None = None  # in this step
        self.undoing = Undoing.of(self.optimizer, self.spread, self.converger, self.displacement, self.buffers)
        self.fingerprint: Tensor | None = None
        self._compared: Fingerprint | None = None
        self.started = self.in_consensus = self.expects_state = self.replaced = False
        self.averaged = True
        self.first = self.step
        self.anchor: tuple[int, float] = (0, self.first)
        self._group_count = len(self.optimizer.param_groups)
        self._write_hyperparameters: Callable[[], None] | None = getattr(self.optimizer, "write_hyperparameters", None)
        self.fan_out()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings, as plain values, that must be equal on all replicas and in a checkpoint that is loaded."""
        controller = self.spread.controller
        return {
            "schedule": self.schedule,
            "hyperparameters": self.spread.config(),
            "sync_every": self.run.sync_every,
            "total_steps": self.whole.total_steps,
            "seed": self.spread.seed,
            "controller": type(controller).__name__ if controller else None,
            "controller_constants": _plain_fields(controller),
            "probe": self.probe is not None,
            "outer": self.converger.settings()["outer"],
        }

    @property
    def made(self) -> int:
        """Steps of the schedule that were made in this run, those before its new beginning included."""
        return self.origin + self.step

    @property
    def offset(self) -> int:
        """Steps that were made before :attr:`step` counted."""
        return self.before + self.origin

    @property
    def first_process(self) -> bool:
        """Whether this process writes files, and calls callbacks that one process is to call."""
        return (self.ensemble.replica, self.ensemble.part) == (0, 0)

    @property
    def in_sync(self) -> bool:
        """Whether the parameters in this process are the average of all replicas now."""
        if self.in_consensus or self.averaged or self.ensemble.size == 1:
            return True
        # Replicas that were averaged once, and have equal values and gradients since then, stay equal, unless the
        # optimizer computes with state or numbers of its own that were not averaged.
        stays = not self.spread.diverges and self.known_shared is True and self.overlapping is None
        whole = self.average_state is not False and not keeps_numbers(self.optimizer)
        return stays and whole and self.history.last_step is not None

    @property
    def start(self) -> KeptStart | None:
        """The copy of the start, if the controller returns to it."""
        return None if self.undoing is None else self.undoing.start

    @property
    def begun(self) -> bool:
        """Whether a step was made, here or in the run of a checkpoint."""
        return self.started or self.made != self.first

    @property
    def known_shared(self) -> bool | None:
        return self.shared if self.gradients == "auto" else self.gradients == "shared"

    @property
    def takes_best(self) -> bool:
        """Whether all replicas become a copy of the best one at a sync."""
        return self.converger.merge == "best"

    # The values of the replicas

    def fan_out(self) -> None:
        """Give every replica its multipliers for the cycle that begins now."""
        self.spread.begin_cycle(self.run, self.step)
        self.fingerprint = None

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

    def before_optimizer_step(self) -> None:
        """Read the parameters before the first step. A hook of the optimizer, before every step."""
        if not self.started:  # not at construction: weights may be loaded, or noise added, after that
            self.started = True
            self.converger.begin()
            if self.displacement is not None:
                self.displacement.begin()
            if self.undoing is not None:
                self.undoing.keep_start(self.run, self.step)
        self.averaged = False
        if self.displacement is not None:
            self.displacement.begin_step()
        if self.expects_state:
            self._check_state()
        compares = self.gradients == "auto" and self.ensemble.size > 1 and self.run.syncs_at(self.step + 1)
        self._compared = Fingerprint() if compares else None

    def look(self, pairs: Pairs) -> None:
        """Read some of the gradients of a step, or all. A hook of the optimizer, before they are used."""
        if self._compared is not None:
            self._compared.look(pairs := list(pairs))
        if self.displacement is not None:
            self.displacement.look(pairs)

    def looked(self) -> None:
        """Note what all gradients of a step have shown. A hook of the optimizer, after every step."""
        if self.displacement is not None:
            self.displacement.looked()
        if self._compared is not None:
            self.fingerprint = self._compared.value(self.optimizer.param_groups)

    def record(self, loss: Loss, divided_by: float = 1) -> None:
        """Add a training loss, which was divided by ``divided_by`` before."""
        self.window.record(loss, divided_by)

    def end_step(self, loss: Loss | None, last_step: int | None) -> bool:
        """End a step of the optimizer: record the loss, sync if one is due, and apply an overlapping average if due.

        Raises with nothing changed, except that an average of the sync before may have been applied. ``last_step`` is
        that of the schedule, if it has one. Returns whether values changed: then :meth:`write` is due once the schedule
        has moved on.
        """
        self._check_step(last_step)
        checked = None if loss is None else checked_loss(loss, "the loss", self.ensemble.rows)
        self.steps.check(self.ensemble.rank)
        step = self.step + 1
        syncs = self.run.syncs_at(step)
        applies = self.overlapping is not None and (syncs or step >= self.overlapping.due)
        mark = self.window.mark() if syncs or applies else None
        if checked is not None:
            self.window.add(checked)
        self._check_losses()
        if mark is not None:
            try:
                returned = apply_overlapping(self, step)
                if syncs and not returned:
                    sync(self, step, acting=self._acts(step))
            except BaseException:
                self.window.reset(mark)
                raise
        self.step = step
        begins = self._begin_anew()
        self.averaged = syncs and self.overlapping is None
        self.steps.scheduler_stepped()
        if syncs or begins:
            self.window.clear()
            self.steps.synced()
            self.fan_out()
        if self.step == self.run.total_steps and self.spread.controller is not None and self.first_process:
            log.info("the run ended: %s", self.history.summary.outcome())
        return mark is not None

    def _begin_anew(self) -> bool:
        """Begin the run after this step, over those that remain, if the replicas returned to the start.

        If they went back to before a trial, the run goes on there.
        """
        if self._returned is None:
            return False
        to, made = self._returned.to, self.made
        self.run, self.anchor = self._returned.run, (0, self.first) if to is None else (to.step, to.position)
        self.step, self._returned = self.anchor[0], None
        self.origin = made - self.step
        return True

    @property
    def position(self) -> float:
        """The step of the schedule, as a fraction of a step where it began again over fewer steps than it has."""
        return self._position_at(self.step)

    @property
    def went_back_to_first(self) -> bool:
        """Whether the run went back, after a trial, to what had never begun again."""
        at, position = self.anchor
        return 0 < at == position

    def _position_at(self, step: int) -> float:
        whole, left = self.whole.total_steps, self.run.total_steps
        if not self.origin or whole is None or left is None:
            return self.origin + step
        at, position = self.anchor
        return min(position + (step - at) * (whole - 1 - position) / (left - 1 - at), whole)

    def progress_at(self, step: int) -> Progress:
        """Return how far the run has come after ``step``, with the state of its controller."""
        return Progress(self.origin, step, self._position_at(step), self.run, self.spread.controller_state)

    def _acts(self, step: int) -> bool:
        return self.spread.controller is not None and self.spread.controller.active(self.run, step)

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
        if last_step is not None and self.made >= last_step:
            raise ValueError(
                f"step {self.before + self.made + 1} is past the end: total_steps is {self.before + last_step}; stop "
                "there, or build the scheduler with the number of steps that you mean to make"
            )

    def _check_losses(self) -> None:
        """Raise if losses decide at a sync and none was ever recorded."""
        if self.probe is not None or self.window.ever:
            return
        if self.spread.reads_losses:
            name = type(self.spread.controller).__name__
            raise RuntimeError(
                f"{name} needs losses, and {NONE_RECORDED}, or auto_lr=False (fan-out and averaging only)"
            )
        if self.takes_best:
            raise RuntimeError(f"merge='best' copies the replica whose loss is lowest, but {NONE_RECORDED}")

    def _check_state(self) -> None:
        """Warn, once after a checkpoint was loaded, if the optimizer's part of it did not arrive."""
        self.expects_state = False
        if not any(self.optimizer.state.values()):
            log.warning(
                "the scheduler was resumed at step %d, and the optimizer has no state, which it had there: its moments "
                "begin at zero. Load its state_dict() too. torch.distributed.checkpoint loads only into state that "
                "exists: take the optimizer's state_dict from torch.distributed.checkpoint.state_dict.get_state_dict",
                self.before + self.made,
            )

    # Averages between syncs

    def converge(self) -> bool:
        """Average all replicas now. Return whether the run begins anew: an overlapping average showed that it broke.

        It differs from a sync in two ways: there is no outer step if no step was made since the last average, and
        without any loss ``merge="best"`` is the mean.
        """
        if self.apply_now():
            return True
        moved = self.started and self.history.last_step != self.before + self.made
        state = self.average_state
        request = AverageRequest("converge", average_state=state, known_shared=self.known_shared, outer=moved)
        report, failure = _report(self, self.step, compares=self.takes_best)
        with _caused_by(failure):
            outcome = self.converger.converge(report, request)
        self.averaged = True
        _record(self, self.step, self.step, "manual", self.spread.placement(), outcome)
        return False

    def apply_now(self) -> bool:
        """Apply the overlapping average, if there is one. Return whether the run begins anew."""
        if self.in_consensus:
            raise RuntimeError("cannot average inside scheduler.consensus(): the parameters are averaged already")
        if self.overlapping is None:
            return False
        apply_overlapping(self, self.step)
        if begins := self._begin_anew():
            self.window.clear()
            self.steps.synced()
            self.fan_out()
        self.write()
        self.publish()
        return begins

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Hold the averaged parameters and buffers inside the block, and this replica's own again after it.

        An overlapping average stays under way: the sum of its corrections over the replicas is zero.
        """
        if self.in_consensus:
            raise RuntimeError(
                "scheduler.consensus() inside scheduler.consensus(): the parameters are averaged already"
            )
        report, failure = _report(self, self.step, compares=self.takes_best)
        with_state = has_modes(self.optimizer)  # from which eval() inside the block computes the weights
        averaged = self.converger.consensus(report, with_state=with_state)
        with _caused_by(failure), averaged, same_modes(self.optimizer):
            self.in_consensus = True
            try:
                yield
            finally:
                self.in_consensus = False

    def add_record(self, record: SyncRecord) -> None:
        """Append a record to the history, and to its file if there is one."""
        if self.history_file is not None:
            self.history_file.append(record, self.history)
        self.history.add(record)


def sync(cycle: Cycle, step: int, *, acting: bool) -> None:
    """Sync with the other replicas at the end of ``step``: average, or start an overlapping average.

    ``acting``: whether the controller acts on it.
    """
    placed = cycle.spread.placement()
    compares = (acting and cycle.spread.reads_losses) or cycle.takes_best
    report, failure = _report(cycle, step, compares=compares)
    measured: list[Tensor | None] = []
    request = AverageRequest(
        average_state=cycle.average_state,
        known_shared=cycle.known_shared,
        needs_shared=cycle.displacement is not None and not cycle.spread.reads_losses,
        needs_loss=compares and cycle.probe is None,
        skip_if_equal=not cycle.spread.diverges,
        agreed=lambda: measured.append(_measured_by_parts(cycle)),
    )
    with _caused_by(failure):
        try:
            if cycle.overlap_steps and step != cycle.run.total_steps:
                average = cycle.converger.start(report, request)
                cycle.overlapping = Overlapping(step, step + cycle.overlap_steps, placed, acting, average)
                return
            outcome = cycle.converger.converge(report, request)
        except NoneSound as none:
            _recover(cycle, step, step, placed, none)
            return
        _finish(cycle, step, step, placed, acting, outcome, measured[0])


def apply_overlapping(cycle: Cycle, step: int) -> bool:
    """Apply the overlapping average, if there is one, at the end of ``step``. Return whether replicas returned."""
    if (overlapping := cycle.overlapping) is None:
        return False
    measured = _measured_by_parts(cycle)
    try:
        outcome = cycle.converger.land(overlapping.average, kept=cycle.undoing.kept if cycle.undoing else None)
    except NoneSound as none:
        _recover(cycle, overlapping.step, step, overlapping.placed, none)
        cycle.overlapping = None
        cycle.window.clear()
        return True
    cycle.overlapping = None
    if not outcome.healthy[held(cycle.ensemble)].all():
        cycle.window.clear()  # these losses are of parameters that were not finite until now
    returned = _finish(cycle, overlapping.step, step, overlapping.placed, overlapping.acting, outcome, measured)
    if returned:
        cycle.window.clear()  # these losses are of what was undone
    return returned


# The parts of a sync


def _report(cycle: Cycle, step: int, *, compares: bool) -> tuple[Report, Exception | None]:
    """Return the report on the replicas held here, and the exception of the probe if it raised.

    The others wait in the collective and must learn of a failed probe. ``compares``: losses decide, so the probe runs.
    """
    runs = compares and cycle.probe is not None
    probe, failure = run_probe(cycle.probe, cycle.ensemble.rows) if runs and cycle.probe else (None, None)
    settings = {"gradients": cycle.gradients, "average_state": cycle.average_state, **modes_of(cycle.optimizer)}
    report = Report(
        step,
        # A copy: the window goes on while an average overlaps.
        cycle.window.sum.clone() if isinstance(cycle.window.sum, Tensor) else cycle.window.sum,
        cycle.window.count,
        probe=probe,
        failed=failure is not None,
        gradients=cycle.fingerprint,
        settings={**cycle.config, **settings, "overlap_steps": cycle.overlap_steps},
        bases=cycle.spread.bases(),
        kept=cycle.undoing.kept if cycle.undoing else None,
        stepped=cycle.steps.since_sync if cycle.steps.counts else None,
    )
    return report, failure


def _measured_by_parts(cycle: Cycle) -> Tensor | None:
    """Return what each process that holds a part of this replica has measured, [parts, columns]. Collective.

    None where one process holds a whole replica, or nothing is measured.
    """
    ensemble = cycle.ensemble
    if cycle.displacement is None or ensemble.parts == 1:
        return None
    return ensemble.gather(cycle.displacement.row().expand(ensemble.rows, -1))[ensemble.replica]


def _finish(
    cycle: Cycle,
    step: int,
    applied: int,
    placed: Placement,
    acting: bool,
    outcome: Outcome,
    measured: Tensor | None,
) -> bool:
    """Let the controller act on the sync that followed ``step`` and was applied after ``applied``, and record it.

    ``measured``: what :func:`_measured_by_parts` returned before anything was averaged.

    Returns:
        Whether the replicas returned to the start.
    """
    slopes = _measured_slopes(cycle, outcome.shared, measured)
    _warn_of_equal_losses(cycle, step, placed, outcome)
    undone, findings, act = None, None, None
    if acting:  # before anything is recorded, because a controller may raise
        seen, before = cycle.spread.observe(placed, outcome.compared, step, slopes), Before.of(cycle.spread)
        if cycle.undoing is None:
            cycle.spread.move(cycle.run, seen)
        else:
            undone = cycle.undoing.act(cycle.progress_at(applied), seen, outcome, landed=applied)
        findings, act = explained(cycle.spread, cycle.run, before, seen, undone, offset=cycle.offset)
    cycle.shared = outcome.shared
    if undone is None:
        _stop_measuring(cycle, step)
    _record(cycle, step, applied, _kind(cycle, step), placed, outcome, undone, findings, act)
    return undone is not None


def _measured_slopes(cycle: Cycle, shared: bool | None, measured: Tensor | None) -> MeasuredSlopes | None:
    """Return the slopes that were measured since the last sync, if gradients are shared."""
    if cycle.displacement is None:
        return None
    slopes = cycle.displacement.turn(measured)
    if shared is False and not cycle.displacement.ended:
        cycle.displacement.end()
    return None if shared is False else slopes


def _stop_measuring(cycle: Cycle, step: int) -> None:
    """Measure no slopes after the last sync at which the controller acts, or at which replicas differ in a rate."""
    controller, run = cycle.spread.controller, cycle.run
    steps = [steps for steps, peak in zip(run.departs, run.peaks, strict=False) if peak is not None]
    differ = not run.departs or any(between is None or step < between[1] for between in steps)
    acts_later = controller is not None and differ and run.acts_after(controller, step)
    if cycle.displacement is not None and not cycle.displacement.ended and not acts_later:
        cycle.displacement.end()


def _warn_of_equal_losses(cycle: Cycle, step: int, placed: Placement, outcome: Outcome) -> None:
    """Warn if losses that are compared were averaged before. The rows of a stack cannot be, by mistake."""
    if not (cycle.spread.reads_losses or cycle.takes_best) or cycle.ensemble.rows > 1:
        return
    if cycle.probe is None:
        cycle.equal_losses.check(step, outcome.losses, placed.values, "the training losses")
    else:
        cycle.equal_losses.check(step, outcome.probes, placed.values, "the losses on the probe")


def _recover(cycle: Cycle, step: int, applied: int, placed: Placement, none: NoneSound) -> None:
    """Return to the start at a sync at which no replica is finite; raise ``none`` if that is not possible."""
    if cycle.undoing is None or not cycle.undoing.can_go_back(none.kept, cycle.run, applied):
        raise none
    slopes = _measured_slopes(cycle, None, _measured_by_parts(cycle))
    unknown, before = np.full(cycle.ensemble.size, np.nan), Before.of(cycle.spread)
    seen = cycle.spread.observe(placed, unknown, step, slopes)
    undone = cycle.undoing.go_back(cycle.run, seen, landed=applied)
    cause = f"no replica is sound; not finite: {none.found}"
    findings, act = explained(cycle.spread, cycle.run, before, seen, undone, offset=cycle.offset, cause=cause)
    outcome = Outcome.of(none.agreement, None, handshake_cost(cycle.ensemble), 0.0)
    _record(cycle, step, applied, _kind(cycle, step), placed, outcome, undone, findings, act)


def _kind(cycle: Cycle, step: int) -> Kind:
    return "sync" if step % cycle.run.sync_every == 0 else "early" if step in cycle.run.early else "last"


def _record(
    cycle: Cycle,
    step: int,
    applied: int,
    kind: Kind,
    placed: Placement,
    outcome: Outcome,
    undone: Return | None = None,
    findings: Findings | None = None,
    act: Act | None = None,
) -> None:
    names = [hyper.name for hyper in cycle.spread.hyperparameters]
    record = SyncRecord.of(
        outcome,
        placed,
        names,
        step=cycle.offset + step,
        cycle=(cycle.origin + max(step - (kind != "manual"), 0)) // cycle.run.sync_every,
        kind=kind,
        gradients=cycle.gradients,
        landed=cycle.offset + applied,
        undone=None if undone is None else cycle.offset,
        findings=findings,
        act=act,
        peaks=peaks_of(cycle.spread, cycle.run, names),
    )
    cycle._returned = undone
    if cycle.first_process:
        if (bad := record.excluded) and undone is None:
            log.warning("step %d: replicas %s were not finite; left out of the mean and given it", record.step, bad)
        if act is not None:
            act.log()
    cycle.add_record(record)


@contextlib.contextmanager
def _caused_by(failure: Exception | None) -> Iterator[None]:
    """Make ``failure``, if there is one, the cause of a RuntimeError in the block."""
    try:
        yield
    except RuntimeError as error:
        if failure is None:
            raise
        raise error from failure


def _plain_fields(controller: object) -> dict[str, Any]:
    """Return the fields of a dataclass that checkpoints compare, with lists in the places of tuples."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, tuple | list) else value

    if not dataclasses.is_dataclass(controller) or isinstance(controller, type):
        return {}
    found: dict[str, Any] = plain(dataclasses.asdict(controller))
    return {each.name: found[each.name] for each in dataclasses.fields(controller) if each.metadata.get("saved", True)}
