"""Numbers in an optimizer's parameter groups, addressed by a key such as ``"lr"`` or ``"betas[1]"``.

A group holds the number around which the replicas of a stack are spread. Where they differ, ``group["per_replica"]``
maps keys to the number of each replica, and ``group["per_replica_base"]`` to the group's own number at the time they
were written. Another number written to the group since then applies to all replicas, until per-replica numbers are
written again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor

from hdet_kernels.checks import is_readable, is_several, spell
from hdet_kernels.tensors import replicas_of

Group = dict[str, Any]

#: Name of the group entry that maps a key to the values of all replicas.
PER_REPLICA = "per_replica"

#: Name of the group entry that maps a key to the number around which the schedulers spread those values.
PER_REPLICA_BASE = "per_replica_base"

#: The group entry with the seed of stochastic rounding. It is saved, so that a resumed run rounds as the whole run.
ROUNDING_SEED = "rounding_seed"

#: Options of torch.optim that choose an implementation. They are dropped from the groups of a loaded state_dict.
IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")

#: Entries that are several numbers.
SEVERAL = ("betas", "adamw_betas", "ns_coefficients")

#: Columns of the hyperparameter table that act on the moments.
_MOMENT_COLUMNS = ("beta1", "beta2", "momentum", "dampening", "nesterov", "amsgrad", "maximize", "max_grad_norm")


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


def replica_groups(group: Group, replicas: int | None) -> list[Group]:
    """Return the group as each replica sees it.

    Args:
        group: a parameter group.
        replicas: the number of replicas of its parameters; None for plain parameters, which see the group itself.

    Raises:
        ValueError: if an entry has another number of per-replica values.
    """
    values_of: Mapping[str, Sequence[float | Tensor]] = group.get(PER_REPLICA) or {}
    values_of = {key: values for key, values in values_of.items() if not _base_was_changed(group, key)}
    for key, values in values_of.items():
        if len(values) != (replicas or 0):
            raise ValueError(
                f"a parameter group has {len(values)} values of {key!r} in {PER_REPLICA!r}, one for each replica, but "
                f"its parameters are {'plain' if replicas is None else f'a stack of {replicas} replicas'}"
            )
    if not values_of:
        return [group] * (replicas or 1)
    return [_replica_group(group, values_of, replica) for replica in range(replicas or 1)]


def _base_was_changed(group: Group, key: str) -> bool:
    """Return whether the group holds another number than the one that its replicas were spread around.

    The user or another scheduler has written it since then, and it applies to all replicas.
    """
    base = group.get(PER_REPLICA_BASE, {}).get(key)
    return base is not None and read_entry(group, key) != base


def _replica_group(group: Group, values_of: Mapping[str, Sequence[float | Tensor]], replica: int) -> Group:
    copied = dict(group)
    for key, values in values_of.items():
        replace_entry(copied, key, values[replica])
    return copied


def drop_values_of_other_stacks(group: Group) -> None:
    """Remove the per-replica values of a loaded group if its parameters have another number of replicas."""
    replicas = {replicas_of(param) for param in group["params"]}
    if any(len(values) not in replicas for values in group.get(PER_REPLICA, {}).values()):
        del group[PER_REPLICA]
        group.pop(PER_REPLICA_BASE, None)


def shares_moments(rule: str, table_rows: Sequence[Mapping[str, float | Tensor]], group_count: int) -> bool:
    """Return whether replicas with one gradient keep the same moments.

    Their numbers that act on the moments must be equal, and weight decay must not go through the moments: it would
    bring in the parameters, which differ between replicas.

    Args:
        rule: the update rule.
        table_rows: the rows of the hyperparameter table, replica by replica.
        group_count: how many of them each replica has.
    """
    firsts = [list(map(row.get, _MOMENT_COLUMNS)) for row in table_rows[:group_count]]
    for index, row in enumerate(table_rows):
        own, first = list(map(row.get, _MOMENT_COLUMNS)), firsts[index % group_count]
        # Mostly the same objects: those of the group. Comparing them by identity is the cheap case.
        if not all(map(is_, own, first)) and not all(map(_equal, own, first)):
            return False
        coupled = rule in ("adam", "adagrad") or (rule == "sgd" and not _equal(row["momentum"], 0.0))
        if coupled and not _equal(row["weight_decay"], 0.0):
            return False
    return True


def _equal(a: float | Tensor | None, b: float | Tensor | None) -> bool:
    """Return whether two numbers are known to be equal. A number on an accelerator is not: reading it would wait."""
    if a is None or b is None or a is b:
        return a is b
    on_device = [isinstance(value, Tensor) and value.device.type != "cpu" for value in (a, b)]
    return not any(on_device) and float(a) == float(b)


def make_plain(group: Group) -> None:
    """Make numbers of numpy those of Python, and lists of numbers tuples: a change inside a list would go unnoticed."""
    for name, value in group.items():
        if isinstance(value, np.generic) or (type(value) is np.ndarray and value.ndim == 0):
            group[name] = value.item()
    for name in SEVERAL:
        several: Any = group.get(name)
        if isinstance(several, Tensor):
            group[name] = several.detach().unbind() if is_readable(several) and several.dim() == 1 else several
        elif is_several(several):
            group[name] = tuple(each.item() if isinstance(each, np.generic) else each for each in several)
