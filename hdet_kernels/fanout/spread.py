"""The values that every replica trains with in a cycle: base values, moved by the controller, times multipliers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.controller.protocol import Controller, MeasuredSlopes, Observation, Run, State
from hdet_kernels.ensemble import Ensemble, held
from hdet_kernels.fanout.explore import Explore, Group, Hyperparameter, TieGroups, checked_tie_groups, expand, peak_of
from hdet_kernels.fanout.multipliers import pairs
from hdet_kernels.optim.group_entries import write_entry, write_per_replica

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Placement:
    """The values that all replicas trained with in one cycle.

    Args:
        base: [J], base values.
        values: [J, N], value of each replica.
        applied: [J, N], value over base; it differs from the multiplier where a bound cut the value.
    """

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

    A process that holds one replica writes that replica's values to the optimizer. A process that holds several writes
    the base values, and beside them the values of each of its replicas.

    Tied groups share the multipliers and the controller's decisions; each has its own scheduled value.

    Args:
        hyperparameters: first the learning rates of the parameter groups, then the other scalars.
        controller: moves the base values; None: they are the scheduled ones.
        ensemble: the replicas.
        seed: of the permutations.
        scheduled: the schedule's learning rates now.
        run: the run, as the controller prepared it.
        peaks: the peak of the schedule of every parameter group, by whose ratios tied groups share what the controller
            says in absolute numbers. None: those of tied groups are equal.
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
        peaks: Sequence[float] | None = None,
    ) -> None:
        self.hyperparameters = tuple(hyperparameters)
        #: The learning rate, as an index of hyperparameters, of every parameter group.
        self.rate_of = {
            g: i for i, hyper in enumerate(self.hyperparameters) if hyper.base is None for g in hyper.groups
        }
        self._shares = {g: _share(peaks, self.hyperparameters[i].groups[0], g) for g, i in self.rate_of.items()}
        self.controller = controller
        self.controller_state: State = controller.start(len(self.hyperparameters), run) if controller else {}
        self.seed = seed
        self.scheduled = list(scheduled)
        self._size, self._held = ensemble.size, held(ensemble)
        self._several = ensemble.rows > 1
        self.fan_out(0)

    @staticmethod
    def of(
        groups: Sequence[Group],
        ensemble: Ensemble,
        controller: Controller | None = None,
        *,
        run: Run,
        spread: float,
        explore: Iterable[Explore] = (),
        tie_groups: TieGroups = False,
        seed: int = 0,
    ) -> Spread:
        """Return the spread of an optimizer's learning rates, and of scalars that are explored beside them.

        Its first cycle has begun. The groups have the schedule's first learning rates. ``run`` is that which the
        controller prepared. ``spread``, ``explore``, ``tie_groups`` and ``seed`` are as in the schedulers.
        """
        hyperparameters = expand(explore, groups, spread, tie_groups=checked_tie_groups(tie_groups))
        names = [hyper.name for hyper in hyperparameters]
        for what, entries in (("floors", run.floors), ("peaks", run.peaks), ("reach", run.reach)):
            if entries and len(entries) != len(names):
                raise ValueError(
                    f"run.{what} has {len(entries)} entries, expected one for each of {', '.join(names)}: the learning "
                    "rate of every parameter group, or of those that are tied, then the explored scalars"
                )
        made = Spread(
            hyperparameters,
            controller,
            ensemble,
            seed=seed,
            scheduled=rates_of(groups),
            run=run,
            peaks=[*map(peak_of, groups)],
        )
        made.begin_cycle(run, 0)
        return made

    @property
    def tied(self) -> list[tuple[int, ...]]:
        """The parameter groups of each learning rate."""
        return [hyper.groups for hyper in self.hyperparameters if hyper.base is None]

    @property
    def diverges(self) -> bool:
        """Whether the replicas' values differ in this cycle."""
        return any(spread for spread, _ in self._spreads)

    @property
    def reads_losses(self) -> bool:
        """Whether the controller compares the replicas' losses."""
        return self.controller is not None and self.controller.reads == "losses"

    def begin_cycle(self, run: Run, step: int) -> None:
        """Deal the multipliers of the cycle that begins after ``step``, as the controller wished for in ``run``."""
        departs = run.departs_at(step)
        self.fan_out(step // run.sync_every, run.syncs_before(step), in_pairs=run.in_pairs, departs=departs)

    def fan_out(
        self, cycle: int, sync: int = 0, *, in_pairs: bool = False, departs: Sequence[bool] | None = None
    ) -> None:
        """Deal the multipliers [J, N] of a cycle, the number of which decides the permutations, to the replicas.

        ``sync``, the number of syncs before it, decides the pairs, if every replica departs in at most one
        hyperparameter (:func:`.multipliers.pairs`). ``departs``: in which replicas differ; None: in all.
        """
        n, hyperparameters = self._size, self.hyperparameters
        departs = [True] * len(hyperparameters) if departs is None else departs
        chosen = list(zip(hyperparameters, departs, strict=True))
        self._spreads = [(hyper.spread if wanted else 0.0, hyper.spacing) for hyper, wanted in chosen]
        if in_pairs:
            self._multipliers = pairs(n, self._spreads, seed=self.seed, sync=sync)
        else:
            each = [h.multipliers(n, seed=self.seed, cycle=cycle) if wanted else np.ones(n) for h, wanted in chosen]
            self._multipliers = np.stack(each)
        self._own: list[list[float]] = self._multipliers[:, self._held].tolist()

    def place(self, factors: Array) -> None:
        """Give each replica its own factor [N] of all learning rates; everything else is equal on all replicas."""
        self._spreads = [(0.0, hyper.spacing) for hyper in self.hyperparameters]
        self._multipliers = np.ones((len(self.hyperparameters), self._size))
        self._multipliers[: len(self.tied)] = factors
        self._own = self._multipliers[:, self._held].tolist()

    def base(self, index: int, group: int | None = None) -> Any:
        """Return the base value η of a hyperparameter now, in one of its groups: by default the first."""
        hyper = self.hyperparameters[index]
        start: Any = hyper.base
        share = 1.0
        if start is None:
            group = hyper.groups[0] if group is None else group
            start, share = self.scheduled[group], self._shares[group]
        if self.controller is None or not share:  # a group whose schedule is always 0 stays at 0
            return hyper.bounded(start)
        return hyper.bounded(self.controller.base(self.controller_state, index, start / share) * share)

    def values(self, index: int, group: int | None = None) -> tuple[Any, ...]:
        """Return the value of each of the replicas held here, in one of its groups: by default the first."""
        hyper, base = self.hyperparameters[index], self.base(index, group)
        return tuple(hyper.bounded(base * multiplier) for multiplier in self._own[index])

    def written(self, index: int, group: int | None = None) -> Any:
        """Return what the optimizer's group holds: this replica's value, or the base of several."""
        return self.base(index, group) if self._several else self.values(index, group)[0]

    @property
    def changes_rates(self) -> bool:
        """Whether some replica trains with another learning rate than the scheduled one. Equal on all replicas."""
        pairs_of_rates = zip(self.base_rates(), self.scheduled, strict=True)
        moved = any(float(base) != float(scheduled) for base, scheduled in pairs_of_rates)
        return moved or bool((self._multipliers[: len(self.tied)] != 1).any())

    def rates(self, scheduled: Sequence[float | Tensor]) -> list[float | Tensor]:
        """Take the schedule's learning rates and return those for the optimizer's groups.

        They are this replica's own, or the base values where this process holds several replicas.
        """
        self.scheduled = list(scheduled)
        return [self.written(self.rate_of[group], group) for group in range(len(self.scheduled))]

    def give_back(self, groups: Sequence[Group]) -> None:
        """Write the schedule's learning rates to the groups, before a schedule that computes the next from them."""
        for group, rate in zip(groups, self.scheduled, strict=True):
            write_entry(group, "lr", rate)

    def follow(self, groups: Sequence[Group]) -> None:
        """Take the schedule's learning rates from the groups, and write the values of the replicas held here."""
        self.scheduled = rates_of(groups)
        self.write(groups)

    def base_rates(self) -> list[float | Tensor]:
        """Return the base learning rate of every parameter group now."""
        return [self.base(self.rate_of[group], group) for group in range(len(self.scheduled))]

    def write(self, groups: Sequence[Group]) -> None:
        """Write the values of the replicas held here to the optimizer's groups and the user's setters."""
        for index, hyper in enumerate(self.hyperparameters):
            for group in hyper.groups or (None,):
                several = self.values(index, group) if self._several else None
                hyper.write(groups, self.written(index, group), group, several)

    def write_rates(self, groups: Sequence[Group]) -> None:
        """Write the learning rate of each replica to the groups, where this process holds several replicas."""
        if self._several:
            for number, group in enumerate(groups):
                index = self.rate_of[number]
                write_per_replica(group, "lr", self.base(index, number), self.values(index, number))

    def placement(self) -> Placement:
        """Return the values that all replicas train with now."""
        base = np.array([float(self.base(index)) for index in range(len(self.hyperparameters))])
        unbounded = zip(self.hyperparameters, base[:, None] * self._multipliers, strict=True)
        values = np.stack([hyper.bounded(each) for hyper, each in unbounded])
        applied = np.divide(values, base[:, None], out=self._multipliers.copy(), where=base[:, None] > 0)
        return Placement(base, values, applied)

    def observe(self, placed: Placement, losses: Array, step: int, slopes: MeasuredSlopes | None = None) -> Observation:
        """Return a sync as the controller sees it.

        ``losses``, [N], are NaN where a replica is bad. ``slopes`` are those of the learning rates that were measured
        from gradients; other scalars have none.
        """
        values = errors = None
        if slopes is not None:
            others = len(placed.base) - len(slopes.values)
            values = np.array([*slopes.values, *[0.0] * others])
            errors = np.array([*slopes.errors, *[np.inf] * others])
        return Observation(losses, placed.applied, placed.base, step, values, errors)

    def move(self, run: Run, seen: Observation) -> None:
        """Let the controller, if there is one, move the base values at a sync."""
        if self.controller is not None:
            self.controller_state = self.controller.update(run, self.controller_state, seen)

    def bases(self) -> dict[str, str]:
        """Return the base values by name, for a report. The last digits may differ between machines."""
        base = self.placement().base.tolist()
        return {hyper.name: f"{value:.6e}" for hyper, value in zip(self.hyperparameters, base, strict=True)}

    def config(self) -> list[dict[str, Any]]:
        """Return the settings that must be equal on all replicas, as plain values. Only tied ones have ``tied``."""
        return [
            {"name": h.name, "spread": h.spread, "spacing": h.spacing, "bounds": list(h.bounds or ()), "base": h.base}
            | ({"tied": list(h.tied)} if h.tied else {})
            for h in self.hyperparameters
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduled learning rates and the controller's state; multipliers follow from the step."""
        # Tensors stay tensors: the product of an fp32 rate and a multiplier is rounded otherwise than that of floats.
        scheduled = [value.detach().clone() if isinstance(value, Tensor) else float(value) for value in self.scheduled]
        return {"scheduled": scheduled, "controller": copy.deepcopy(self.controller_state)}

    def load_state_dict(self, state: dict[str, Any], groups: Sequence[Group]) -> None:
        """Load a saved state. :meth:`begin_cycle` and :meth:`write` are due then."""
        self.scheduled = [
            value.to(group["lr"].device) if isinstance(value, Tensor) and isinstance(group["lr"], Tensor) else value
            for value, group in zip(state["scheduled"], groups, strict=True)
        ]
        self.controller_state = copy.deepcopy(state["controller"])


def rates_of(groups: Sequence[Group]) -> list[float | Tensor]:
    """Return the learning rates of the groups; tensors as copies."""
    return [group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"] for group in groups]


def _share(peaks: Sequence[float] | None, first: int, group: int) -> float:
    """Return the peak of a group over that of the first group that it is tied to."""
    return 1.0 if peaks is None or not peaks[first] else peaks[group] / peaks[first]
