"""Overlap: an average that is on its way behind the training steps, and the correction that it lands with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .content import Content

T = TypeVar("T")


@dataclass(frozen=True)
class Correction:
    """What a replica has to add, some steps after a sync, to have moved from where it was then to the consensus.

    params, integers, counts: differences; of a replica that was not sound the consensus itself, which it takes.
    others: the same of buffers and state; before: what those were. They forget: where one has shrunk since the sync to
    a share ρ of what it was, so has what is to be corrected, and ρ times the difference is added (then what cannot be
    negative, as a second moment, stays so).
    heal: whether the state of a replica that was left out is still to be replaced.
    """

    sound: bool
    heal: bool
    has_state: bool
    params: list[Tensor]
    others: list[Tensor]
    before: list[Tensor]
    integers: list[Tensor]
    counts: Tensor | None

    @staticmethod
    def between(before: Content, after: Content, *, sound: bool, heal: bool) -> Correction:
        def difference(new: Tensor, old: Tensor) -> Tensor:
            if not sound:
                return new
            if new.dtype == torch.bool:
                return new ^ old
            wide = torch.float32 if new.dtype in (torch.bfloat16, torch.float16) else new.dtype
            return new.to(wide) - old.to(wide)

        def differences(new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
            return [difference(a, b) for a, b in zip(new, old, strict=True)]

        others = [*before.buffers, *before.state.values()]
        return Correction(
            sound=sound,
            heal=heal,
            has_state=bool(before.state) or before.counts is not None,
            params=differences(after.all_params, before.all_params),
            others=differences([*after.buffers, *after.state.values()], others),
            before=others if sound else [],
            integers=differences(after.integers, before.integers),
            counts=None if after.counts is None or before.counts is None else difference(after.counts, before.counts),
        )

    def apply(self, content: Content) -> None:
        """Correct what ``content`` is now. Of the step counts, which are a copy, the copy."""
        now = [*content.buffers, *content.state.values()]
        self._check(content.all_params, self.params)
        self._check(now, self.others)
        self._check(content.integers, self.integers)
        for tensor in (*self.params, *self.others, *self.before, *self.integers):
            if tensor.is_cuda:  # it was made on another stream
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        if not self.sound:
            for target, value in zip(
                (*content.all_params, *now, *content.integers),
                (*self.params, *self.others, *self.integers),
                strict=True,
            ):
                target.copy_(value)
            if content.counts is not None and self.counts is not None:
                content.counts.copy_(self.counts)
            return
        for target, change in zip(content.all_params, self.params, strict=True):
            target.copy_(target.to(change.dtype).add_(change) if target.dtype != change.dtype else target.add_(change))
        for target, change, before in zip(now, self.others, self.before, strict=True):
            left = (target.to(change.dtype) / before.to(change.dtype)).clamp_(0, 1)
            left[before == 0] = 1
            target.copy_(target.to(change.dtype) + left.mul_(change))
        for target, change in zip(content.integers, self.integers, strict=True):
            target.copy_(target ^ change if target.dtype == torch.bool else target + change)
        if content.counts is not None and self.counts is not None:
            content.counts.add_(self.counts)

    @staticmethod
    def _check(now: list[Tensor], then: list[Tensor]) -> None:
        if [tensor.shape for tensor in now] != [tensor.shape for tensor in then]:
            raise RuntimeError(
                "parameters, buffers or state have other shapes than when the average on its way was started: the "
                "model must stay as it is between a sync and its landing"
            )

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @staticmethod
    def of(state: dict[str, Any], device: torch.device) -> Correction:
        def placed(value: Any) -> Any:
            if isinstance(value, list):
                return [tensor.to(device, copy=True) for tensor in value]
            return value

        return Correction(**{name: placed(value) for name, value in state.items()})


class Flight(Generic[T]):
    """A function that runs in a thread of its own and, on a GPU, on a stream of its own, after what the current stream
    has to do until now. ``seconds``: what the start of it cost."""

    def __init__(self, fly: Callable[[], tuple[Correction, T]], device: torch.device, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._arrived: tuple[Correction, T] | None = None
        self._failure: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        # A daemon: a process that gives up does not wait for its peers.
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, args=(fly,), name="hdet_kernels converge", daemon=True
        )
        self._thread.start()

    @classmethod
    def landed(cls, correction: Correction, result: T) -> Flight[T]:
        """One that has arrived already, as out of a checkpoint."""
        flight = cls.__new__(cls)
        flight.seconds, flight._thread, flight._stream, flight._failure = 0.0, None, None, None
        flight._arrived = correction, result
        return flight

    def wait(self) -> tuple[Correction, T]:
        """Until it has arrived. Raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure
        if self._arrived is None:
            raise RuntimeError("the average on its way ended without a result")
        return self._arrived

    def _run(self, fly: Callable[[], tuple[Correction, T]]) -> None:
        try:
            own = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
            with torch.no_grad(), own:
                arrived = fly()
                if self._stream is not None:
                    self._stream.synchronize()
            self._arrived = arrived
        except BaseException as failure:
            self._failure = failure
