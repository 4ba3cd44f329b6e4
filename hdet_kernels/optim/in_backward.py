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

Between ``backward()`` and ``step()`` nothing may change gradients, learning rates or parameter groups any more: what
was stepped has used them. The parts that were complete last are always left for ``step()``, so that a change is seen
there, at every step, and raises: :meth:`BackwardSteps.check_untouched`. Wherever a change is likely, ``step()`` alone
takes the first step, and nothing has moved by then.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, groupby, islice, pairwise
from operator import is_
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hdet_kernels.ddp_hook import hook_of
from hdet_kernels.optim.flat_group import GRAD, FlatGroup, GradientOf, Part
from hdet_kernels.optim.options import InBackward
from hdet_kernels.sharded import is_distributed, is_offloaded, part_of
from hdet_kernels.tensors import replicas_of
from hdet_kernels.torch_internals import after_backward, sparse_parts, times_written

WAITING, ARRIVED, STEPPED = range(3)

#: Returns what was changed in the hyperparameters since they were noted; None if nothing was.
SettingsBefore = Callable[[], str | None]

#: How many gradients are compared by their values, and of how many elements they are compared whole.
NOTED_VALUES, LARGE = 2, 256

#: What is compared of a gradient: how often it was written in place, and where it is.
Trace = tuple[int, int]


