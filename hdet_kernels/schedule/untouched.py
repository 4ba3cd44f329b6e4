"""Undo what was written to an optimizer if an error follows: its learning rates and other options are as before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.schedule.guards.wrapped import unwrapped


@contextlib.contextmanager
def untouched_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Restore the optimizer if the block raises: entries of its groups, its hooks, and its own ``step``.

    torch's constructor writes the first values of the schedule, and puts a wrapper around ``step`` of the instance.

    Args:
        optimizer: the optimizer, or a wrapper around it.
    """
    outside, optimizer = optimizer, unwrapped(optimizer)
    groups = [dict(group) for group in optimizer.param_groups]
    held = [tensor for group in groups for name, value in group.items() if name != "params" for tensor in _in(value)]
    values = [tensor.clone() for tensor in held]  # schedules fill learning rates that are tensors in place
    stepped = "step" in vars(outside)
    hooks: list[dict[int, Any]] = [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    ]
    registered = [dict(each) for each in hooks]
    try:
        yield
    except BaseException:
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        for tensor, value in zip(held, values, strict=True):
            tensor.copy_(value)
        for each, known in zip(hooks, registered, strict=True):
            each.clear()
            each.update(known)
        if not stepped:
            vars(outside).pop("step", None)
        raise


def _in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in an entry of a parameter group: the entry itself, or those in a tuple."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        yield from (entry for entry in value if isinstance(entry, Tensor))
