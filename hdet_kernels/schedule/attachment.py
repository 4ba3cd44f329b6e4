"""One HDET scheduler for an optimizer at a time: its hooks, and giving the optimizer's own values back.

A replica's value stands where the user's was. So a scheduler that is built on an optimizer that had one before first
gives the user's values back, and the hooks of the old one are removed. They are also removed when a scheduler is
garbage-collected.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hdet_kernels.fanout.spread import Spread
from hdet_kernels.optim.group_entries import forget_per_replica, read_entry, split_key, write_entry
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.gradient_hooks import weakly


class Attachment:
    """The cycle that writes to an optimizer.

    Attributes:
        spread: what it writes. It outlives the cycle.
        schedule: the object whose learning rates are spread; None if that is gone.
    """

    def __init__(self, cycle: Cycle, schedule: object) -> None:
        self.spread: Spread = cycle.spread
        self.schedule = weakref.ref(schedule)
        self._cycle = weakref.ref(cycle)
        optimizer = cycle.optimizer
        handles = (
            optimizer.register_step_pre_hook(weakly(cycle.before_optimizer_step)),
            optimizer.register_load_state_dict_post_hook(weakly(cycle.write)),
        )
        self._remove_hooks: Callable[[], Any] = weakref.finalize(cycle, _remove, handles)

    def end(self) -> None:
        """Remove the hooks. The cycle, if it still exists, refuses to step."""
        self._remove_hooks()
        if (cycle := self._cycle()) is not None:
            cycle.replaced = True


_ATTACHED: WeakKeyDictionary[Optimizer, Attachment] = WeakKeyDictionary()


def attach(cycle: Cycle, schedule: object) -> None:
    """Hook ``cycle`` to its optimizer, in the place of the one before."""
    if (before := _ATTACHED.get(cycle.optimizer)) is not None:
        before.end()
    _ATTACHED[cycle.optimizer] = Attachment(cycle, schedule)


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
    for index, hyper in enumerate(spread.hyperparameters):
        if hyper.group is None or hyper.group >= len(groups):
            continue
        group, noted = groups[hyper.group], f"initial_{hyper.key}"
        if _has(group, hyper.key, spread.written(index)):
            write_entry(group, hyper.key, spread.scheduled[index] if hyper.base is None else hyper.base)
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


def _remove(handles: tuple[RemovableHandle, ...]) -> None:
    for handle in handles:
        handle.remove()


def _has(group: dict[str, Any], key: str, written: Any) -> bool:
    name, index = split_key(key)
    if name not in group:
        return False
    held = group[name] if index is None else group[name][index]
    if isinstance(held, Tensor) or isinstance(written, Tensor):
        return math.isclose(read_entry(group, key), float(written), rel_tol=1e-6)  # a tensor may have rounded it
    return bool(held == written)