class SteppingOptimizer(Protocol):
    """The members of :class:`.base.FusedOptimizer` that step a part."""

    @property
    def accumulates(self) -> Callable[[], bool] | None: ...

    def begin_step(self) -> None: ...
    def step_parts(self, parts: Sequence[tuple[FlatGroup, Part]], gradient_of: GradientOf) -> None: ...
    def note_settings(self) -> SettingsBefore: ...


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
        self._by_size = sorted(
            (i for i, p in enumerate(self._params) if p.numel()), key=lambda i: self._params[i].numel()
        )
        self._are_stacked = any(replicas_of(param) is not None for param in self._params)
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
        # Of the backward pass that steps: the hyperparameters, whether its end will be told, and the gradient that came
        # last, on which hooks of the user may still run. Of the first: how gradients came, and one that something had
        # changed by the end. Of all: the gradients that were left, by number, with their versions.
        self._settings: SettingsBefore | None = None
        self._end_is_told = False
        self._last: int | None = None
        self._came: dict[int, Trace] = {}
        self._foreign: int | None = None
        self._left: tuple[list[int], list[Tensor], list[int]] = [], [], []
        self._values = _NotedValues()
        self._is_first = True
        self._handles: list[RemovableHandle] = []
        if settings.model is None:
            self._watch(range(len(self._params)))
        else:
            own = weakref.ref(self)
            self._handles += hook_of(settings.model).listen(partial(_arrive_bucket, own), partial(_note_left, own))
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
        One that is known keeps all gradients anyway.
        """
        params = self._params
        alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        averaged = not alone and not any(map(is_distributed, params))
        return averaged or self.settings.model is not None or any(param.dtype == torch.float32 for param in params)

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
            if self._settings is None:
                self._settings = optimizer.note_settings()
            if not self._end_is_told:
                self._end_is_told = after_backward(partial(_note_left, weakref.ref(self)))
            # DistributedDataParallel, if it is not known, averages at the end.
            if self._is_first and self._last is not None and (trace := self._trace(self._last)) is not None:
                self._came[self._last] = trace
            self._last = index
            if not self._completed_before:
                self._order.append(index)
            for part in self._completed_before.get(index, ()):
                self._count_part(part)
            if self._ready and not self._step_is_held():
                self._step_ready(optimizer, param.device)
            self._count([index])

    def _count_part(self, part: int) -> None:
        """Count the gradients of a part that no hook has told of."""
        members = range(len(self._params))[self._members[part]]
        states, params = self._states, self._params
        self._count(i for i in members if states[i] == WAITING and params[i].grad is not None)

    def arrive_bucket(self, optimizer: SteppingOptimizer, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Note averaged gradients of DDP, and step the parts that are complete but the last."""
        if self._is_accumulating(optimizer):
            return
        assert self.settings.model is not None
        if self.settings.model.find_unused_parameters:
            return  # which are unused is known at the end, and they are not to be stepped
        with self._lock:
            pairs = ((self._index.get(id(param)), grad) for param, grad in zip(params, grads, strict=True))
            of_bucket = {index: grad for index, grad in pairs if index is not None}  # else another optimizer's
            if self._settings is None:
                self._settings = optimizer.note_settings()
            self._given |= of_bucket
            self._count(of_bucket)
            if not self._step_is_held():
                last = self._ready[-1:]  # of the last bucket this is what is left for step()
                del self._ready[-1:]
                self._step_ready(optimizer, grads[0].device)
                self._ready += last

    def note_left(self) -> None:
        """Note the gradients that a backward pass has left for ``step()``, now that nothing of torch changes them."""
        with self._lock:
            self._end_is_told = False
            if self._settings is None:
                return  # it accumulated
            for index, came in self._came.items():
                if self._states[index] != STEPPED and self._trace(index) != came:
                    self._foreign = index
            self._came = {}
            # A stack notes its gradients itself.
            numbers = range(0 if self._are_stacked else len(self._params))
            pairs = zip(numbers, self._states, map(GRAD, self._params), strict=False)
            left = [(index, grad) for index, state, grad in pairs if grad is not None and state != STEPPED]
            grads = [grad for _, grad in left]
            self._left = [index for index, _ in left], grads, list(map(times_written, grads))
            if left:
                few = (self._params[i].grad for i in self._by_size if self._states[i] != STEPPED)
                self._values.note(islice((grad for grad in few if grad is not None), NOTED_VALUES))

    def _trace(self, index: int) -> Trace | None:
        """Return how often a gradient was written in place, and where it is."""
        if (grad := self._params[index].grad) is None:
            return None
        part = part_of(grad)
        return times_written(part), (sparse_parts(part)[1] if part.is_sparse else part).data_ptr()

    def _count(self, indices: Iterable[int]) -> None:
        """Note complete gradients, and the parts of which all have come."""
        states, waiting = self._states, self._waiting_for
        for index in indices:
            self._check_waits(index)
            states[index] = ARRIVED
            part = self._part_of[index]
            waiting[part] -= 1
            if waiting[part] <= 0 and all(states[each] != WAITING for each in self._together[part]):
                self._ready.append(part)

    def _check_waits(self, index: int) -> None:
        """Raise RuntimeError if the gradient of this parameter has come before."""
        if self._states[index] != WAITING:
            raise RuntimeError(
                f"a second backward pass before optimizer.step() reached {self._named(index)}, which in_backward steps "
                "in the first: run the passes before the "
                "last inside of `with optimizer.accumulate():`, add the losses and call backward() once, or build the "
                "optimizer without in_backward. Layers that several activation checkpoints share need "
                "use_reentrant=False. After a backward pass that raised, load a checkpoint, or call "
                "optimizer.zero_grad() to go on with the parameters as they are. If an optimizer of another package "
                "has taken the place of this one, delete it and call gc.collect()"
            )

    @torch.no_grad()
    def _step_ready(self, optimizer: SteppingOptimizer, device: torch.device) -> None:
        """Step the parts that are complete, on the device whose streams this thread of autograd has."""
        ready = [part for part in self._ready if self._parts[part][0].flat.device == device]
        if not ready:
            return
        self._ready = [part for part in self._ready if part not in ready]
        if not self.begun:
            optimizer.begin_step()
            if self._removed:
                return  # parameters were regrouped: step() takes all of them
            self._settings = optimizer.note_settings()  # a scheduler may have written some
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

    def check_untouched(self) -> None:
        """Compare with what the backward pass has used, before ``step()`` uses the rest.

        Raises:
            RuntimeError: there are gradients of a second backward pass, or gradients, hyperparameters or parameter
                groups were changed after the backward pass.
        """
        for part, members in enumerate(self._members if self._completed_before else ()):
            for index, param in enumerate(self._params[members], members.start) if self._is_stepped(part) else ():
                if param.grad is not None:
                    self._check_waits(index)
        if self._settings is None:
            return  # all gradients are accumulated, or set by hand: none was used
        if (setting := self._settings()) is not None:
            raise RuntimeError(
                f"{setting} between backward() and step(), and in_backward has used what was there before: change it "
                f"before backward(), or after step(){self._what_is_lost()}"
            )
        changed = self._changed()
        if changed is not None or self._values.were_changed(wait=self._is_first):
            which = "gradients were" if changed is None else f"the gradient of {self._named(changed)} was"
            raise RuntimeError(
                f"{which} changed between backward() and step(), when in_backward has used others already: for "
                'clip_grad_norm_ pass max_grad_norm= and in_backward=InBackward(clip="previous"), for '
                "DistributedDataParallel in_backward=InBackward(model=model), in the place of a GradScaler train in "
                f"bfloat16{self._what_is_lost()}"
            )

    def _named(self, index: int) -> str:
        return f"a parameter of shape {tuple(self._params[index].shape)}"

    def _changed(self) -> int | None:
        """Return a parameter whose gradient somebody has written or replaced after it came; None if there is none."""
        if self._foreign is not None:
            return self._foreign
        if self._are_stacked:
            return next((index for index, param in enumerate(self._params) if was_changed(param)), None)
        numbers, grads, versions = self._left
        now = [self._params[index].grad for index in numbers]
        if all(map(is_, now, grads)) and list(map(times_written, grads)) == versions:
            return None
        several = zip(numbers, now, grads, versions, strict=True)
        return next(index for index, new, old, n in several if new is not old or times_written(old) != n)

    def _what_is_lost(self) -> str:
        if not (stepped := self.stepped):
            return ""
        return f". {stepped} of {len(self._params)} parameters have taken this step: go on from a checkpoint"

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
        self._is_first = False
        self._begin_anew()
        self._holds = False

    def _begin_anew(self) -> None:
        self._waiting_for = list(self._expected)
        self._states = [WAITING] * len(self._params)
        self._ready, self._given, self._settings, self._last = [], {}, None, None
        self._came, self._foreign, self._left = {}, None, ([], [], [])
        self._end_is_told = self.begun = False
        self._values.forget()

    def cancel(self) -> None:
        """Forget a backward pass that no ``step()`` will end, because it raised, or its gradients are not wanted."""
        if self._settings is not None:
            self._order, self._values = [], _NotedValues()
            self._begin_anew()

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


