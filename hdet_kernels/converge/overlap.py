"""Overlap: an average that runs in the background of the next training steps, and the correction that it results in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hdet_kernels.converge.payload import Payload
from hdet_kernels.converge.split_masters import SplitRegion
from hdet_kernels.tensors import travel_dtype

T = TypeVar("T")


@dataclass(frozen=True)
class Correction:
    """The differences that this process adds to its replicas some steps after a sync.

    A replica that was healthy at the sync moves by (consensus − its own values at the sync). One that was not healthy
    is reset to the consensus: it is cleared first, and its difference is the consensus itself.

    Second moments and variances must not become negative. So where a tensor is nowhere negative and an element has
    shrunk since the sync to a share ρ of its value then, ρ times the difference is added.
    """

    sound: tuple[bool, ...]  # which of the replicas held here were healthy
    heal: bool  # whether the optimizer state of a replica that was left out still has to be replaced
    has_state: bool  # whether optimizer state and step counts were averaged
    params: list[Tensor]
    buffers: list[Tensor]
    buffers_before: list[Tensor]  # the values at the sync; the others are differences
    state: dict[str, Tensor]
    state_before: dict[str, Tensor]
    integers: list[Tensor]
    counts: Tensor | None

    @staticmethod
    def between(before: Payload, after: Payload, *, sound: tuple[bool, ...], heal: bool) -> Correction:
        """Return the correction from the values at the sync to the averaged ones. May overwrite both."""
        buffers = before.all_buffers
        floating = [*before.outlines, *buffers, *before.state.values()]
        for tensor in (*floating, *before.integers):
            _clear_unhealthy(tensor, sound)
        if before.counts is not None and not any(sound):  # the rows of a process are stepped together
            before.counts.zero_()
        pairs = zip([*after.outlines, *after.all_buffers, *after.state.values()], floating, strict=True)
        differences = iter([_wide(new).sub_(_wide(old)) for new, old in pairs])
        integers = zip(after.integers, before.integers, strict=True)
        return Correction(
            sound=sound,
            heal=heal,
            has_state=bool(before.state) or before.counts is not None,
            params=[next(differences) for _ in before.outlines],
            # ∞ − ∞: an element that is not finite on all replicas stays as it is.
            buffers=[next(differences).nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf) for _ in buffers],
            buffers_before=buffers,
            state={name: next(differences) for name in before.state},
            state_before=before.state,
            integers=[new.to(torch.int64) - old.to(torch.int64) for new, old in integers],
            counts=None if after.counts is None or before.counts is None else after.counts - before.counts,
        )

    def apply(self, payload: Payload) -> None:
        """Correct the tensors of ``payload``, and its copy of the step counts.

        Optimizer state that was created since the sync stays as it is.
        """
        known = {name: tensor for name, tensor in payload.state.items() if name in self.state}
        changes = [*self.params, *self.buffers, *(self.state[name] for name in known), *self.integers]
        targets = [*payload.outlines, *payload.all_buffers, *known.values(), *payload.integers]
        if [tensor.shape for tensor in targets] != [tensor.shape for tensor in changes]:
            raise RuntimeError(
                "parameters, buffers or optimizer state have other shapes than when the overlapped average was "
                "started: do not change the model between a sync and the end of its average"
            )
        params = iter(self.params)
        for region in payload.params:
            masters = [region.read()] if isinstance(region, SplitRegion) else region
            for target, change in zip(masters, params, strict=False):
                _clear_unhealthy(target, self.sound)
                change = _on_device_of(target, change)
                if target.dtype == change.dtype:
                    target.add_(change)
                else:
                    target.copy_(target.to(change.dtype).add_(change))
            if isinstance(region, SplitRegion):
                region.write(masters[0])
        for target in targets[len(self.params) :]:
            _clear_unhealthy(target, self.sound)
        others = [
            *zip(payload.all_buffers, self.buffers, self.buffers_before, strict=True),
            *((target, self.state[name], self.state_before[name]) for name, target in known.items()),
        ]
        for target, change, before in others:
            target.copy_(_corrected(target, _on_device_of(target, change), _on_device_of(target, before)))
        for target, change in zip(payload.integers, self.integers, strict=True):
            sum_ = target.to(torch.int64) + _on_device_of(target, change)
            target.copy_(sum_.clamp_(0, 1) if target.dtype == torch.bool else sum_)
        if payload.counts is not None and self.counts is not None and len(payload.counts) == len(self.counts):
            payload.counts.copy_((payload.counts if any(self.sound) else 0) + self.counts.to(payload.counts.device))

    def of_the_consensus(self) -> Correction:
        """Return the correction of a replica whose parameters and buffers already are the mean of all replicas.

        Their differences are zero. The state of a replica that was not healthy still has to be replaced.
        """
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
        return {**vars(self), "sound": list(self.sound)}

    @staticmethod
    def of(state: dict[str, Any]) -> Correction:
        return Correction(**(state | {"sound": tuple(state["sound"])}))


def _clear_unhealthy(tensor: Tensor, healthy: tuple[bool, ...]) -> None:
    """Set the rows of replicas that were not healthy to zero."""
    if len(healthy) == 1 and not healthy[0]:
        tensor.zero_()
    elif not all(healthy):
        tensor.reshape(len(healthy), -1)[[not fine for fine in healthy]] = 0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(travel_dtype(tensor.dtype))


def _on_device_of(target: Tensor, tensor: Tensor) -> Tensor:
    tensor = tensor.to(target.device)
    if tensor.is_cuda:  # allocated on the background stream, used on this one
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def _corrected(now: Tensor, change: Tensor, before: Tensor) -> Tensor:
    """Return ``now`` + ρ·``change`` if nothing is negative, else ``now`` + ``change``. Decided without a host sync."""
    if not now.numel():
        return now
    now, before = _wide(now), _wide(before)
    nowhere_negative = (now.min() >= 0) & (before.min() >= 0) & ((before + change).min() >= 0)
    share = torch.where(before > 0, (now / before).clamp(max=1), 1)
    # Clamped, because rounding may still lead below zero.
    moved = torch.where(nowhere_negative, (now + share * change).clamp(min=0), now + change)
    return torch.where(change == 0, now, moved)  # ∞ / ∞ is no share


class OverlappedAverage(Generic[T]):
    """An average that runs in a thread of its own, and on a GPU on a stream of its own.

    The work on the GPU starts after all that the current stream was given so far. A process that ends waits for the
    thread. ``average`` runs in it, and returns the correction and a result for the caller; ``seconds`` is the time that
    the training spent on starting it.
    """

    def __init__(
        self, average: Callable[[], tuple[Correction, T]], stream: torch.cuda.Stream | None, seconds: float = 0.0
    ) -> None:
        self.seconds = seconds
        self._outcome: tuple[Correction, T] | None = None
        self._failure: BaseException | None = None
        self._stream = stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        # Keeps the tensors of a failed average alive: a collective that hangs may still write to them.
        self._kept: Callable[[], tuple[Correction, T]] | None = None
        # Waited for instead of the thread: after an interrupted join() a thread counts as ended.
        self._ended = threading.Event()
        threading.Thread(target=self._run, args=(average,), name="hdet_kernels converge").start()

    @classmethod
    def landed(cls, correction: Correction, result: T) -> OverlappedAverage[T]:
        """Return one that has already finished, as loaded from a checkpoint."""
        average = cls.__new__(cls)
        average.seconds, average._stream, average._failure, average._kept = 0.0, None, None, None
        average._outcome = correction, result
        average._ended = threading.Event()
        average._ended.set()
        return average

    @property
    def failed(self) -> bool:
        """Whether it raised. Waits for its end."""
        self._ended.wait()
        return self._failure is not None

    def wait(self) -> tuple[Correction, T]:
        """Wait for its end and return correction and result. Raises what the average raised."""
        if self.failed and self._failure is not None:
            raise self._failure
        if self._outcome is None:
            raise RuntimeError("the overlapped average ended without a result")
        return self._outcome

    def _run(self, average: Callable[[], tuple[Correction, T]]) -> None:
        own = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        try:
            with torch.no_grad(), own:
                outcome = average()
                if self._stream is not None:
                    self._stream.synchronize()
            self._outcome = outcome
        except BaseException as failure:
            self._failure, self._kept = failure, average
        finally:
            self._ended.set()
