"""Which parameter groups share a learning rate: one multiplier, one permutation and one place in the controller.

Two groups whose learning rates are explored apart need more replicas to tell them apart: with two replicas they are
confounded. Groups that exist for the sake of their weight decay ("decay" and "no decay") are meant to have one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from hdet_kernels.checks import check_sequence, check_whole, spell
from hdet_kernels.optim.group_entries import PER_REPLICA, PER_REPLICA_BASE

Group = dict[str, Any]

#: ``tie_groups=`` of the schedulers.
TieGroups = Literal["auto"] | bool | Sequence[Sequence[int]]

#: Entries in which groups may differ and still have one learning rate. Names and other text do not count either.
_MAY_DIFFER = ("params", "weight_decay", "initial_weight_decay", "rounding_seed", PER_REPLICA, PER_REPLICA_BASE)


def check_tie_groups(tie_groups: object) -> None:
    """Raise TypeError or ValueError unless it is ``"auto"``, True, False or a list of lists of different indices."""
    if isinstance(tie_groups, bool) or (isinstance(tie_groups, str) and tie_groups == "auto"):
        return
    what = "'auto', True, False or a list of lists of parameter groups, such as [[0, 1], [2, 3]]"
    if isinstance(tie_groups, str):
        raise ValueError(f"tie_groups must be {what}, got {spell(tie_groups)}")
    sets = check_sequence("tie_groups", tie_groups, what)
    listed = [
        group
        for index, tied in enumerate(sets)
        for group in check_sequence(f"tie_groups[{index}]", tied, "a list of parameter groups, counted from 0")
    ]
    named = [check_whole("a parameter group in tie_groups", group, at_least=0) for group in listed]
    if twice := sorted({group for group in named if named.count(group) > 1}):
        raise ValueError(f"tie_groups={spell(tie_groups)} names parameter group {twice[0]} twice: tie a group once")


def tied_groups(
    groups: Sequence[Group], tie_groups: TieGroups, covered: Mapping[int, object] | None = None
) -> list[tuple[int, ...]]:
    """Return the sets of parameter groups that have one learning rate, each in order, by their first groups.

    A group whose learning rate is 0 is tied to nothing: it has no ratio to others.

    Args:
        groups: the optimizer's, with the entries that its schedule notes there.
        tie_groups: checked by :func:`check_tie_groups`.
        covered: the ``Explore("lr", …)`` of those groups that have one. Groups with different ones are not tied.

    Raises:
        ValueError: if groups are to be tied that cannot be.
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
    return float(group[next(key for key in ("max_lr", "initial_lr", "lr") if key in group)])


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
    entries = ((key, _plain(value)) for key, value in sorted(group.items()) if key not in _MAY_DIFFER)
    return [(key, value) for key, value in entries if value is not _NO_NUMBER]


def _plain(value: object) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else _NO_NUMBER
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value)) if all(_plain(entry) is not _NO_NUMBER for entry in value) else _NO_NUMBER
    return value if value is None or isinstance(value, bool | int | float) else _NO_NUMBER


_NO_NUMBER = object()
