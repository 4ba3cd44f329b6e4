"""What every replica trains with in a cycle: the base values, moved by the controller, times the multipliers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.controller.protocol import Controller, Observation, Run, State
from hdet_kernels.ensemble import Ensemble, held
from hdet_kernels.fanout.explore import Group, Hyperparameter
from hdet_kernels.fanout.multipliers import pairs
from hdet_kernels.optim.group_entries import write_per_replica

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Placement:
    """What the replicas trained with at some moment: [J] base values, [J, N] values, and [J, N] what each was times
    its base, which is not always the multiplier: bounds may have cut it."""

    base: Array
    values: Array
    applied: Array

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.tolist(), "values": self.values.tolist(), "applied": self.applied.tolist()}

    @staticmethod
    def of(state: dict[str, Any]) -> Placement:
        return Placement(*(np.array(state[name]) for name in ("base", "values", "applied")))


class Spread:
    """The values of all hyperparameters on all replicas.

    A process that holds one replica gives its values to the optimizer. One that holds several gives the base values,
    and beside them the values of each of its replicas.

    ``hyperparameters`` begin with one learning rate for each parameter group, in order; ``scheduled`` is what the
    schedule says of those now.
    """

    def __init__(
        self,
        hyperparameters: Sequence[Hyperparameter],
        controller: Controller | None,
        ensemble: Ensemble,
        *,
        seed: int,
        scheduled: Sequence[float | Tensor],
        run: Run | None = None,
    ) -> None:
        self.hyperparameters = tuple(hyperparameters)
        self.controller = controller
        self.control: State = controller.start(len(self.hyperparameters), run) if controller else {}
        self.seed = seed
        self.scheduled = list(scheduled)
        self._size, self._held = ensemble.size, held(ensemble)
        self._several = ensemble.rows > 1
        self.fan_out(0)

    @property
    def diverges(self) -> bool:
        """Whether the replicas' values differ in this cycle."""
        return any(spread for spread, _ in self._spreads)

    @property
    def reads_losses(self) -> bool:
        return self.controller is not None and self.controller.reads == "losses"

    def fan_out(
        self, cycle: int, look: int = 0, *, in_pairs: bool = False, departs: Sequence[bool] | None = None
    ) -> None:
        """Take the places of a cycle, the one after ``look`` syncs: multipliers [J, N] of all replicas, and those of
        the replicas held here. They are 1 for hyperparameters in which none ``departs`` (None: in all some do)."""
        n, hyperparameters = self._size, self.hyperparameters
        departs = [True] * len(hyperparameters) if departs is None else departs
        chosen = list(zip(hyperparameters, departs, strict=True))
        self._spreads = [(hyper.spread if wanted else 0.0, hyper.spacing) for hyper, wanted in chosen]
        if in_pairs:
            self._multipliers = pairs(n, self._spreads, seed=self.seed, look=look)
        else:
            rows = [h.multipliers(n, seed=self.seed, cycle=cycle) if wanted else np.ones(n) for h, wanted in chosen]
            self._multipliers = np.stack(rows)
        self._own: list[list[float]] = self._multipliers[:, self._held].tolist()

    def base(self, index: int) -> Any:
        """The base value η of a hyperparameter now."""
        hyper = self.hyperparameters[index]
        start = self.scheduled[index] if hyper.base is None else hyper.base
        return hyper.bounded(self.controller.base(self.control, index, start) if self.controller else start)

    def values(self, index: int) -> tuple[Any, ...]:
        """What each of the replicas held here trains with."""
        hyper, base = self.hyperparameters[index], self.base(index)
        return tuple(hyper.bounded(base * multiplier) for multiplier in self._own[index])

    def rates(self, scheduled: Sequence[float | Tensor]) -> list[float | Tensor]:
        """The learning rates for the optimizer where the schedule says ``scheduled``: this replica's own, or those that
        several are spread around."""
        self.scheduled = list(scheduled)
        return self.base_rates() if self._several else [self.values(index)[0] for index in range(len(self.scheduled))]

    def base_rates(self) -> list[float | Tensor]:
        return [self.base(index) for index in range(len(self.scheduled))]

    def write(self, groups: Sequence[Group]) -> None:
        """Give the optimizer's groups and the user's setters the values of the replicas held here."""
        for index, hyper in enumerate(self.hyperparameters):
            if self._several:
                hyper.write_several(groups, self.base(index), self.values(index))
            else:
                hyper.write(groups, self.values(index)[0])

    def write_rates(self, groups: Sequence[Group]) -> None:
        """Where there are several replicas, give the groups the learning rates of each: the schedule has moved on."""
        if self._several:
            for index, group in enumerate(groups):
                write_per_replica(group, "lr", self.base(index), self.values(index))

    def placement(self) -> Placement:
        """What all replicas train with now."""
        base = np.array([float(self.base(index)) for index in range(len(self.hyperparameters))])
        rows = zip(self.hyperparameters, base[:, None] * self._multipliers, strict=True)
        values = np.stack([hyper.bounded(row) for hyper, row in rows])
        applied = np.divide(values, base[:, None], out=self._multipliers.copy(), where=base[:, None] > 0)
        return Placement(base, values, applied)

    def move(self, run: Run, placed: Placement, losses: Array, slopes: Sequence[float] | None, step: int) -> None:
        """Let the controller move the base values after ``step``. ``losses`` [N], of replicas ``placed`` so, are NaN
        where one is bad; ``slopes`` are those of the learning rates, other hyperparameters have none."""
        if self.controller is None:
            return
        padded = None if slopes is None else np.array([*slopes, *[0.0] * (len(placed.base) - len(slopes))])
        observed = Observation(losses, placed.applied, placed.base, step, padded)
        self.control = self.controller.update(run, self.control, observed)

    def config(self) -> list[dict[str, Any]]:
        """What must be equal on all replicas, as plain values."""
        return [
            {"name": h.name, "spread": h.spread, "spacing": h.spacing, "bounds": list(h.bounds or ()), "base": h.base}
            for h in self.hyperparameters
        ]

    def state_dict(self) -> dict[str, Any]:
        # Tensors stay tensors: the product of an fp32 rate and a multiplier is rounded otherwise than that of floats.
        scheduled = [value.detach().clone() if isinstance(value, Tensor) else float(value) for value in self.scheduled]
        return {"scheduled": scheduled, "controller": copy.deepcopy(self.control)}

    def load_state_dict(self, state: dict[str, Any], groups: Sequence[Group]) -> None:
        self.scheduled = [
            value.to(group["lr"].device) if isinstance(value, Tensor) and isinstance(group["lr"], Tensor) else value
            for value, group in zip(state["scheduled"], groups, strict=True)
        ]
        self.control = copy.deepcopy(state["controller"])
