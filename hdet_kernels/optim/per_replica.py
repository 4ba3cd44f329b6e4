"""Hyperparameters that differ between the replicas of a stack.

A parameter group holds the value that its replicas are spread around; ``group["per_replica"]`` has what each of them
trains with, by the name of the entry (``"lr"``, ``"betas[1]"``), where they differ. Another number written to the group
itself holds for all of them, until a scheduler writes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from hdet_kernels.fanout.explore import PER_REPLICA, PER_REPLICA_BASE, read_entry, replaced_entry
from hdet_kernels.tensors import replicas_of

Group = dict[str, Any]

#: Columns of the hyperparameter table that act on the moments.
_OF_MOMENTS = ("beta1", "beta2", "momentum", "dampening", "nesterov", "amsgrad", "maximize", "max_grad_norm")


def replica_groups(group: Group, replicas: int | None) -> list[Group]:
    """The group as each replica has it; the group itself where there are none."""
    own: Mapping[str, Sequence[float | Tensor]] = group.get(PER_REPLICA) or {}
    own = {key: values for key, values in own.items() if not _was_changed(group, key)}
    for key, values in own.items():
        if len(values) != (replicas or 0):
            raise ValueError(
                f"a parameter group has {len(values)} values of {key!r} in {PER_REPLICA!r}, one for each replica, but "
                f"its parameters are {'plain' if replicas is None else f'a stack of {replicas} replicas'}"
            )
    if not own:
        return [group] * (replicas or 1)
    return [_of_replica(group, own, replica) for replica in range(replicas or 1)]


def _was_changed(group: Group, key: str) -> bool:
    """Whether someone has since given the group another number than the one that its replicas are spread around: by
    hand, or by another scheduler. Then that is what all of them train with."""
    base = group.get(PER_REPLICA_BASE, {}).get(key)
    return base is not None and read_entry(group, key) != base


def drop_foreign(group: Group) -> None:
    """Forget the values of other replicas than the group's parameters have: those of a loaded state_dict."""
    replicas = {replicas_of(param) for param in group["params"]}
    if any(len(values) not in replicas for values in group.get(PER_REPLICA, {}).values()):
        del group[PER_REPLICA]
        group.pop(PER_REPLICA_BASE, None)


def taken_over(entries: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """The loaded state of a stacked parameter; one that was each replica's own in a stack of another number of them
    becomes one for all: the mean of its rows, the largest of the step counts. After a sync with local gradients, all
    are equal."""
    found = dict(entries)
    own = param.shape[1:]
    several = [
        name
        for name, value in found.items()
        if name != "step" and isinstance(value, Tensor) and value.shape[1:] == own and value.dim() == param.dim()
    ]
    foreign = [name for name in several if len(found[name]) not in (0, len(param))]
    for name in foreign:
        # In float64 the mean of equal numbers is that number.
        found[name] = found[name].double().mean(0).to(found[name].dtype)
    if foreign and isinstance(found.get("step"), Tensor) and found["step"].dim():
        found["step"] = found["step"].max()
    return found


def _of_replica(group: Group, own: Mapping[str, Sequence[float | Tensor]], replica: int) -> Group:
    copied = dict(group)
    for key, values in own.items():
        replaced_entry(copied, key, values[replica])
    return copied


def shares_moments(rule: str, rows: Sequence[Mapping[str, float | Tensor]], group_count: int) -> bool:
    """Whether replicas with one gradient keep the same moments. ``rows``: of the hyperparameter table, replica by
    replica. Their numbers for the moments must be equal, and weight decay must not go through the moments: it would
    bring in the parameters, which differ."""
    firsts = [list(map(row.get, _OF_MOMENTS)) for row in rows[:group_count]]
    for index, row in enumerate(rows):
        mine, first = list(map(row.get, _OF_MOMENTS)), firsts[index % group_count]
        # The very same numbers, mostly: those of the group.
        if not all(map(is_, mine, first)) and not all(map(_equal, mine, first)):
            return False
        coupled = rule in ("adam", "adagrad") or (rule == "sgd" and not _equal(row["momentum"], 0.0))
        if coupled and not _equal(row["weight_decay"], 0.0):
            return False
    return True


def _equal(a: float | Tensor | None, b: float | Tensor | None) -> bool:
    """Whether two numbers are equal as far as can be seen without waiting for a device."""
    if a is None or b is None or a is b:
        return a is b
    on_device = [isinstance(value, Tensor) and value.device.type != "cpu" for value in (a, b)]
    return not any(on_device) and float(a) == float(b)
