"""One HDET scheduler for an optimizer at a time: hook into optimizer and model, and give the own values back.

A replica's value stands where the user's was. So a scheduler that is built on an optimizer that had one before first
gives the user's values back, and the hooks of the old one are removed. They are also removed when a scheduler is
garbage-collected.

A wrapper, such as the ``AcceleratedOptimizer`` of Accelerate, holds another optimizer as its attribute ``optimizer``
and passes steps on to it. Only the innermost optimizer runs the hooks of a step, has the state, and is one of this
package's classes if any of them is.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hdet_kernels.checks import check_kind
from hdet_kernels.fanout.spread import Spread
from hdet_kernels.module_hooks import add_hook, weak_method
from hdet_kernels.optim.base import FusedOptimizer, Pairs
from hdet_kernels.optim.group_entries import forget_per_replica, read_entry, split_key, write_entry
from hdet_kernels.schedule.gradients import look_at_gradients, pairs_of
from hdet_kernels.schedule.guards import StepCount
from hdet_kernels.stack import ReplicaStack
from hdet_kernels.torch_internals import not_compiled, uncompiled

Call = Callable[[], None]


class Writer(Protocol):
    """A part of a run that writes to an optimizer: a cycle, or the scouting phase before it."""

    optimizer: Optimizer
    spread: Spread
    replaced: bool
    steps: StepCount

    def before_optimizer_step(self) -> None: ...

    def look(self, pairs: Pairs) -> None: ...

    def looked(self) -> None: ...

    def write(self) -> None: ...


class Attachment:
    """The part of a run that writes to an optimizer, and the hooks of that optimizer.

    Another part can take its place (:meth:`take`) while the hooks stay, also from within one of them.
    """

    spread: Spread  # what the writer writes; it outlives the writer
    schedule: weakref.ref[Any]  # the object whose learning rates are spread

    def __init__(self) -> None:
        self._writer: Callable[[], Writer | None] = lambda: None
        self._at_end: Call | None = None
        self._before: Callable[[], Call | None] = lambda: None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._handles: list[RemovableHandle] = []

    def take(self, writer: Writer, schedule: object, before: Call, at_end: Call | None) -> None:
        """Give the optimizer to ``writer``; the one before refuses to step. The arguments are :func:`attach`'s."""
        self._leave()
        self.spread, self.schedule = writer.spread, weakref.ref(schedule)
        self._writer, self._at_end = weakref.ref(writer), at_end
        self._before = weak_method(before)
        if not self._handles:
            optimizer = writer.optimizer
            if isinstance(optimizer, FusedOptimizer) and optimizer.steps_in_backward:
                begins = optimizer.watch_backward(self._begin_step, self._look)
            else:
                begins = optimizer.register_step_pre_hook(self._before_step)
            self._handles = [
                begins,
                optimizer.register_step_post_hook(self._after_step),
                optimizer.register_load_state_dict_post_hook(self._after_load),
            ]
        self._finalizer = weakref.finalize(writer, self.end)
        self._finalizer.atexit = False

    def end(self) -> None:
        """Remove the hooks. The writer, if it was not garbage-collected, refuses to step."""
        self._leave()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _leave(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        at_end, self._at_end = self._at_end, None  # not kept: it may refer to the optimizer
        if at_end is not None:
            at_end()
        if (writer := self._writer()) is not None:
            writer.replaced = True

    # The hooks. torch.compile does not look into them: it would compile a step anew for every value of a counter.

    @not_compiled
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        writer = self._begun()

        def look() -> None:
            assert writer is not None
            writer.before_optimizer_step()
            writer.look(pairs_of(optimizer.param_groups))

        return None if writer is None else look_at_gradients(look, args, kwargs)

    def _begun(self) -> Writer | None:
        if (before := self._before()) is not None:
            before()
        return self._writer()  # ``before`` may have put another in its place

    # Those of an optimizer that steps in the backward pass, and shows its gradients in parts.

    @not_compiled
    def _begin_step(self) -> None:
        if (writer := self._begun()) is not None:
            writer.before_optimizer_step()

    @not_compiled
    def _look(self, pairs: Pairs) -> None:
        if (writer := self._writer()) is not None:
            writer.look(pairs)

    @not_compiled
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if (writer := self._writer()) is not None:
            writer.looked()  # not before: a step that another hook makes fail may be repeated
            writer.steps.optimizer_stepped(optimizer.param_groups)

    @not_compiled
    def _after_load(self, _: Optimizer) -> None:
        if (writer := self._writer()) is not None:
            writer.write()


_ATTACHED: WeakKeyDictionary[Optimizer, Attachment] = WeakKeyDictionary()


def attach(writer: Writer, schedule: object, *, before: Call, at_end: Call | None = None) -> None:
    """Hook ``writer`` to its optimizer, in the place of the one before.

    Args:
        writer: the cycle, or the scouting phase.
        schedule: the object whose learning rates are spread.
        before: a bound method that is called before each step of the optimizer, as long as its object lives.
        at_end: called when another takes its place, or it is garbage-collected. It must not refer to ``writer``.
    """
    _ATTACHED.setdefault(writer.optimizer, Attachment()).take(writer, schedule, before, at_end)


def release(optimizer: Optimizer) -> None:
    """Take the HDET scheduler off an optimizer: write the user's own values back and remove the hooks.

    The learning rate becomes that of the schedule, without the controller's factor and this replica's multiplier.
    Values that were changed by somebody else in the meantime stay. The scheduler cannot be stepped any more.

    Args:
        optimizer: the optimizer, or a wrapper around it.
    """
    optimizer = check_kind("optimizer", unwrapped(optimizer), Optimizer, "a torch.optim.Optimizer, or a wrapper of one")
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
        "spread them. Call hdet_kernels.release(optimizer) before you build the schedule"
    )


