"""Step parameters during the backward pass, as soon as their gradients are complete, and free the gradients.

With ``in_backward`` a flat buffer has several parts. A hook on each parameter notes that its gradient has come. A part
with all of them is stepped in one launch, and its gradients are released, when the next gradient comes: by then every
hook on its own has run. ``optimizer.step()`` steps what is left, and ends the step.

A hook costs host time. So once the gradients of two steps came in the same order, only the parameters that come next
after a part keep theirs, and the first one of all, which finds a second backward pass. Such a hook looks whether all
gradients of the part are there. If the order changes, parts wait for ``step()``, and in the next steps every parameter
has a hook again. Where gradients are accumulated they have one always: there a gradient may be there and not complete.

=================== ====================================================================================================
a parameter is      because
=================== ====================================================================================================
waiting             its gradient has not come, no hook has told of it yet, or it came inside of
                    :meth:`BackwardSteps.accumulate`
arrived             its gradient is complete: autograd, FSDP2, or the all-reduce of DDP has called
stepped             its part was stepped in this backward pass
=================== ====================================================================================================

Between ``backward()`` and ``step()`` nothing may need gradients any more. Wherever something may change them there,
``step()`` alone takes the first step, and what was changed raises: :meth:`BackwardSteps.check_untouched`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, groupby, pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hdet_kernels.ddp_hook import hook_of
from hdet_kernels.optim.flat_group import GRAD, FlatGroup, GradientOf, Part
from hdet_kernels.optim.options import InBackward
from hdet_kernels.sharded import is_distributed, is_offloaded, part_of
from hdet_kernels.tensors import checksum
from hdet_kernels.torch_internals import times_written

WAITING, ARRIVED, STEPPED = range(3)


class SteppingOptimizer(Protocol):
    """The members of :class:`.base.FusedOptimizer` that step a part."""

    @property
    def max_grad_norm(self) -> float | None: ...
    @property
    def accumulates(self) -> Callable[[], bool] | None: ...

    def begin_step(self) -> None: ...
    def step_parts(self, parts: Sequence[tuple[FlatGroup, Part]], gradient_of: GradientOf) -> None: ...


class BackwardSteps:
    """The steps of one optimizer in its backward passes.

    Args:
        optimizer: the optimizer; it is not kept alive.
        flat_groups: its parameters.
        settings: how they are stepped.
    """

    def __init__(self, optimizer: SteppingOptimizer, flat_groups: Sequence[FlatGroup], settings: InBackward) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.settings = settings
        self._accumulates = self._removed = False
        self._has_accumulated = False
        self._lock = threading.Lock()  # gloo calls back from several threads, autograd from one for each device
        self.begun = False
        # Parts by number, because a flat buffer that is laid out anew has others in the same places.
        self._parts = [(flat, number) for flat in flat_groups for number in range(len(flat.parts))]
        tied = [[flat.params[index] for index in flat.parts[number].slots] for flat, number in self._parts]
        self._params = [param for slots in tied for several in slots for param in several]
        ends = list(accumulate(sum(map(len, slots)) for slots in tied))
        self._members = [slice(start, end) for start, end in pairwise([0, *ends])]
        self._part_of = [part for part, slots in enumerate(tied) for params in slots for _ in params]
        self._index = {id(param): index for index, param in enumerate(self._params)}
        self._states = [WAITING] * len(self._params)
        self._given: dict[int, Tensor] = {}  # gradients that are not in ``grad`` yet: those of DDP
        # Tied parameters are complete only when all of them have arrived.
        several = [[param for params in slots if len(params) > 1 for param in params] for slots in tied]
        self._together = [[self._index[id(param)] for param in params if param.requires_grad] for params in several]
        self._expected = [sum(param.requires_grad for param in self._params[members]) for members in self._members]
        self._waiting_for = list(self._expected)
        self._ready: list[int] = []
        # Whether this step is taken by ``step()`` alone; None until the first gradient comes, because a process group
        # and DDP may come after the optimizer was built.
        self._holds: bool | None = None
        # While every parameter has a hook, the order in this step and in the one before. After that, the parameters
        # with hooks, and the parts that are complete before each.
        self._order: list[int] = []
        self._order_before: list[int] = []
        self._completed_before: dict[int, list[int]] = {}
        # Of the first step: gradients as they came, by what changes with them, and a checksum; and the one that came
        # last, on which hooks of the user may still run.
        self._seen: list[tuple[int, tuple[int, int], Tensor]] | None = []
        self._last: int | None = None
        self._handles: list[RemovableHandle] = []
        if settings.model is None:
            self._watch(range(len(self._params)))
        else:
            self._handles.append(hook_of(settings.model).listen(partial(_arrive_bucket, weakref.ref(self))))
        weakref.finalize(optimizer, _remove, self._handles).atexit = False
        _ALL.add(self)

    def _watch(self, indices: Iterable[int]) -> None:
        """Let these parameters have hooks, and no others."""
        if self._removed:
            return
        own: weakref.ref[BackwardSteps] = weakref.ref(self)
        _remove(self._handles)
        self._handles[:] = [
            self._params[index].register_post_accumulate_grad_hook(partial(_arrive, own, index))
            for index in indices
            # FSDP may still be copying gradients that it offloads.
            if self._params[index].requires_grad and not is_offloaded(self._params[index])
        ]

    def remove(self) -> None:
        """Remove all hooks: another has taken the place of this one. ``step()`` does everything from then on."""
        self._removed = True
        _remove(self._handles)

    def _step_is_held(self) -> bool:
        if self._holds is None:
            self._holds = self._changes_are_possible()
        return self._holds

    def _changes_are_possible(self) -> bool:
        """Return whether something unnoticed may change gradients before ``step()``.

        A GradScaler unscales those of float32 parameters, DistributedDataParallel averages those of several processes.
        """
        params = self._params
        alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        averaged = not alone and self.settings.model is None and not any(map(is_distributed, params))
        return averaged or any(param.dtype == torch.float32 for param in params)

    # What a backward pass calls

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let backward passes in this block accumulate gradients, and step none."""
        if self._completed_before:
            self._watch_all()
        before, self._accumulates, self._has_accumulated = self._accumulates, True, True
        try:
            yield
        finally:
            self._accumulates = before

    def _is_accumulating(self, optimizer: SteppingOptimizer) -> bool:
        return self._accumulates or (optimizer.accumulates is not None and optimizer.accumulates())

    def arrive(self, optimizer: SteppingOptimizer, index: int, param: Tensor) -> None:
        """Note that autograd or FSDP2 has completed the gradient of a parameter; step the parts that were complete."""
        if self._is_accumulating(optimizer) or param.grad is None:
            return
        with self._lock:
            self._check_waits(index)  # before a part is stepped, whose gradients may be those of two passes
            if not self._completed_before:
                self._order.append(index)
            for part in self._completed_before.get(index, ()):
                self._count_part(part, optimizer)
            if self._ready and not self._step_is_held():
                self._step_ready(optimizer, param.device)
            self._count([index], optimizer)
            if self._seen is not None:
                self._see(index)

    def _count_part(self, part: int, optimizer: SteppingOptimizer) -> None:
        """Count the gradients of a part that no hook has told of."""
        members = range(len(self._params))[self._members[part]]
        states, params = self._states, self._params
        self._count([i for i in members if states[i] == WAITING and params[i].grad is not None], optimizer)

    def arrive_bucket(self, optimizer: SteppingOptimizer, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Note averaged gradients of DDP, and step the parts that are complete."""
        if self._is_accumulating(optimizer) or self._step_is_held():
            return
        assert self.settings.model is not None
        if self.settings.model.find_unused_parameters:
            return  # which are unused is known at the end, and they are not to be stepped
        with self._lock:
            pairs = ((self._index.get(id(param)), grad) for param, grad in zip(params, grads, strict=True))
            of_bucket = {index: grad for index, grad in pairs if index is not None}  # else another optimizer's
            self._given |= of_bucket
            self._count(of_bucket, optimizer)
            self._step_ready(optimizer, grads[0].device)

    def _see(self, index: int) -> None:
        """Remember the gradient that came before this one; a single one at once, because none follows it."""
        due = index if len(self._params) == 1 else self._last
        self._last = index
        if self._seen is not None and due is not None and (grad := self._params[due].grad) is not None:
            self._seen.append((due, _trace(grad), checksum(part_of(grad))))

    def _count(self, indices: Iterable[int], optimizer: SteppingOptimizer) -> None:
        """Note complete gradients, clip each if asked for, and note the parts of which all have come."""
        states, waiting = self._states, self._waiting_for
        clips = optimizer.max_grad_norm if self.settings.clip == "tensor" else None
        for index in indices:
            self._check_waits(index)
            states[index] = ARRIVED
            if clips is not None:
                self._clip(index, clips)
            part = self._part_of[index]
            waiting[part] -= 1
            if waiting[part] <= 0 and all(states[each] != WAITING for each in self._together[part]):
                self._ready.append(part)

    def _check_waits(self, index: int) -> None:
        """Raise RuntimeError if the gradient of this parameter has come before."""
        if self._states[index] != WAITING:
            raise RuntimeError(
                "a second backward pass before optimizer.step() reached a parameter of shape "
                f"{tuple(self._params[index].shape)}, which in_backward steps in the first: run the passes before the "
                "last inside of `with optimizer.accumulate():`, add the losses and call backward() once, or build the "
                "optimizer without in_backward. If one of another package has taken its place, delete it and call "
                "gc.collect()"
            )

    def _clip(self, index: int, norm: float) -> None:
        if (grad := self._given.get(index)) is None:
            torch.nn.utils.clip_grad_norm_([self._params[index]], norm)
        else:
            grad.mul_((norm / (torch.linalg.vector_norm(grad) + 1e-6)).clamp(max=1.0))

    @torch.no_grad()
    def _step_ready(self, optimizer: SteppingOptimizer, device: torch.device) -> None:
        """Step the parts that are complete, on the device whose streams this thread of autograd has."""
        ready = [part for part in self._ready if self._parts[part][0].flat.device == device]
        if not ready:
            return
        self._ready = [part for part in self._ready if part not in ready]
        optimizer.begin_step()
        if self._removed:
            return  # parameters were regrouped: step() takes all of them
        for part in ready:
            (flat, number), members = self._parts[part], self._members[part]
            all_came = not self._given and WAITING not in self._states[members]
            optimizer.step_parts([(flat, flat.parts[number])], GRAD if all_came else self._arrived_gradient)
            if self.settings.model is None:
                self._release(members)
            self._states[members] = [state and STEPPED for state in self._states[members]]
            for index in range(members.start, members.stop) if self._given else ():
                self._given.pop(index, None)

    def _release(self, members: slice) -> None:
        for param, state in zip(self._params[members], self._states[members], strict=True):
            if state != WAITING:
                param.grad = None

    def _arrived_gradient(self, param: Tensor) -> Tensor | None:
        index = self._index[id(param)]
        if self._states[index] != ARRIVED:
            return None
        return self._given.get(index, param.grad)

    # What optimizer.step() calls

    def count_rest(self, optimizer: SteppingOptimizer) -> None:
        """Count the gradients that no hook has told of, where that matters before they are used.

        Raises:
            RuntimeError: some are of a second backward pass.
        """
        for part, members in enumerate(self._members if self._completed_before else ()):
            for index, param in enumerate(self._params[members], members.start) if self._is_stepped(part) else ():
                if param.grad is not None:
                    self._check_waits(index)
            if self.settings.clip == "tensor":
                self._count_part(part, optimizer)

    def _is_stepped(self, part: int) -> bool:
        """Return whether any parameter of a part was stepped since the last ``step()``."""
        return STEPPED in self._states[self._members[part]]

    @property
    def stepped(self) -> int:
        """How many parameters were stepped since the last ``step()``."""
        return self._states.count(STEPPED)

    def parts_left(self) -> list[tuple[FlatGroup, Part]]:
        """Return the parts of which not all parameters were stepped in the backward pass."""
        left = [part for part, members in enumerate(self._members) if set(self._states[members]) != {STEPPED}]
        return [(flat, flat.parts[number]) for flat, number in (self._parts[part] for part in left)]

    @property
    def gradient_left(self) -> GradientOf:
        """Return a function that returns the gradient of a parameter that was not stepped in the backward pass."""
        # DDP writes its buckets into ``grad``, also of what was stepped.
        return GRAD if self.settings.model is None else self._gradient_left

    def _gradient_left(self, param: Tensor) -> Tensor | None:
        return None if self._states[self._index[id(param)]] == STEPPED else param.grad

    def check_untouched(self) -> None:
        """Raise RuntimeError if, at the first step, gradients were changed after the backward pass."""
        for index, trace, number in self._seen or ():
            grad = self._params[index].grad
            if self._states[index] == STEPPED or grad is None:
                continue
            # Some trainers clip to infinity, to log the norm: that writes the same values.
            if _trace(grad) != trace and not torch.equal(checksum(part_of(grad)), number):
                raise RuntimeError(
                    f"the gradient of a parameter of shape {tuple(grad.shape)} was changed between backward() and "
                    "step(), when in_backward has used it: for clip_grad_norm_ pass max_grad_norm= and "
                    'in_backward=InBackward(clip="previous"), for DistributedDataParallel '
                    "in_backward=InBackward(model=model), in the place of a GradScaler train in bfloat16"
                )

    def end_step(self, optimizer: SteppingOptimizer) -> None:
        """Release the gradients, and wait for the next backward pass."""
        for param in () if self._removed else self._params:
            param.grad = None
        if self._completed_before:
            if not all(map(self._is_stepped, chain.from_iterable(self._completed_before.values()))):
                self._watch_all()  # they came in another order
        else:
            came = [sum(map(bool, self._states[members])) for members in self._members]
            self._expected = [now or before for now, before in zip(came, self._expected, strict=True)]
            self._learn_order(optimizer)
        self._waiting_for = list(self._expected)
        self._states = [WAITING] * len(self._params)
        self._ready, self._given, self._seen, self._last = [], {}, None, None
        self._holds = self.begun = False

    def _watch_all(self) -> None:
        self._order, self._order_before, self._completed_before = [], [], {}
        self._watch(range(len(self._params)))

    def _learn_order(self, optimizer: SteppingOptimizer) -> None:
        """Keep only those hooks that are needed, once the order in which gradients come is known."""
        # Each device has a thread of its own, and a hook knows only what came in its thread.
        order = sorted(self._order, key=lambda index: self._params[index].get_device())
        self._order, self._order_before, before = [], order, self._order_before
        if not order or order != before or self._has_accumulated or optimizer.accumulates is not None:
            return
        for _, of_device in groupby(order, key=lambda index: self._params[index].get_device()):
            indices = list(of_device)
            ends = {self._part_of[index]: place for place, index in enumerate(indices)}
            self._completed_before[indices[0]] = []
            for part, place in ends.items():
                if place + 1 < len(indices):
                    self._completed_before.setdefault(indices[place + 1], []).append(part)
        self._watch(self._completed_before)


_ALL: weakref.WeakSet[BackwardSteps] = weakref.WeakSet()


def take_over(params: Iterable[Tensor]) -> None:
    """Let optimizers that were built before on any of these parameters step them in ``step()`` alone.

    Such an optimizer may be out of use and not yet garbage-collected, and its hooks would go on stepping.
    """
    taken = set(map(id, params))
    for steps in list(_ALL):
        if not taken.isdisjoint(steps._index):
            steps.remove()


def _trace(gradient: Tensor) -> tuple[int, int]:
    """Return how often a gradient was written in place, and where it is."""
    part = part_of(gradient)
    return times_written(part), part.data_ptr() if part.layout is torch.strided else id(part)


def _arrive(steps: weakref.ref[BackwardSteps], index: int, param: Tensor) -> None:
    # As long as the optimizer lives: hooks outlive it in the parameters.
    if (found := steps()) is not None and (optimizer := found._optimizer()) is not None:
        found.arrive(optimizer, index, param)


def _arrive_bucket(steps: weakref.ref[BackwardSteps], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    if (found := steps()) is not None and (optimizer := found._optimizer()) is not None:
        found.arrive_bucket(optimizer, params, grads)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
