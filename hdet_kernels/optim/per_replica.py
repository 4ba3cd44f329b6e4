"""Hyperparameters and state that differ between the replicas of a stack.

A parameter group holds the number around which its replicas are spread. Where they differ, ``group["per_replica"]``
holds the number of each replica by the key of the entry (``"lr"``, ``"betas[1]"``). A new number written to the group
itself applies to all replicas, until a scheduler writes per-replica numbers again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from hdet_kernels.optim.coded_state import decoded_entries, is_coded, scale_name
from hdet_kernels.optim.group_entries import PER_REPLICA, PER_REPLICA_BASE, Group, read_entry, replace_entry
from hdet_kernels.tensors import replicas_of

#: Columns of the hyperparameter table that act on the moments.
_MOMENT_COLUMNS = ("beta1", "beta2", "momentum", "dampening", "nesterov", "amsgrad", "maximize", "max_grad_norm")


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


def fit_state(entries: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Return loaded state of a stacked parameter in a form that fits its number of replicas.

    Per-replica state of a stack with another number of replicas becomes one state for all: the mean over the replicas,
    and the largest step count. After a sync with local gradients, all replicas are equal.
    """
    # A state has the shape of its parameter, or one number for each row (NorMuon).
    shapes = (tuple(param.shape[1:]), (*param.shape[1:-1], 1))
    fitted = dict(entries)
    coded = [value for value in fitted.values() if is_coded(value)]
    if any(tuple(value.shape[1:]) in shapes and len(value) != len(param) for value in coded):
        fitted = decoded_entries(entries)
    others = {"step", *(scale_name(name) for name, value in fitted.items() if is_coded(value))}
    per_replica = [
        name
        for name, value in fitted.items()
        if name not in others and isinstance(value, Tensor) and value.dim() and tuple(value.shape[1:]) in shapes
    ]
    of_other_stack = [name for name in per_replica if len(fitted[name]) not in (0, len(param))]
    for name in of_other_stack:
        # In float64 the mean of equal numbers is that number.
        fitted[name] = fitted[name].double().mean(0).to(fitted[name].dtype)
    if of_other_stack and isinstance(fitted.get("step"), Tensor) and fitted["step"].dim():
        fitted["step"] = fitted["step"].max()
    return fitted


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