def _has(group: dict[str, Any], key: str, written: Any) -> bool:
    name, index = split_key(key)
    if name not in group:
        return False
    held = group[name] if index is None else group[name][index]
    if isinstance(held, Tensor) or isinstance(written, Tensor):
        return math.isclose(read_entry(group, key), float(written), rel_tol=1e-6)  # a tensor may have rounded it
    return bool(held == written)


@contextlib.contextmanager
def untouched_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Restore the optimizer if the block raises: the entries of its groups, and its own ``step``.

    torch's constructor writes the first values of the schedule, and puts a wrapper around ``step`` of the instance.
    """
    outside, optimizer = optimizer, unwrapped(optimizer)
    groups = [dict(group) for group in optimizer.param_groups]
    entries = [value for group in groups for name, value in group.items() if name != "params"]
    several = [value if isinstance(value, tuple | list) else (value,) for value in entries]
    held = [tensor for each in several for tensor in each if isinstance(tensor, Tensor)]
    values = [tensor.clone() for tensor in held]  # schedules fill learning rates that are tensors in place
    stepped = "step" in vars(outside)
    try:
        yield
    except BaseException:
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        for tensor, value in zip(held, values, strict=True):
            tensor.copy_(value)
        if not stepped:
            vars(outside).pop("step", None)
        raise


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the innermost optimizer of a chain of wrappers; an optimizer that wraps none is returned itself.

    A wrapper has methods ``step`` and ``zero_grad`` and an attribute ``optimizer``. It need not be a
    ``torch.optim.Optimizer``. One that has parameter groups other than those of what it wraps is an optimizer of its
    own.

    Raises:
        TypeError: there is no ``torch.optim.Optimizer`` in it.
    """
    found, current, seen = None, optimizer, set()
    while id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, Optimizer):
            found = current
        inner = getattr(current, "optimizer", None) if _steps(current) else None
        if inner is None or not _same_groups(current, inner):
            break
        current = inner
    if found is None:
        remedy = "pass the optimizer, or a wrapper that has it as its attribute optimizer"
        check_kind("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer", remedy=remedy)
    assert found is not None
    return found


def wrappers_of(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers around the innermost one that have a state of their own."""
    found, current, inner = [], optimizer, unwrapped(optimizer)
    while current is not inner:
        if isinstance(current, Optimizer) and getattr(current, "state", inner.state) is not inner.state:
            found.append(current)
        current = current.optimizer
    return found


def outermost(optimizer: Any) -> Optimizer:
    """Return the optimizer that a torch scheduler keeps: the given one, or the innermost if torch would refuse it."""
    return optimizer if isinstance(optimizer, Optimizer) else unwrapped(optimizer)


def _steps(candidate: object) -> bool:
    """Return whether an object can be stepped as an optimizer; a scheduler or a trainer has an ``optimizer`` too."""
    called = callable(getattr(candidate, "step", None)) and callable(getattr(candidate, "zero_grad", None))
    return called and not isinstance(candidate, type)


def _same_groups(wrapper: object, inner: object) -> bool:
    outside, inside = getattr(wrapper, "param_groups", None), getattr(inner, "param_groups", None)
    if outside is None or inside is None:
        return True
    return len(outside) == len(inside) and all(one is other for one, other in zip(outside, inside, strict=True))


# Hooks on the user's model: before its ``state_dict()``, and after its ``load_state_dict()``.


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside of ``DistributedDataParallel``, whose forward pass would talk to the other processes."""
    inner = uncompiled(model)
    while isinstance(inner, DistributedDataParallel | DataParallel):
        model = inner = inner.module
    return model


def call_before_saving(model: object, method: Callable[..., None]) -> None:
    """Call a bound method before each ``state_dict()`` of a module, which its wrappers call too."""
    if isinstance(model, nn.Module):
        add_hook(uncompiled(bare(model)).register_state_dict_pre_hook, method)


def call_after_loading(model: object, method: Callable[..., None]) -> None:
    """Call a bound method, with what was loaded, after each ``load_state_dict()`` of a stack, or of any module in a
    model."""
    found = model.modules() if isinstance(model, nn.Module) else [model] if isinstance(model, ReplicaStack) else []
    for module in found:
        if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks: the module around it does
            add_hook(module.register_load_state_dict_post_hook, method)
