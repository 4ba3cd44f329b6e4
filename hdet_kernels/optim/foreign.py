"""Find the state that optimizers of other packages keep outside of ``optimizer.state``.

That is numbers in their groups, the state of an optimizer inside of them, and a mode for evaluation.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def own_entries(optimizer: Optimizer) -> list[str]:
    """Return the names of the group entries that an optimizer keeps for itself, such as Schedule-Free's ``weight_sum``.

    They are the defaults that are no arguments of its constructor, apart from flags.
    """
    kind: Any = type(optimizer)
    named = _arguments(kind)
    return [name for name, value in optimizer.defaults.items() if name not in named and not isinstance(value, bool)]


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and those with a state of their own that it holds, such as the base optimizer of SAM."""
    found = {id(optimizer.state): optimizer}
    waiting = [optimizer]
    while waiting:
        held = [value for value in vars(waiting.pop()).values() if isinstance(value, Optimizer)]
        new = {id(each.state): each for each in held if id(each.state) not in found}
        found |= new
        waiting += new.values()
    return list(found.values())


def keeps_numbers(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has changed numbers of its own in its groups, which may differ between replicas."""
    own = own_entries(optimizer)
    values = [(group.get(name), optimizer.defaults[name]) for group in optimizer.param_groups for name in own]
    return any(isinstance(value, Tensor) or value != default for value, default in values)


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether parameters are others in evaluation, computed from the state by ``eval()`` and ``train()``."""
    return all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))


def modes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the flags in the groups of an optimizer that has modes, by a readable name; of others none."""
    if not has_modes(optimizer):
        return {}
    return {
        f"optimizer.param_groups[{number}][{name!r}]": value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, bool)
    }


@contextlib.contextmanager
def same_modes(optimizer: Optimizer) -> Iterator[None]:
    """Bring the flags in the groups of an optimizer that has modes back at the end of the block."""
    several = optimizer.param_groups if has_modes(optimizer) else []
    flags = [{name: value for name, value in group.items() if isinstance(value, bool)} for group in several]
    try:
        yield
    finally:
        for group, before in zip(several, flags, strict=True):
            group.update(before)


@cache
def _arguments(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind).parameters)
