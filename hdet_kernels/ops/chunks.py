"""The chunk table: it lets one launch walk many parameters whose gradients lie wherever autograd put them.

Parameters and state are flat (:class:`hdet_kernels.buckets.Buckets`). A *slot* is one parameter's span of the flat
buffer, and a *chunk* is a part of a slot. Three small int64 tables on the device describe the work:

========== =========== ================================================== ==========================
table      shape       an entry                                           is written
========== =========== ================================================== ==========================
slots      [slots, 3]  flat offset, count, row of the hyperparameters     once
chunks     [chunks, 4] flat offset, offset in the slot, count, slot       once
gradients  [slots, 2]  address, or NO_GRADIENT; index in GRADIENT_DTYPES  when a gradient has moved
========== =========== ================================================== ==========================

``csrc/table.h`` has the same layout.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.ops.table import Staged
from hdet_kernels.tensors import Slot, flat_view

#: The most elements of a chunk: one thread block works on a chunk at a time. ``csrc/step_cuda.cu`` explains the choice.
CHUNK = 2048

#: In place of an address: the slot has no gradient. It is not stepped, and its step count stays.
NO_GRADIENT = 0

#: In place of an address: the gradient has no elements. There is nothing to read, but the step is counted.
EMPTY_GRADIENT = 1

#: The dtypes of gradients; the table stores an index into them. ``csrc/table.h`` has the same order.
GRADIENT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_dtype_of = attrgetter("dtype")


@dataclass(slots=True, eq=False)  # made at every step with new gradients; frozen, that would take three times as long
class MatchedGradients:
    """Gradients that were checked against their slots, with their entries of the gradient table.

    :meth:`ChunkTable.match` makes them. Their elements lie in memory in the order of their slots, so their addresses
    are safe to hand to a kernel.

    Attributes:
        tensors: The gradients, ``None`` where a slot has none.
        table: Their entries of the gradient table, [slots, 2].
        any: Whether there is at least one gradient.
        complete: Whether every slot is known to have one.
        copied: Whether one of them is a copy, because it had another layout or a dtype that kernels do not read.
        permanent: Whether they stay at these addresses in all later steps.
        replicas: If given, each tensor is [replicas, …] and the table has entries for each replica.
        address: The address of the table's first entry, where it is known.
    """

    tensors: Sequence[Tensor | None]
    table: NDArray[np.int64]
    any: bool
    copied: bool = False
    complete: bool = False
    permanent: bool = False
    replicas: int | None = None
    address: int | None = None


class ChunkTable:
    """The tables of one flat buffer.

    Args:
        slots: The parameters of the buffer, each once.
        table_rows: For each slot, its row of the hyperparameter table.
        device: The device of the buffer.
        dtype: The dtype of the buffer.

    Attributes:
        extent: The least number of elements that the flat buffer must have.
        table_row_count: The least number of rows that the hyperparameter table must have.
    """

    def __init__(
        self, slots: Sequence[Slot], table_rows: Sequence[int], device: torch.device, dtype: torch.dtype
    ) -> None:
        if len(slots) != len(table_rows):
            raise ValueError(
                f"got {len(slots)} slots and {len(table_rows)} table rows; every slot needs one row of the "
                "hyperparameter table"
            )
        self.entries = tuple(slots)
        self.table_rows = tuple(table_rows)
        self.device, self.dtype = device, dtype
        table = [(slot.offset, slot.numel, row) for slot, row in zip(slots, table_rows, strict=True)]
        spans = np.array(table, dtype=np.int64).reshape(-1, 3)
        self.slots = torch.from_numpy(spans).to(device)
        whole = np.stack([spans[:, 0], np.zeros(len(spans), np.int64), spans[:, 1], np.arange(len(spans))], axis=1)
        self.chunks = torch.from_numpy(chunks_of(whole)).to(device)
        self._gradients = Staged((len(slots), 2), torch.int64, device)
        self._pointed: NDArray[np.int64] | None = None
        # Of the last match: addresses, indices of the slots that have a gradient, dtype number, layout, and the table.
        self._known: tuple[list[int], list[int] | None, int, str, NDArray[np.int64]] | None = None
        self._expect(slots)
        self._numbers = _dtypes_for(dtype)
        self.extent = max((slot.offset + slot.numel for slot in slots), default=0)
        self.table_row_count = max(table_rows, default=-1) + 1

    def _expect(self, slots: Sequence[Slot]) -> None:
        """Store the sizes and strides that :meth:`match` compares gradients with, one for each of ``slots``."""
        self._expected = tuple(slots)
        self._counts = [slot.numel for slot in slots]
        self._empty = [index for index, slot in enumerate(slots) if slot.numel == 0]
        self._plain = [i for i, slot in enumerate(slots) if is_contiguous(slot)]
        self._permuted = [i for i, slot in enumerate(slots) if not is_contiguous(slot)]
        self._strides = [slots[i].stride for i in self._permuted]

    def match(self, grads: Sequence[Tensor | None]) -> MatchedGradients:
        """Check one gradient for each slot.

        A gradient that lies in another order than its parameter, or whose dtype the kernels do not read, is copied.

        Raises:
            RuntimeError: If a gradient is sparse, was freed, or has another shape or device than its parameter.
        """
        # The usual case is checked without a Python statement for each tensor: all gradients lie in order, have the
        # expected sizes, and one dtype. (torch itself ensures that a gradient is on the device of its parameter.)
        present, where = grads, None
        try:
            try:
                addresses = list(map(Tensor.data_ptr, present))  # type: ignore[arg-type]
            except TypeError:  # one of them is None
                where = [index for index, grad in enumerate(grads) if grad is not None]
                present = [grads[index] for index in where]
                addresses = list(map(Tensor.data_ptr, present))  # type: ignore[arg-type]
            if not addresses:
                return self._matched(grads, np.zeros((len(self.entries), 2), dtype=np.int64), any=False)
            number = self._common_dtype(present, where)
            layout = self._common_layout(grads, present, where)
        except RuntimeError:  # sparse gradients have no address
            return self._match_one_by_one(grads)
        if number is None or layout is None or addresses.count(0) != self._empties(where):
            return self._match_one_by_one(grads)
        if self._known is None or self._known[:4] != (addresses, where, number, layout):
            table = np.zeros((len(grads), 2), dtype=np.int64)
            present_slots = slice(None) if where is None else where
            table[present_slots, 0] = np.frombuffer(array("q", addresses), dtype=np.int64)  # faster than from a list
            table[present_slots, 1] = number
            table[self._empty, 0] = [
                EMPTY_GRADIENT if grads[index] is not None else NO_GRADIENT for index in self._empty
            ]
            self._known = addresses, where, number, layout, self._for_all_replicas(table, grads)
        return self._matched(grads, self._known[4], any=True)

    def point_at(self, grads: MatchedGradients) -> Tensor:
        """Return the gradient table on the device. It is written only if an entry has changed."""
        # A replayed CUDA graph writes the addresses of its capture, which other steps may have overwritten since.
        if grads.table is not self._pointed or (not grads.permanent and self._gradients.capturing):
            if grads.address is None:
                self._gradients.write(grads.table.tobytes())
            else:
                self._gradients.write_from(grads.address)
            self._pointed = grads.table if self._gradients.settled else None
        return self._gradients.tensor

    @property
    def gradient_table(self) -> Tensor:
        """The gradient table on the device, which :meth:`point_at` writes and returns."""
        return self._gradients.tensor

    def _common_dtype(self, present: Sequence[Tensor | None], where: list[int] | None) -> int | None:
        """Return the number of the gradients' common dtype, or ``None`` if there is none or a size is wrong."""
        dtypes = set(map(_dtype_of, present))
        expected = self._counts if where is None else [self._counts[index] for index in where]
        if len(dtypes) != 1 or list(map(Tensor.numel, present)) != expected:  # type: ignore[arg-type]
            return None
        return self._numbers.get(dtypes.pop())

    def _empties(self, where: list[int] | None) -> int:
        """Return how many of the gradients at ``where`` have no elements, and therefore no address."""
        if where is None or not self._empty:
            return len(self._empty)
        return len(set(where).intersection(self._empty))

    def _common_layout(
        self, grads: Sequence[Tensor | None], present: Sequence[Tensor | None], where: list[int] | None
    ) -> str | None:
        """Return a name for the layout of all gradients, or ``None`` if one lies in another order than its slot."""
        if not self._permuted:
            in_order = all(map(Tensor.is_contiguous, present))  # type: ignore[arg-type]
        else:
            plain = [grad for index in self._plain if (grad := grads[index]) is not None]
            in_order = all(map(Tensor.is_contiguous, plain)) and all(
                grad is None or grad.stride() == stride
                for grad, stride in zip([grads[index] for index in self._permuted], self._strides, strict=True)
            )
        return "in order" if in_order else None

    def _matched(
        self, grads: Sequence[Tensor | None], table: NDArray[np.int64], any: bool, copied: bool = False
    ) -> MatchedGradients:
        return MatchedGradients(grads, table, any, copied)

    def _for_all_replicas(self, table: NDArray[np.int64], grads: Sequence[Tensor | None]) -> NDArray[np.int64]:
        """Return the gradient table of all replicas, given that of the first."""
        return table

    def _match_one_by_one(self, grads: Sequence[Tensor | None]) -> MatchedGradients:
        tensors: list[Tensor | None] = []
        table = np.zeros((len(self._expected), 2), dtype=np.int64)
        copied = False
        for index, given in enumerate(grads):
            if given is None:
                tensors.append(None)
                continue
            grad = self._in_slot_order(index, given)
            copied |= grad is not given
            tensors.append(grad)
            table[index] = grad.data_ptr() or EMPTY_GRADIENT, self._numbers[grad.dtype]
        there = any(tensor is not None for tensor in tensors)
        return self._matched(tensors, self._for_all_replicas(table, tensors), there, copied)

    def _in_slot_order(self, index: int, grad: Tensor) -> Tensor:
        """Return the gradient if kernels can read it as it is, else a copy of it in the layout of its slot."""
        slot = self._expected[index]
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
        if grad.numel() and grad.data_ptr() == 0:
            raise RuntimeError(
                f"the gradient of parameter {index}, of shape {slot.shape}, has no memory; it was freed before the step"
            )
        if grad.dtype in self._numbers and _same_order(slot, grad.stride()):
            return grad
        dtype = grad.dtype if grad.dtype in self._numbers else self.dtype
        return torch.empty_strided(slot.shape, slot.stride, dtype=dtype, device=self.device).copy_(grad)


