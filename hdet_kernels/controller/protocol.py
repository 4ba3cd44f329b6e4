"""The interface between the scheduler and a controller: a description of the run, an observation, and a protocol.

A controller turns the losses and values of all replicas into new base values. It is a frozen dataclass of constants
with a few pure functions of numbers. Its state is a dict of plain lists that the scheduler keeps and saves.

1. :meth:`Controller.prepare` receives the :class:`Run` and returns it with the controller's wishes: extra syncs in the
   first cycle, replicas that come in pairs, and the steps between which replicas differ.
2. At every sync for which :meth:`Controller.active` is true, :meth:`Controller.update` returns the next state from an
   :class:`Observation`.
3. :meth:`Controller.base` turns the state and the scheduled value into the base value η_j that is fanned out.

An :class:`UndoingController` also judges every sync at which it acts. Where training broke, all replicas return to the
start of the run, and the schedule begins again over the steps that remain. A :class:`TryingController` can do the same
as a trial, and go back to where it was. An :class:`ExplainingController` tells what
it found and why it moved, for records, logs and reports; nothing depends on that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hdet_kernels.checks import check_choice, check_share, check_steps, spell

Array = NDArray[np.float64]
State = dict[str, Any]

#: Tolerance, in steps, for shares of a run that become steps: the product 0.29·100 is a little less than 29.
STEP_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Run:
    """A run as a controller sees it. Tuples have one entry for each hyperparameter, in the scheduler's order.

    Facts that the scheduler gives:

    Args:
        total_steps: length of the run in steps; None if it is not known.
        sync_every: steps between two syncs.
        peak: share of the run at which the schedule peaks.
        floors: values that the schedule ends at; None where the schedule does not say.
        peaks: highest value of the schedule; None for what has no peak to move (weight decay, dropout, a frozen group,
            a learning rate without spread where losses are compared).
        end: share of its peak at which the schedule ends: 0 if it anneals, 1 if it is constant.
        probed: whether the losses come from a probe, which sees the same examples at every sync.
        gradients: ``"shared"``, ``"local"``, or ``"auto"``: found out at every sync.
        reach: lowest and highest logarithm of the factor by which bounds let a base value change. Empty: no bounds.
        others: whether scalars besides learning rates are explored.
        overlaps: whether averages land some steps after their sync, so that nobody knows a cycle's displacement.

    Wishes of the controller, set by :meth:`Controller.prepare`:

    Args:
        early: steps of the first cycle that also have a sync, ascending.
        in_pairs: whether every replica departs from the base values in at most one hyperparameter.
        departs: for each hyperparameter the steps (first, last) between which replicas differ in it; None: always.
            Empty: always, for all of them.
        slopes: whether the slopes of learning rates are measured from gradients, see :attr:`Observation.slopes`.
    """

    total_steps: int | None
    sync_every: int
    peak: float
    floors: tuple[float | None, ...]
    peaks: tuple[float | None, ...] = ()
    end: float = 0.0
    probed: bool = True
    gradients: Literal["auto", "shared", "local"] = "auto"
    reach: tuple[tuple[float, float], ...] = ()
    others: bool = False
    overlaps: bool = False
    early: tuple[int, ...] = ()
    in_pairs: bool = False
    departs: tuple[tuple[int, int] | None, ...] = ()
    slopes: bool = False

    def __post_init__(self) -> None:
        if self.total_steps is not None:
            check_steps("total_steps", self.total_steps)
        check_steps("sync_every", self.sync_every)
        check_share("peak", self.peak)
        check_choice("gradients", self.gradients, ("auto", "shared", "local"))

    @property
    def moves_rates(self) -> bool:
        """Whether there is a learning rate whose peak can be moved."""
        return any(peak is not None for peak in self.peaks)

    def syncs(self, first: float, last: float) -> int:
        """Count the regular syncs (multiples of ``sync_every``) on steps ``first`` to ``last``, both included."""
        first_sync = max(math.ceil((first - STEP_TOLERANCE) / self.sync_every), 1)
        return max(math.floor((last + STEP_TOLERANCE) / self.sync_every) - first_sync + 1, 0)

    def syncs_at(self, step: int) -> bool:
        """Return whether a sync follows ``step``."""
        return step % self.sync_every == 0 or step in self.early or step == self.total_steps

    def syncs_before(self, step: int) -> int:
        """Count the syncs up to ``step``, regular and early ones, without the one at the end of the run."""
        return step // self.sync_every + sum(early <= step for early in self.early)

    def departs_at(self, step: int) -> tuple[bool, ...] | None:
        """Return in which hyperparameters replicas differ in the cycle that begins after ``step``; None: in all."""
        if not self.departs:
            return None
        return tuple(steps is None or steps[0] <= step < steps[1] for steps in self.departs)

    def acts_after(self, controller: Controller, step: int) -> bool:
        """Return whether the controller acts at a sync after ``step``; True if the length of the run is not known."""
        if self.total_steps is None:
            return True
        regular = range((step // self.sync_every + 1) * self.sync_every, self.total_steps + 1, self.sync_every)
        later = itertools.chain(self.early, regular, (self.total_steps,))
        return any(controller.active(self, sync) for sync in later if sync > step)

    def rest(self, step: int) -> Run:
        """Return the run that begins again after ``step``, over the steps that remain. The controller prepares it."""
        left = None if self.total_steps is None else self.total_steps - step
        return replace(self, total_steps=left, early=(), in_pairs=False, departs=())

    def steps_since_sync(self, step: int) -> int:
        """Return the number of steps of the cycle that ends with ``step``."""
        before = max((early for early in self.early if early < step), default=0)
        return step - max(before, (step - 1) // self.sync_every * self.sync_every)


@dataclass(frozen=True)
class MeasuredSlopes:
    """Slopes of the loss in the logarithms of the groups' learning rates: means over some steps, and their errors."""

    values: list[float]
    errors: list[float]


