"""Overlap: an average that is on its way behind the training steps, and the correction that it lands with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hdet_kernels.converge.payload import Content
from hdet_kernels.tensors import travel_dtype

T = TypeVar("T")


@dataclass(frozen=True)
class Correction:
    """What replicas have to add, some steps after a sync, to have moved from where they were then to the consensus.

    sound: which of the replicas held here were. One that was not starts from nothing: its differences are the
    consensus.
    params, buffers, state, integers, counts: the differences; before: what buffers and state were. What cannot be
    negative, as second moments and variances, forgets: where it has shrunk since the sync to a share ρ of what it was,
    so has what is to be corrected, and ρ times the difference is added, which never makes it negative.
    heal: whether the state of a replica that was left out is still to be replaced.
    """

    sound: tuple[bool, ...]
    heal: bool
    has_state: bool
    params: list[Tensor]
    buffers: list[Tensor]
    buffers_before: list[Tensor]
    state: dict[str, Tensor]
    state_before: dict[str, Tensor]
    integers: list[Tensor]
    counts: Tensor | None

    @staticmethod
    def between(before: Content, after: Content, *, sound: tuple[bool, ...], heal: bool) -> Correction:
        floating = [*before.all_params, *before.buffers, *before.state.values()]
        for tensor in (*floating, *before.integers):
            _start_from_nothing(tensor, sound)
        if before.counts is not None and not any(sound):  # the rows of a process are stepped together
            before.counts.zero_()
        pairs = zip([*after.all_params, *after.buffers, *after.state.values()], floating, strict=True)
        differences = iter([_wide(new) - _wide(old) for new, old in pairs])
        integers = zip(after.integers, before.integers, strict=True)
        return Correction(
            sound=sound,
            heal=heal,
            has_state=bool(before.state) or before.counts is not None,
            params=[next(differences) for _ in before.all_params],
            buffers=[next(differences) for _ in before.buffers],
            buffers_before=before.buffers,
            state={name: next(differences) for name in before.state},
            state_before=before.state,
            integers=[new.to(torch.int64) - old.to(torch.int64) for new, old in integers],
            counts=None if after.counts is None or before.counts is None else after.counts - before.counts,
        )

    def apply(self, content: Content) -> None:
        """Correct what ``content`` is now. Of the step counts, which are a copy, the copy. State that came to be since
        the sync is left alone."""
        known = {name: tensor for name, tensor in content.state.items() if name in self.state}
        changes = [*self.params, *self.buffers, *(self.state[name] for name in known), *self.integers]
        targets = [*content.all_params, *content.buffers, *known.values(), *content.integers]
        if [tensor.shape for tensor in targets] != [tensor.shape for tensor in changes]:
            raise RuntimeError(
                "parameters, buffers or state have other shapes than when the average on its way was started: the "
                "model must stay as it is between a sync and its landing"
            )
        for target in targets:
            _start_from_nothing(target, self.sound)
        for target, change in zip(content.all_params, self.params, strict=True):
            _add(target, _here(change, target))
        others = [
            *zip(content.buffers, self.buffers, self.buffers_before, strict=True),
            *((target, self.state[name], self.state_before[name]) for name, target in known.items()),
        ]
        for target, change, before in others:
            target.copy_(_corrected(target, _here(change, target), _here(before, target)))
        for target, change in zip(content.integers, self.integers, strict=True):
            sum_ = target.to(torch.int64) + _here(change, target)
            target.copy_(sum_.clamp_(0, 1) if target.dtype == torch.bool else sum_)
        if content.counts is not None and self.counts is not None and len(content.counts) == len(self.counts):
            content.counts.copy_((content.counts if any(self.sound) else 0) + self.counts.to(content.counts.device))

    def of_the_consensus(self) -> Correction:
        """The correction of a replica whose parameters and buffers are the mean of all: nothing is left to correct in
        them. Of one that was not sound the state is still to be healed."""
        whole = all(self.sound)
        return replace(
            self,
            sound=(True,) * len(self.sound),
            heal=self.heal or not whole,
            has_state=self.has_state and whole,
            params=[torch.zeros_like(change) for change in self.params],
            buffers=[torch.zeros_like(change) for change in self.buffers],
            state=self.state if whole else {},
            state_before=self.state_before if whole else {},
            integers=[torch.zeros_like(change) for change in self.integers],
            counts=self.counts if whole else None,
        )

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"sound": list(self.sound)}

    @staticmethod
    def of(state: dict[str, Any]) -> Correction:
        return Correction(**(state | {"sound": tuple(state["sound"])}))


def _start_from_nothing(tensor: Tensor, sound: tuple[bool, ...]) -> None:
    """Clear the rows of replicas that were not sound."""
    if len(sound) == 1 and not sound[0]:
        tensor.zero_()
    elif not all(sound):
        tensor.reshape(len(sound), -1)[[not fine for fine in sound]] = 0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(travel_dtype(tensor.dtype))


def _here(tensor: Tensor, target: Tensor) -> Tensor:
    tensor = tensor.to(target.device)
    if tensor.is_cuda:  # it was made on another stream
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def _add(target: Tensor, change: Tensor) -> None:
    if target.dtype == change.dtype:
        target.add_(change)
    else:
        target.copy_(target.to(change.dtype).add_(change))


def _corrected(now: Tensor, change: Tensor, before: Tensor) -> Tensor:
    """``now`` + ρ·``change`` of what is nowhere negative, the plain sum of the rest; decided where the tensors are."""
    if not now.numel():
        return now
    now, before = _wide(now), _wide(before)
    nowhere_negative = (now.min() >= 0) & (before.min() >= 0) & ((before + change).min() >= 0)
    share = torch.where(before > 0, (now / before).clamp(max=1), 1)
    # Rounding may still lead below zero.
    return torch.where(nowhere_negative, (now + share * change).clamp(min=0), now + change)


class Flight(Generic[T]):
    """A function that runs in a thread of its own and, on a GPU, on ``stream``, after what the current stream has to do
    until now. ``seconds``: what the start of it cost. A process that ends waits for it."""

    def __init__(
        self, fly: Callable[[], tuple[Correction, T]], stream: torch.cuda.Stream | None, seconds: float = 0.0
    ) -> None:
        self.seconds = seconds
        self._arrived: tuple[Correction, T] | None = None
        self._failure: BaseException | None = None
        self._stream = stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        #: What failed, with its tensors: a collective that hangs may still write to them.
        self._kept: Callable[[], tuple[Correction, T]] | None = None
        # Not the thread is waited for but this: after an interrupted join() a thread counts as ended.
        self._ended = threading.Event()
        threading.Thread(target=self._run, args=(fly,), name="hdet_kernels converge").start()

    @classmethod
    def landed(cls, correction: Correction, result: T) -> Flight[T]:
        """One that has arrived already, as out of a checkpoint."""
        flight = cls.__new__(cls)
        flight.seconds, flight._stream, flight._failure, flight._kept = 0.0, None, None, None
        flight._arrived = correction, result
        flight._ended = threading.Event()
        flight._ended.set()
        return flight

    @property
    def failed(self) -> bool:
        """Whether it raised; waits for it."""
        self._ended.wait()
        return self._failure is not None

    def wait(self) -> tuple[Correction, T]:
        """Until it has arrived. Raises what it raised."""
        if self.failed and self._failure is not None:
            raise self._failure
        if self._arrived is None:
            raise RuntimeError("the average on its way ended without a result")
        return self._arrived

    def _run(self, fly: Callable[[], tuple[Correction, T]]) -> None:
        own = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        try:
            with torch.no_grad(), own:
                arrived = fly()
                if self._stream is not None:
                    self._stream.synchronize()
            self._arrived = arrived
        except BaseException as failure:
            self._failure, self._kept = failure, fly
        finally:
            self._ended.set()
