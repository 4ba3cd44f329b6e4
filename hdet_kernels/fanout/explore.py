"""Explored scalars: which hyperparameter, where it lives, its base value, spread and bounds.

:class:`Explore` is what the user writes. :func:`expand` turns it into one :class:`Hyperparameter` for every parameter
group that it covers, or, of learning rates, for every set of groups that are tied. Each of them has its own base,
permutation and place in the controller.

Tied groups share one multiplier, one permutation and one place in the controller. Two groups whose learning rates are
explored apart need more replicas to tell them apart: with two replicas they are confounded. Groups that exist for the
sake of their weight decay ("decay" and "no decay") are meant to have one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.checks import (
    check_callable,
    check_kind,
    check_number,
    check_positive,
    check_sequence,
    check_whole,
    keep_plain,
    spell,
)
from hdet_kernels.fanout.multipliers import Spacing, check_spread, multipliers, permutation
from hdet_kernels.optim.group_entries import (
    PER_REPLICA,
    PER_REPLICA_BASE,
    read_entry,
    split_key,
    write_entry,
    write_per_replica,
)

Group = dict[str, Any]

#: ``tie_groups=`` of the schedulers.
TieGroups = Literal["auto"] | bool | Sequence[Sequence[int]]

#: Entries in which groups may differ and still have one learning rate. Names and other text do not count either.
_MAY_DIFFER = ("params", "weight_decay", "initial_weight_decay", "rounding_seed", PER_REPLICA, PER_REPLICA_BASE)


def checked_tie_groups(tie_groups: object) -> TieGroups:
    """Return ``"auto"``, True, False or a list of lists of different indices; raise for all else."""
    if isinstance(tie_groups, bool):
        return tie_groups
    if isinstance(tie_groups, str) and tie_groups == "auto":
        return "auto"
    what = "'auto', True, False or a list of lists of parameter groups, such as [[0, 1], [2, 3]]"
    if isinstance(tie_groups, str):
        raise ValueError(f"tie_groups must be {what}, got {spell(tie_groups)}")
    sets = check_sequence("tie_groups", tie_groups, what)
    several = "a list of parameter groups, counted from 0"
    checked = [
        [
            check_whole("a parameter group in tie_groups", group, at_least=0)
            for group in check_sequence(f"tie_groups[{index}]", tied, several)
        ]
        for index, tied in enumerate(sets)
    ]
    named = [group for tied in checked for group in tied]
    if twice := sorted({group for group in named if named.count(group) > 1}):
        raise ValueError(f"tie_groups={spell(tie_groups)} names parameter group {twice[0]} twice: tie a group once")
    return checked


def tied_groups(
    groups: Sequence[Group], tie_groups: TieGroups, covered: Mapping[int, object] | None = None
) -> list[tuple[int, ...]]:
    """Return the sets of parameter groups that have one learning rate, each in order, by their first groups.

    A group whose learning rate is 0 is tied to nothing: it has no ratio to others. ``covered`` has the
    ``Explore("lr", …)`` of those groups that have one; groups with different ones are not tied.
    """
    covered = covered or {}
    frozen = {index for index, group in enumerate(groups) if not peak_of(group)}
    if tie_groups == "auto":
        alike: dict[Any, list[int]] = {}
        for index, group in enumerate(groups):
            own = index if index in frozen else (id(covered.get(index)), *_hyperparameters(group))
            alike.setdefault(own, []).append(index)
        return [tuple(tied) for tied in alike.values()]
    moving = [index for index in range(len(groups)) if index not in frozen]
    wanted = ([moving] if tie_groups else []) if isinstance(tie_groups, bool) else [sorted(t) for t in tie_groups]
    sets = [tuple(tied) for tied in wanted if tied]
    for tied in sets:
        _check_set(tied, len(groups), frozen, covered)
    named = {index for tied in sets for index in tied}
    return sorted(sets + [(index,) for index in range(len(groups)) if index not in named])


def peak_of(group: Group) -> float:
    """Return the peak of a group's schedule: OneCycleLR's, or the value that others begin or warm up to."""
    key = next(key for key in ("max_lr", "initial_lr", "lr") if key in group)
    value = group[key]
    number = value.detach().reshape(()) if isinstance(value, Tensor) else value
    return check_number(f"{key} of a parameter group", number, at_least=0, remedy="build the optimizer with another lr")


def saved_ties(hyperparameters: object) -> list[tuple[int, ...]] | None:
    """Return the sets of tied groups of a checkpoint, from its ``config.hyperparameters``; None if it is damaged."""
    if not isinstance(hyperparameters, list):
        return None
    found: list[tuple[int, ...]] = []
    for entry in hyperparameters:
        name, tied = (entry.get("name"), entry.get("tied", [])) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(tied, list):
            return None
        match = re.fullmatch(r"lr/(\d+)", name)
        if match is not None and entry.get("base") is None:  # a scalar of the user may have such a name too
            found.append((int(match[1]), *tied))
    return found if all(type(group) is int for tied in found for group in tied) else None


def _check_set(tied: tuple[int, ...], count: int, frozen: set[int], covered: Mapping[int, object]) -> None:
    if tied[-1] >= count:
        raise ValueError(
            f"tie_groups names parameter group {tied[-1]}; the optimizer has {count}, counted from 0: leave it out"
        )
    if len(tied) > 1 and (still := sorted(frozen.intersection(tied))):
        raise ValueError(
            f"tie_groups names parameter group {still[0]}, whose learning rate is 0: leave it out, it has no ratio to "
            "others"
        )
    if len({id(covered.get(index)) for index in tied}) > 1:
        raise ValueError(
            f"tie_groups gives parameter groups {list(tied)} one multiplier, but explore= has different "
            "Explore('lr', …) for them: give them one, or pass tie_groups=False"
        )


def _hyperparameters(group: Group) -> list[tuple[str, Any]]:
    """Return the entries of a group that are numbers, or tuples of numbers, less those in which groups may differ."""
    found = []
    for key in sorted(group.keys() - set(_MAY_DIFFER)):
        value = group[key]
        several = tuple(value) if isinstance(value, tuple | list) else (value,)
        plain = tuple(each.item() if isinstance(each, Tensor) and each.numel() == 1 else each for each in several)
        if all(each is None or isinstance(each, int | float) for each in plain):
            found.append((key, plain))
    return found


#: Entries of a group that a schedule keeps there for itself, and seeds.
NOT_EXPLORED = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "rounding_seed")

#: A function that takes a name and the values of the replicas held here.
Sink = Callable[[str, Sequence[float]], object]


@dataclass(frozen=True)
class Explore:
    """Explore one scalar beside the learning rate.

    Args:
        name: a key of the optimizer's parameter groups (``"weight_decay"``, ``"eps"``, ``"betas[1]"`` for an entry of
            a tuple), or any name for a scalar of yours, with ``apply``, or with a :class:`hdet_kernels.ReplicaStack`,
            whose ``hyper[name]`` then has it.
        spread: α, the half width of the multipliers: values lie in base·[1 − α, 1 + α].
        base: the value to explore around. Default for a group key: what the group holds.
        apply: called with this replica's value whenever it changes, for scalars that do not live in the optimizer:
            ``lambda p: setattr(model.dropout, "p", p)``. With a stack it gets a tuple with the values of all replicas.
        bounds: (lowest, highest) value that a replica may get.
        spacing: ``"linear"`` or ``"log"``, see :func:`hdet_kernels.multipliers`.
        groups: indices of the parameter groups that are explored. Default: all.

    ``Explore("lr", …)`` replaces the scheduler's ``spread`` for the groups it names. With the default controller other
    scalars are explored from 30 % to 90 % of the run; before and after, all replicas have the base value.
    """

    name: str
    spread: float = 0.3
    base: float | None = None
    apply: Callable[[Any], object] | None = None
    bounds: tuple[float, float] | None = None
    spacing: Spacing = "linear"
    groups: Sequence[int] | None = None

    def __post_init__(self) -> None:
        key = "a key of the optimizer's parameter groups, or a name of your own with apply="
        if not check_kind("the name of an Explore", self.name, str, key):
            raise ValueError(f"the name of an Explore must be {key}, got ''")
        keep_plain(self, spread=check_spread(self.spread, self.spacing, f"spread of {self.name!r}"))
        if self.bounds is not None:
            what, pair = f"bounds of {self.name!r}", "(lowest, highest)"
            low, high = check_sequence(what, self.bounds, pair, length=2)
            low = check_number(f"lowest of the {what}", low, at_least=0, remedy="pass 0 for no lower bound")
            unbounded = isinstance(high, float) and high == math.inf
            high = high if unbounded else check_number(f"highest of the {what}", high, remedy="pass math.inf for none")
            if high <= low:
                raise ValueError(
                    f"{what} must be {pair}, got {spell(self.bounds)}: the highest has to exceed the lowest"
                )
            keep_plain(self, bounds=(low, float(high)))
        if self.groups is not None:
            what = f"groups of {self.name!r}"
            indices = check_sequence(what, self.groups, "a list of parameter groups, counted from 0")
            if not indices:
                given = f"Explore({self.name!r}, groups={spell(self.groups)})"
                raise ValueError(f"{given} explores nothing: leave out groups= for all")
            remedy = "they are counted from 0"
            named = [check_whole(f"a parameter group in {what}", index, remedy=remedy) for index in indices]
            keep_plain(self, groups=tuple(named))
        if self.apply is not None:
            check_callable(f"apply of {self.name!r}", self.apply, "apply(value)", takes=1)
            if self.base is None:
                raise ValueError(f"Explore({self.name!r}, apply=…) needs base=, the value to explore around")
            if self.groups is not None:
                raise ValueError(f"Explore({self.name!r}, apply=…) is not in a parameter group: leave out groups=")
        if self.base is not None:
            keep_plain(self, base=check_base(self.name, self.base))


@dataclass(frozen=True)
class Hyperparameter:
    """One explored scalar: entry ``key`` of parameter group ``group``, or the value that ``apply`` sets.

    ``base`` is None for a learning rate, which the schedule gives at every step. ``tied`` are the other groups that it
    is the learning rate of.
    """

    name: str
    spread: float
    spacing: Spacing
    bounds: tuple[float, float] | None
    base: float | None
    group: int | None = None
    key: str = ""
    apply: Callable[[Any], object] | None = None
    tied: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        return self.tied if self.group is None else (self.group, *self.tied)

    def multipliers(self, n: int, *, seed: int, cycle: int) -> NDArray[np.float64]:
        """Return ρ_{π(r)} of every replica r in this cycle."""
        order = permutation(n, seed=seed, cycle=cycle, hyperparameter=self.name)
        return multipliers(n, self.spread, self.spacing)[order]

    @property
    def reach(self) -> tuple[float, float]:
        """Logarithms of the smallest and largest factor that the bounds allow; unbounded for a learning rate."""
        if self.base is None or self.bounds is None:
            return -math.inf, math.inf
        low, high = self.bounds
        return math.log(low / self.base) if low > 0 else -math.inf, math.log(high / self.base)

    def bounded(self, value: Any) -> Any:
        """Return ``value`` (a number, an array or a tensor) clipped to the bounds."""
        if self.bounds is None:
            return value
        low, high = self.bounds
        if isinstance(value, torch.Tensor):
            return value.clamp(low, high)  # comparing would wait for the device
        return np.clip(value, low, high) if isinstance(value, np.ndarray) else min(max(value, low), high)

    def write(
        self, groups: Sequence[Group], value: float, group: int | None = None, several: tuple[float, ...] | None = None
    ) -> None:
        """Write this replica's value to the optimizer group (by default its first), or to the user's setter.

        With the values of ``several`` replicas ``value`` is their base, and the setter takes all of them.
        """
        group = self.group if group is None else group
        if self.apply is not None:
            self.apply(value if several is None else several)
        elif group is not None:
            write_entry(groups[group], self.key, value)
            if several is not None:
                write_per_replica(groups[group], self.key, value, several)


def expand(
    explores: Iterable[Explore],
    groups: Sequence[Group],
    lr_spread: float,
    elsewhere: Sink | None = None,
    *,
    tie_groups: TieGroups = False,
) -> list[Hyperparameter]:
    """Return one :class:`Hyperparameter` for every scalar and group that it covers; nothing is modified.

    First come the learning rates of all groups or sets of tied groups, by the first group of each, then the others.
    ``lr_spread`` is that of the learning rates that no ``Explore("lr", …)`` covers; ``elsewhere`` takes the values of
    scalars that are in no group.
    """
    check_spread(lr_spread, "linear")
    by_group: dict[int, Explore] = {}
    others: list[Hyperparameter] = []
    for explore in explores:
        if not isinstance(explore, Explore):
            raise TypeError(f"explore= takes hdet_kernels.Explore objects, got {spell(explore)}")
        if explore.apply is not None:
            others.append(_hyperparameter(explore, explore.name, explore.base))
            continue
        if explore.name in NOT_EXPLORED:
            raise ValueError(
                f"{explore.name!r} is an entry of the schedule, not one to train with: explore 'lr', 'momentum' or "
                "'betas[0]' instead"
            )
        if elsewhere is not None and explore.base is not None and split_key(explore.name)[0] not in groups[0]:
            found_elsewhere = replace(explore, apply=partial(elsewhere, explore.name))
            others.append(_hyperparameter(found_elsewhere, explore.name, explore.base))
            continue
        for group in _covered(explore, groups):
            if explore.name == "lr":
                if explore.base is not None:
                    raise ValueError(
                        f"Explore('lr', base={explore.base}) has no meaning: the schedule gives the learning rate; "
                        "set max_lr, or the wrapped scheduler's learning rate, instead"
                    )
                if group in by_group:
                    raise ValueError(f"the learning rate of parameter group {group} is explored twice")
                by_group[group] = explore
            else:
                try:
                    held = read_entry(groups[group], explore.name)
                except ValueError as error:
                    raise ValueError(
                        f"{error}. For a scalar that lives elsewhere pass apply= and base=; for one of stack.hyper "
                        "pass base=, and ensemble=stack.ensemble to the scheduler"
                    ) from None
                # A group that was spread before holds a replica's value: see remember_bases.
                base = groups[group].get(f"initial_{explore.name}", held) if explore.base is None else explore.base
                check_base(f"{explore.name} of parameter group {group}", base)
                decays = split_key(explore.name)[0] in ("betas", "momentum")
                if decays and not (explore.bounds and explore.bounds[1] < 1):
                    raise ValueError(
                        f"Explore({explore.name!r}) needs bounds= that end below 1, got {explore.bounds}: multiples of "
                        "a number near 1 soon exceed it, and with a decay of 1 or more training diverges"
                    )
                others.append(_hyperparameter(explore, f"{explore.name}/{group}", base, group))
    default = Explore("lr", spread=lr_spread)
    rates = [
        replace(_hyperparameter(by_group.get(tied[0], default), f"lr/{tied[0]}", None, tied[0]), tied=tied[1:])
        for tied in tied_groups(groups, tie_groups, by_group)
    ]
    found = rates + others
    names = [h.name for h in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"explored twice: {', '.join(twice)}; give every hyperparameter one Explore")
    return found


def remember_bases(hyperparameters: Iterable[Hyperparameter], groups: Sequence[Group]) -> None:
    """Note the base values in the groups, beside torch's ``initial_lr``: the entry itself is this replica's value."""
    for hyper in hyperparameters:
        if hyper.group is not None and hyper.base is not None:
            groups[hyper.group][f"initial_{hyper.key}"] = hyper.base


def check_base(name: str, base: float) -> float:
    """Return ``base`` as a float; raise unless it is a positive finite number, so that its multiples differ."""
    remedy = "its replicas train with multiples of it; pass base= to Explore, or leave the group out with groups="
    return check_positive(f"the base value of {name}", base, remedy=remedy)


def _covered(explore: Explore, groups: Sequence[Group]) -> Sequence[int]:
    indices = range(len(groups)) if explore.groups is None else explore.groups
    for index in indices:
        if not 0 <= index < len(groups):
            raise ValueError(
                f"Explore({explore.name!r}, groups={list(explore.groups or ())}) names parameter group {index}; the "
                f"optimizer has {len(groups)}, counted from 0"
            )
    return indices


def _hyperparameter(explore: Explore, name: str, base: float | None, group: int | None = None) -> Hyperparameter:
    if base is not None and explore.bounds is not None and not explore.bounds[0] <= base <= explore.bounds[1]:
        raise ValueError(f"the base value {base} of {name} lies outside its bounds {explore.bounds}")
    base = None if base is None else float(base)  # plain: it is saved
    return Hyperparameter(
        name, explore.spread, explore.spacing, explore.bounds, base, group, explore.name, explore.apply
    )
