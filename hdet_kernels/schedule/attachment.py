"""One HDET scheduler for an optimizer at a time: its hooks, and giving the optimizer's own values back.

A replica's value stands where the user's was. So a scheduler that is built on an optimizer that had one before first
gives the user's values back, and the hooks of the old one are removed. They are also removed when a scheduler is
garbage-collected.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hdet_kernels.fanout.spread import Spread
from hdet_kernels.optim.group_entries import forget_per_replica, read_entry, split_key, write_entry
from hdet_kernels.schedule.gradient_hooks import weakly


class Writer(Protocol):
    """A part of a run that writes to an optimizer: a cycle, or the scouting phase before it."""

    optimizer: Optimizer
    spread: Spread
    replaced: bool

    def before_optimizer_step(self) -> None: ...

    def write(self) -> None: ...


class Attachment:
    """The part of a run that writes to an optimizer.

    Args:
        writer: the cycle, or the scouting phase.
        schedule: the object whose learning rates are spread; None if that is gone.
        at_end: called when another takes its place, or it is garbage-collected. It must not refer to ``writer``.

    Attributes:
        spread: what it writes. It outlives the writer.
        schedule: a weak reference to the schedule.
    """

    def __init__(self, writer: Writer, schedule: object, at_end: Callable[[], None] | None = None) -> None:
        self.spread = writer.spread
        self.schedule = weakref.ref(schedule)
        self._writer = weakref.ref(writer)
        optimizer = writer.optimizer
        handles = (
            optimizer.register_step_pre_hook(weakly(writer.before_optimizer_step)),
            optimizer.register_load_state_dict_post_hook(weakly(writer.write)),
        )
        ended = weakref.finalize(writer, _remove, handles, at_end)
        ended.atexit = False
        self._remove_hooks: Callable[[], Any] = ended

    def end(self) -> None:
        """Remove the hooks. The writer, if it still exists, refuses to step."""
        self._remove_hooks()
        if (writer := self._writer()) is not None:
            writer.replaced = True


_ATTACHED: WeakKeyDictionary[Optimizer, Attachment] = WeakKeyDictionary()


def attach(writer: Writer, schedule: object, at_end: Callable[[], None] | None = None) -> None:
    """Hook ``writer`` to its optimizer, in the place of the one before. The arguments are those of the attachment."""
    if (before := _ATTACHED.get(writer.optimizer)) is not None:
        before.end()
    _ATTACHED[writer.optimizer] = Attachment(writer, schedule, at_end)


def release(optimizer: Optimizer) -> None:
    """Take the HDET scheduler off an optimizer: write the user's own values back and remove the hooks.

    The learning rate becomes that of the schedule, without the controller's factor and this replica's multiplier.
    Values that were changed by somebody else in the meantime stay. The scheduler cannot be stepped any more.
    """
    own_values_back(optimizer)
    if (attached := _ATTACHED.pop(optimizer, None)) is not None:
        attached.end()


def own_values_back(optimizer: Optimizer) -> None:
    """Write the user's own values back to the groups, where they still have what the scheduler wrote."""
    attached = _ATTACHED.get(optimizer)
    if attached is None:
        return
    spread, groups = attached.spread, optimizer.param_groups
    every = [(index, hyper, number) for index, hyper in enumerate(spread.hyperparameters) for number in hyper.groups]
    for index, hyper, number in every:
        if number >= len(groups):
            continue
        group, noted = groups[number], f"initial_{hyper.key}"
        if _has(group, hyper.key, spread.written(index, number)):
            write_entry(group, hyper.key, spread.scheduled[number] if hyper.base is None else hyper.base)
        elif hyper.base is not None:
            group.pop(noted, None)  # the user gave a value of his own
    forget_per_replica(groups)


def check_schedule_is_own(optimizer: Optimizer, schedule: object) -> None:
    """Raise ValueError if ``schedule`` was built on learning rates that an HDET scheduler had spread."""
    attached = _ATTACHED.get(optimizer)
    if attached is None or attached.schedule() is schedule or not attached.spread.changes_rates:
        return
    raise ValueError(
        f"the learning rates that {type(schedule).__name__} was built on are one replica's: another HDET scheduler had "
        "spread them. Call hdet_kernels.schedule.release(optimizer) before you build the schedule"
    )


def _remove(handles: tuple[RemovableHandle, ...], at_end: Callable[[], None] | None) -> None:
    for handle in handles:
        handle.remove()
    if at_end is not None:
        at_end()


def _has(group: dict[str, Any], key: str, written: Any) -> bool:
    name, index = split_key(key)
    if name not in group:
        return False
    held = group[name] if index is None else group[name][index]
    if isinstance(held, Tensor) or isinstance(written, Tensor):
        return math.isclose(read_entry(group, key), float(written), rel_tol=1e-6)  # a tensor may have rounded it
    return bool(held == written)
