"""The chunk table: how one launch walks many parameters whose gradients lie wherever autograd put them.

Parameters and state are flat (:class:`hdet_kernels.buckets.Buckets`); a *slot* is one parameter's span of the flat
buffer. Three small tables on the device describe the work, by how often they change:

========== ===================== ==================================== =================
table      shape                 a row                                changes
========== ===================== ==================================== =================
slots      [slots, 3] int64      flat offset, count, group row        never
chunks     [chunks, 2] int32     slot, index of the chunk in the slot never
addresses  [slots] int64         gradient address, or NO_GRADIENT     when one moved
========== ===================== ==================================== =================

``csrc/table.h`` has the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdet_kernels.buckets import Slot
from hdet_kernels.ops.table import Staged

#: Elements of a chunk: what one thread block works on at a time.
CHUNK = 4096

#: Instead of an address: this slot has no gradient and is left alone, its step count too.
NO_GRADIENT = 0

#: Instead of an address: an empty gradient. Nothing to read, but the step counts.
EMPTY_GRADIENT = 1


@dataclass(frozen=True)
class Gradients:
    """Gradients (``None`` where there is none) whose elements lie in memory in the order of their slots, and their
    addresses. Made by :meth:`ChunkTable.match`, which is what makes it safe to hand the addresses to a kernel."""

    tensors: list[Tensor | None]
    addresses: list[int]
    copied: bool = False  # whether one of them had another layout or dtype and is a copy

    @property
    def present(self) -> list[Tensor]:
        return [grad for grad in self.tensors if grad is not None]


class ChunkTable:
    """The tables of one flat buffer. ``slots`` are its parameters, each once; ``rows`` their hyperparameter rows."""

    def __init__(self, slots: Sequence[Slot], rows: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        if len(slots) != len(rows):
            raise ValueError(f"got {len(slots)} slots and {len(rows)} rows; every slot needs a hyperparameter row")
        self.entries = tuple(slots)
        self.rows = tuple(rows)
        self.device, self.dtype = device, dtype
        table = [(slot.offset, slot.numel, row) for slot, row in zip(slots, rows, strict=True)]
        self.slots = torch.tensor(table, dtype=torch.int64, device=device).view(-1, 3)
        self.chunks = _chunks_of([slot.numel for slot in slots]).to(device)
        self._addresses = Staged((len(slots),), torch.int64, device)
        self._expected = [(slot.numel, slot.stride) for slot in slots]
        self._ordinal = -1 if device.index is None else device.index
        #: What the buffers must have at least: elements of the flat buffer, rows of the hyperparameter table.
        self.extent = max((slot.offset + slot.numel for slot in slots), default=0)
        self.row_count = max(rows, default=-1) + 1

    def match(self, grads: Sequence[Tensor | None]) -> Gradients:
        """Check one gradient a slot. One of another layout or dtype than its parameter is copied into it."""
        tensors: list[Tensor | None] = []
        addresses: list[int] = []
        copied = False
        dtype, ordinal = self.dtype, self._ordinal
        for index, (grad, (numel, stride)) in enumerate(zip(grads, self._expected, strict=True)):
            if grad is None:
                tensors.append(None)
                addresses.append(NO_GRADIENT)
                continue
            if (
                grad.layout is not torch.strided
                or grad.dtype is not dtype
                or grad.numel() != numel
                or grad.stride() != stride
                or grad.get_device() != ordinal
            ):
                given, grad = grad, self._brought_into_place(index, grad)
                copied |= grad is not given
            tensors.append(grad)
            addresses.append(grad.data_ptr() or EMPTY_GRADIENT)
        return Gradients(tensors, addresses, copied)

    def point_at(self, grads: Gradients) -> Tensor:
        """The addresses on the device, written only if one changed."""
        self._addresses.write(grads.addresses)
        return self._addresses.tensor

    def _brought_into_place(self, index: int, grad: Tensor) -> Tensor:
        slot = self.entries[index]
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of parameter {index}, of shape {slot.shape}, has layout {grad.layout}; fused optimizers "
                "need dense gradients: use sparse=False in the embedding, or give this parameter to torch.optim"
            )
        if grad.device != self.device or tuple(grad.shape) != slot.shape:
            raise RuntimeError(
                f"the gradient of parameter {index} is {tuple(grad.shape)} on {grad.device}; its parameter is "
                f"{slot.shape} on {self.device}"
            )
        strides = zip(slot.shape, grad.stride(), slot.stride, strict=True)
        if grad.dtype == self.dtype and all(size == 1 or got == own for size, got, own in strides):
            return grad
        home = torch.empty_strided(slot.shape, slot.stride, dtype=self.dtype, device=self.device)
        return home.copy_(grad)


def _chunks_of(counts: Sequence[int]) -> Tensor:
    """[chunks, 2] int32: slot and index within the slot, in memory order."""
    per_slot = torch.tensor([-(-count // CHUNK) for count in counts], dtype=torch.int64)
    slot = torch.repeat_interleave(torch.arange(len(counts)), per_slot)
    first = torch.cumsum(per_slot, 0) - per_slot
    index = torch.arange(slot.numel()) - first[slot]
    return torch.stack([slot, index], dim=1).to(torch.int32).contiguous()