class _NotedValues:
    """Some gradients as they were, by their values: torch counts no writes to ``grad.data``, nor all to a DTensor.

    On a GPU nothing waits for the answer, so that a change is told when the device has said so: at a later step.
    """

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._before: Tensor | None = None
        # On a GPU: whether any were changed so far, there and as it was copied to the host last.
        self._changed: Tensor | None = None
        self._told: tuple[Tensor, torch.cuda.Event] | None = None

    def note(self, gradients: Iterable[Tensor]) -> None:
        """Note a few gradients: what clips scales all of them."""
        parts = [_sample(part) for part in map(part_of, gradients) if part.numel() and not part.is_sparse]
        self._parts = [part for part in parts if part.device == parts[0].device]
        self._before = self._now()

    def forget(self) -> None:
        """Forget the gradients."""
        self._parts, self._before = [], None

    def _now(self) -> Tensor | None:
        if not self._parts or (self._parts[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        return torch.cat(self._parts).view(torch.uint8)

    def were_changed(self, *, wait: bool) -> bool:
        """Return whether any were changed since they were noted, as far as is known; with ``wait`` it is."""
        if self._told is not None and self._told[1].query() and bool(self._told[0]):
            return True
        if self._before is None or (now := self._now()) is None:
            return False
        if wait or not now.is_cuda:
            return not torch.equal(now, self._before)
        differ = (now != self._before).any()
        self._changed = differ if self._changed is None else self._changed | differ
        if self._told is None:
            self._told = torch.zeros((), dtype=torch.bool, pin_memory=True), torch.cuda.Event()
        self._told[0].copy_(self._changed, non_blocking=True)
        self._told[1].record()
        return False


@torch.no_grad()
def _sample(gradient: Tensor) -> Tensor:
    """Return a gradient as a vector; of a large one the first element of every row."""
    return (
        (gradient if gradient.numel() <= LARGE or gradient.dim() < 2 else gradient.select(-1, 0)).detach().reshape(-1)
    )


def was_changed(param: Tensor) -> bool:
    """Return whether somebody has written to the gradient of a stacked parameter since its backward pass."""
    known = getattr(param, "gradient_version", None)
    return known is not None and param.grad is not None and times_written(param.grad) != known


def _arrive(steps: weakref.ref[BackwardSteps], index: int, param: Tensor) -> None:
    # As long as the optimizer lives: hooks outlive it in the parameters.
    if (found := steps()) is not None and (optimizer := found._optimizer()) is not None:
        found.arrive(optimizer, index, param)


def _arrive_bucket(steps: weakref.ref[BackwardSteps], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    if (found := steps()) is not None and (optimizer := found._optimizer()) is not None:
        found.arrive_bucket(optimizer, params, grads)


def _note_left(steps: weakref.ref[BackwardSteps]) -> None:
    if (found := steps()) is not None:
        found.note_left()


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