@dataclass(frozen=True)
class Observation:
    """One sync, seen before the replicas are averaged. N replicas, J hyperparameters.

    Args:
        losses: [N], loss of each replica on the probe, or mean training loss since the last sync. Not finite where a
            replica is bad.
        multipliers: [J, N], value over base of each replica in the cycle that ends here.
        base: [J], base values η_j at this step.
        step: the step that the sync follows.
        slopes: [J], ⟨gradient, displacement of the cycle before⟩, the mean over the first steps of this cycle: the
            slope of the loss in the logarithm of that cycle's learning rate. 0 for other scalars. None where it is not
            measured or not known: no wish for it, local gradients, the first cycle.
        errors: [J], standard errors of these means; NaN where there is only one step.
    """

    losses: Array
    multipliers: Array
    base: Array
    step: int
    slopes: Array | None = None
    errors: Array | None = None


@runtime_checkable
class Controller(Protocol):
    """The methods that a scheduler calls on its controller. ``docs/extending.md`` shows a small one.

    A controller should be a frozen dataclass: its fields, nested dataclasses included, are saved in checkpoints, and a
    run that resumes under other values raises.
    """

    @property
    def reads(self) -> Literal["losses", "slopes"]:
        """Which observation it needs: the replicas' losses, or the hypergradient's slopes."""

    def prepare(self, run: Run) -> Run:
        """Return ``run`` with the controller's wishes (``early``, ``in_pairs``, ``departs``).

        Raises:
            ValueError: if the controller cannot work in this run.
        """

    def active(self, run: Run, step: int) -> bool:
        """Return whether the sync after ``step`` updates the state."""

    def start(self, count: int, run: Run | None = None) -> State:
        """Return the state before the first update, for ``count`` hyperparameters."""

    def update(self, run: Run, state: State, seen: Observation) -> State:
        """Return the state after a sync."""

    def base(self, state: State, index: int, scheduled: Any) -> Any:
        """Return the base value of hyperparameter ``index`` where the schedule says ``scheduled``."""


@runtime_checkable
class UndoingController(Controller, Protocol):
    """A controller that can have a run begin anew. Others never undo anything."""

    @property
    def undo(self) -> int:
        """The most returns to the start in a run. 0: it is not kept, and neither of the methods below is called."""

    def broke(self, run: Run, state: State, seen: Observation) -> bool:
        """Return whether training broke at a sync, before :meth:`update` or :meth:`begun_anew` is called."""

    def begun_anew(self, run: Run, state: State, seen: Observation) -> State:
        """Return the state with which the run begins anew, over the steps that remain: with lower learning rates.

        It is called in the place of :meth:`update`, also at a sync at which no replica is finite: then all losses are
        NaN, :meth:`broke` was not called, and :meth:`active` may be false.

        Args:
            run: the run that broke; :meth:`Run.rest` is the one that begins.
            state: the state before.
            seen: the sync.
        """