def flat_gradients(grads: MatchedGradients) -> list[Tensor | None]:
    """Return the gradients as 1-D tensors, their elements in the order of their slots."""
    if grads.replicas is None:
        return [None if grad is None else flat_view(grad) for grad in grads.tensors]
    replicas = range(grads.replicas)
    return [None if grad is None else flat_view(grad[replica]) for replica in replicas for grad in grads.tensors]


def _dtypes_for(param: torch.dtype) -> dict[torch.dtype, int]:
    """Return the gradient dtypes that kernels read for parameters of dtype ``param``, with their numbers.

    Kernels widen 16-bit gradients to float32 in registers. float64 is never mixed with other dtypes.
    """
    wide = param == torch.float64
    return {dtype: number for number, dtype in enumerate(GRADIENT_DTYPES) if (dtype == torch.float64) == wide}


def _same_order(slot: Slot, strides: Sequence[int]) -> bool:
    each = zip(slot.shape, strides, slot.stride, strict=True)
    return all(size == 1 or got == own for size, got, own in each)


def is_contiguous(slot: Slot) -> bool:
    """Return whether the elements of a slot lie in the order of its shape."""
    expected = 1
    for size, stride in zip(reversed(slot.shape), reversed(slot.stride), strict=True):
        if size != 1 and stride != expected:
            return slot.numel == 0
        expected *= size
    return True


def chunks_of(spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cut spans into chunks, in order. Both are [n, 4]: flat offset, offset in the slot, count, slot."""
    counts = spans[:, 2]
    per_span = -(-counts // CHUNK)
    span = np.repeat(np.arange(len(spans)), per_span)
    done = (np.arange(span.size) - (np.cumsum(per_span) - per_span)[span]) * CHUNK
    offset, start, count, slot = spans[span].T
    return np.stack([offset + done, start + done, np.minimum(count - done, CHUNK), slot], axis=1)
