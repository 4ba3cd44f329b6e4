"""What a controller is: from the losses and values of all replicas to new base values.

A controller is a frozen set of constants and a few pure functions of numbers. Its state is a dict of plain lists that
the scheduler keeps and saves. At every sync in its active window ``update`` returns the next state from an
:class:`Observation`; ``base`` turns the state and the scheduled value into the base value η_j that is fanned out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
State = dict[str, Any]

#: Shares of a run become steps by a product that may be off by a rounding: 0.29·100 is a little less than 29.
EDGE = 1e-6


@dataclass(frozen=True)
class Run:
    """What a controller knows of the run. Of several hyperparameters, in their order:

    total_steps, sync_every: its length and sync interval in steps.
    peak: the share of it at which the schedule peaks.
    floors: the values that the schedule ends at; None where that is not known.
    peaks: the highest that it has; None where there is none to move: weight decay, dropout, a frozen group, …
    end: the share of its peak at which the schedule ends: 0 where it anneals, 1 where it is constant.
    probed: whether losses are those of a probe, the same examples at every sync.
    early: the steps of the first cycle at which there are syncs besides, ascending.
    in_pairs: whether replicas depart from the base values in one hyperparameter at most.
    departs: the steps from which and until which they depart in it; None, or nothing at all: they always do.
    reach: the lowest and the highest logarithm of what its bounds let its base be multiplied with; nothing at all:
        there are none.
    others: whether there are scalars besides learning rates to move.
    """

    total_steps: int | None
    sync_every: int
    peak: float
    floors: tuple[float | None, ...]
    peaks: tuple[float | None, ...] = ()
    end: float = 0.0
    probed: bool = True
    early: tuple[int, ...] = ()
    in_pairs: bool = False
    departs: tuple[tuple[int, int] | None, ...] = ()
    reach: tuple[tuple[float, float], ...] = ()
    others: bool = False

    def syncs(self, first: float, last: float) -> int:
        """How many syncs (multiples of ``sync_every``) fall on steps ``first`` to ``last``, both included."""
        first_sync = max(math.ceil((first - EDGE) / self.sync_every), 1)
        return max(math.floor((last + EDGE) / self.sync_every) - first_sync + 1, 0)

    def syncs_at(self, step: int) -> bool:
        return step % self.sync_every == 0 or step in self.early or step == self.total_steps

    def syncs_before(self, step: int) -> int:
        """How many syncs there are up to ``step``, those at the end of the run left out."""
        return step // self.sync_every + sum(early <= step for early in self.early)

    def departs_at(self, step: int) -> tuple[bool, ...] | None:
        """In which hyperparameters replicas differ in the cycle after ``step`` steps; None: in all."""
        if not self.departs:
            return None
        return tuple(steps is None or steps[0] <= step < steps[1] for steps in self.departs)

    def steps_since_sync(self, step: int) -> int:
        """How many steps the cycle has that ends with ``step``."""
        before = max((early for early in self.early if early < step), default=0)
        return step - max(before, (step - 1) // self.sync_every * self.sync_every)


@dataclass(frozen=True)
class Observation:
    """One sync, before averaging. N replicas, J hyperparameters.

    losses: [N], the replicas' losses (on the probe, or the mean training loss of the window); not finite where bad.
    multipliers: [J, N], value over base of each replica in the cycle that ends here.
    base: [J], the base values η_j at this step.
    step: the step that the sync follows.
    slopes: [J], ⟨gradient, last cycle's displacement⟩, for the hypergradient controller alone.
    """

    losses: Array
    multipliers: Array
    base: Array
    step: int
    slopes: Array | None = None


@runtime_checkable
class Controller(Protocol):
    @property
    def reads(self) -> Literal["losses", "slopes"]:
        """What it is told at a sync: the replicas' losses, or the slopes of the hypergradient."""

    def check(self, run: Run) -> None:
        """Raise if the controller cannot work in this run."""

    def active(self, run: Run, step: int) -> bool:
        """Whether the sync at ``step`` updates the state."""

    def start(self, count: int, run: Run | None = None) -> State:
        """The state before the first update, for ``count`` hyperparameters."""

    def update(self, run: Run, state: State, seen: Observation) -> State:
        """The state after a sync."""

    def base(self, state: State, index: int, scheduled: Any) -> Any:
        """The base value of hyperparameter ``index`` where the schedule says ``scheduled``."""