@runtime_checkable
class TryingController(UndoingController, Protocol):
    """A controller that can try a lower learning rate where it doubts the present one, and go back to where it was.

    A trial is a return to the start. What was reached before it is kept until the trial ends. ``state["trial"]`` is not
    None while one is under way: then :meth:`UndoingController.broke` may end it too, and nothing goes back.
    """

    def doubts(self, run: Run, state: State, seen: Observation) -> bool:
        """Return whether a trial begins after this sync; asked with the state before it, where nothing broke."""

    def tried(self, run: Run, state: State, seen: Observation) -> State:
        """Return the state with which the trial begins, over the steps that remain."""

    def worse(self, run: Run, state: State, seen: Observation) -> bool:
        """Return whether the trial ends here because it is no better: all goes back to where it was before it.

        Where it ends because it is better, :meth:`update` says so by ``trial=None``.
        """


def check_controller(controller: object) -> None:
    """Raise TypeError or ValueError unless ``controller`` implements :class:`Controller`, and say what it lacks.

    One with ``undo`` must implement :class:`UndoingController`.
    """
    if isinstance(controller, type):
        raise TypeError(f"auto_lr is the class {controller.__name__}: pass an instance, {controller.__name__}()")
    if not isinstance(controller, Controller):
        members = ("reads", "prepare", "active", "start", "update", "base")
        missing = [name for name in members if not hasattr(controller, name)]
        raise TypeError(
            "auto_lr must be True, False or a controller such as RegressionController(), got "
            f"{spell(controller)}, which has no {', '.join(missing)}"
        )
    if hasattr(controller, "undo"):
        missing = [name for name in ("broke", "begun_anew") if not callable(getattr(controller, name, None))]
        if missing:
            raise TypeError(
                f"{type(controller).__name__} has undo={controller.undo!r}, but no {', '.join(missing)}: write both "
                "methods (see docs/extending.md), or leave undo out"
            )
        if isinstance(controller.undo, bool) or not isinstance(controller.undo, int) or controller.undo < 0:
            raise ValueError(
                f"undo of {type(controller).__name__} must be a whole number of at least 0, the most returns in a run, "
                f"got {controller.undo!r}"
            )


@dataclass(frozen=True)
class Findings:
    """The findings of a controller at one sync. Arrays are [J], NaN where something is not known.

    Args:
        slopes: slope of the loss in the logarithm of each hyperparameter.
        errors: standard errors of the slopes.
        posterior: by hyperparameter, mean and standard deviation of the posterior of log θ: the right peak over the
            given one. Only those that have one.
        judgement: the numbers that the controller judged the sync by, under names of its own.
        why: why it moved what it moved at this sync, as a clause: "training fell back (mean loss 4.2, …)".
    """

    slopes: Array
    errors: Array
    posterior: dict[int, tuple[float, float]] = field(default_factory=dict)
    judgement: dict[str, float] = field(default_factory=dict)
    why: str = ""

    @staticmethod
    def measured(seen: Observation) -> Findings:
        """Return the slopes that were measured from gradients, and nothing else."""
        unknown = np.full(len(seen.base), np.nan)
        if seen.slopes is None or seen.errors is None:
            return Findings(unknown, unknown)
        # Of scalars other than learning rates none is measured: their error is infinite.
        known = ~np.isinf(seen.errors)
        return Findings(np.where(known, seen.slopes, np.nan), np.where(known, seen.errors, np.nan))

    def by_name(self, names: Sequence[str]) -> dict[str, Any]:
        """Return slopes, errors, posterior and judgement as a record has them: what is known, by name."""

        def known(numbers: Array) -> dict[str, float]:
            return {name: number for name, number in zip(names, numbers.tolist(), strict=True) if math.isfinite(number)}

        posterior = {names[index]: list(moments) for index, moments in self.posterior.items()}
        judgement = {name: number for name, number in self.judgement.items() if math.isfinite(number)}
        return {
            "slopes": known(self.slopes),
            "errors": known(self.errors),
            "posterior": posterior or None,
            "judgement": judgement or None,
        }


@runtime_checkable
class ExplainingController(Protocol):
    """A controller that tells its findings. The records of others have no slopes, and no reasons."""

    def factors(self, state: State) -> list[float]:
        """Return the factor by which each hyperparameter is above what was given: above its schedule, or its start."""

    def findings(self, run: Run, before: State, after: State, seen: Observation, *, returned: bool) -> Findings:
        """Return the findings at a sync.

        Args:
            run: the run.
            before, after: the states before and after the sync.
            seen: the sync.
            returned: whether the replicas returned to the start.
        """
