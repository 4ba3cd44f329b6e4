"""Numbers in an optimizer's parameter groups, addressed by a key such as ``"lr"`` or ``"betas[1]"``.

A group of stacked parameters can hold a value for each replica: ``group["per_replica"]`` maps keys to those values,
``group["per_replica_base"]`` to the group's number at the time they were written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from hdet_kernels.checks import spell

Group = dict[str, Any]

#: Name of the group entry that maps a key to the values of all replicas.
PER_REPLICA = "per_replica"

#: Name of the group entry that maps a key to the number around which the schedulers spread those values.
PER_REPLICA_BASE = "per_replica_base"


def read_entry(group: Group, key: str) -> float:
    """Return the number under ``key`` of a parameter group.

    Raises:
        ValueError: if the group has no such entry, or it is not a single number.
    """
    name, index = split_key(key)
    if name not in group:
        scalars = sorted(k for k, v in group.items() if isinstance(v, int | float) and not isinstance(v, bool))
        raise ValueError(f"{name!r} is not a key of the optimizer's parameter groups; it has {', '.join(scalars)}")
    value = group[name]
    if index is not None:
        if not isinstance(value, tuple | list) or index >= len(value):
            raise ValueError(f"{key!r} does not exist: the group holds {name}={value!r}")
        value = value[index]
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key!r} must be a number, the group holds {spell(value)}")
    return float(value)


def write_entry(group: Group, key: str, value: float | Tensor) -> None:
    """Set the number under ``key``. A tensor is filled in place, so that captured CUDA graphs read the new value."""
    name, index = split_key(key)
    if index is not None:
        entries = list(group[name])
        if isinstance(entries[index], Tensor):
            entries[index].fill_(value)
            return
        entries[index] = value
        group[name] = tuple(entries)
    elif isinstance(group[name], Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def replace_entry(group: Group, key: str, value: float | Tensor) -> None:
    """Set the number under ``key`` without changing a tensor that the group held there."""
    name, index = split_key(key)
    group[name] = value if index is None else tuple(value if i == index else v for i, v in enumerate(group[name]))


def write_per_replica(group: Group, key: str, base: float | Tensor, values: tuple[float, ...]) -> None:
    """Set the values of all replicas. They hold as long as the number under ``key`` is ``base``."""
    group[PER_REPLICA] = {**group.get(PER_REPLICA, {}), key: values}
    bases = {**group.get(PER_REPLICA_BASE, {}), key: base}
    name, index = split_key(key)
    held = group[name] if index is None else group[name][index]
    if isinstance(base, Tensor) or isinstance(held, Tensor):
        bases[key] = None  # a tensor may have rounded the number, and reading it would wait for the device
    group[PER_REPLICA_BASE] = bases


def forget_per_replica(groups: Sequence[Group]) -> None:
    """Remove the per-replica values that an earlier scheduler wrote; a later one may not explore those entries."""
    for group in groups:
        written = group.pop(PER_REPLICA_BASE, {})
        kept = {key: values for key, values in group.pop(PER_REPLICA, {}).items() if key not in written}
        if kept:
            group[PER_REPLICA] = kept


@cache
def split_key(key: str) -> tuple[str, int | None]:
    """Return the name and the index of a key: ``("betas", 1)`` for ``"betas[1]"``, ``("lr", None)`` for ``"lr"``."""
    match = re.fullmatch(r"(\w+)\[(\d+)\]", key)
    return (match[1], int(match[2])) if match else (key, None)
