"""The chunk table: how one launch walks many parameters whose gradients lie wherever autograd put them.

Parameters and state are flat (:class:`hdet_kernels.buckets.Buckets`); a *slot* is one parameter's span of the flat
buffer, and a *chunk* a part of a slot. Three small int64 tables on the device describe the work, by how often they
change:

========== =========== ================================================== =================
table      shape       a row                                              changes
========== =========== ================================================== =================
slots      [slots, 3]  flat offset, count, row of the hyperparameters     never
chunks     [chunks, 4] flat offset, offset in the slot, count, slot       never
gradients  [slots, 2]  address, or NO_GRADIENT; index in GRADIENT_DTYPES  when one moved
========== =========== ================================================== =================

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

#: Elements of a chunk at most: what one thread block works on at a time. ``csrc/step_cuda.cu`` says how it was chosen.
CHUNK = 2048

#: Instead of an address: this slot has no gradient and is left alone, its step count too.
NO_GRADIENT = 0

#: Instead of an address: an empty gradient. Nothing to read, but the step counts.
EMPTY_GRADIENT = 1

#: The dtypes of gradients, by their number in the table. The order is that of ``csrc/table.h``.
GRADIENT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_dtype_of = attrgetter("dtype")


@dataclass(frozen=True)
class MatchedGradients:
    """Gradients (``None`` where there is none) whose elements lie in memory in the order of their slots, and their
    rows of the table. Made by :meth:`ChunkTable.match`, which makes it safe to hand the addresses to a kernel."""

    tensors: Sequence[Tensor | None]
    table: NDArray[np.int64]
    any: bool  # whether there is one at all
    copied: bool = False  # whether one of them had another layout or an unknown dtype and is a copy
    permanent: bool = False  # whether they will be there, at these addresses, in every step to come
    replicas: int | None = None  # each of the tensors is [replicas, …], and the table has a row for each replica


class ChunkTable:
    """The tables of one flat buffer. ``slots`` are its parameters, each once; ``rows`` their hyperparameter rows."""

    def __init__(self, slots: Sequence[Slot], rows: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        if len(slots) != len(rows):
            raise ValueError(f"got {len(slots)} slots and {len(rows)} rows; every slot needs a hyperparameter row")
        self.entries = tuple(slots)
        self.rows = tuple(rows)
        self.device, self.dtype = device, dtype
        table = [(slot.offset, slot.numel, row) for slot, row in zip(slots, rows, strict=True)]
        spans = np.array(table, dtype=np.int64).reshape(-1, 3)
        self.slots = torch.from_numpy(spans).to(device)
        whole = np.stack([spans[:, 0], np.zeros(len(spans), np.int64), spans[:, 1], np.arange(len(spans))], axis=1)
        self.chunks = torch.from_numpy(chunks_of(whole)).to(device)
        self._gradients = Staged((len(slots), 2), torch.int64, device)
        self._pointed: NDArray[np.int64] | None = None
        #: Addresses, where they are, their dtype's number and layout, and the table of all that: as it was last time.
        self._known: tuple[list[int], list[int] | None, int, str, NDArray[np.int64]] | None = None
        self._expect(slots)
        self._numbers = _dtypes_for(dtype)
        #: What the buffers must have at least: elements of the flat buffer, rows of the hyperparameter table.
        self.extent = max((slot.offset + slot.numel for slot in slots), default=0)
        self.row_count = max(rows, default=-1) + 1

    def _expect(self, slots: Sequence[Slot]) -> None:
        """Note what :meth:`match` looks for in the gradients, one for each of ``slots``."""
        self._expected = tuple(slots)
        self._counts = [slot.numel for slot in slots]
        self._empty = [index for index, slot in enumerate(slots) if slot.numel == 0]
        self._plain = [i for i, slot in enumerate(slots) if _is_contiguous(slot)]
        self._permuted = [i for i, slot in enumerate(slots) if not _is_contiguous(slot)]
        self._strides = [slots[i].stride for i in self._permuted]

    def match(self, grads: Sequence[Tensor | None]) -> MatchedGradients:
        """Check one gradient a slot. One that lies in another order than its parameter, or whose dtype the kernels
        do not read, is copied."""
        # The usual case, without a line of Python for each tensor: in order, and all of one size and dtype. (That a
        # gradient is on the device of its parameter is torch's own rule.)
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
            rows = slice(None) if where is None else where
            table[rows, 0] = np.frombuffer(array("q", addresses), dtype=np.int64)  # faster than from a list
            table[rows, 1] = number
            table[self._empty, 0] = [
                EMPTY_GRADIENT if grads[index] is not None else NO_GRADIENT for index in self._empty
            ]
            self._known = addresses, where, number, layout, self._for_all_replicas(table, grads)
        return self._matched(grads, self._known[4], any=True)

    def point_at(self, grads: MatchedGradients) -> Tensor:
        """The gradients' rows on the device, written only if one changed."""
        # A captured graph writes the addresses that it was captured with: other steps may have written others since.
        if grads.table is not self._pointed or (not grads.permanent and self._gradients.capturing):
            self._gradients.write(grads.table)
            self._pointed = grads.table if self._gradients.settled else None
        return self._gradients.tensor

    def _common_dtype(self, present: Sequence[Tensor | None], where: list[int] | None) -> int | None:
        """The number of the dtype of all gradients, if they have one and each is as large as its slot."""
        dtypes = set(map(_dtype_of, present))
        expected = self._counts if where is None else [self._counts[index] for index in where]
        if len(dtypes) != 1 or list(map(Tensor.numel, present)) != expected:  # type: ignore[arg-type]
            return None
        return self._numbers.get(dtypes.pop())

    def _empties(self, where: list[int] | None) -> int:
        """How many of the gradients at ``where`` have no elements, and so no address."""
        if where is None or not self._empty:
            return len(self._empty)
        return len(set(where).intersection(self._empty))

    def _common_layout(
        self, grads: Sequence[Tensor | None], present: Sequence[Tensor | None], where: list[int] | None
    ) -> str | None:
        """How all gradients lie in memory, if they lie as their parameters do."""
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
        """The table of the gradients, given where each begins."""
        return table

    def _match_one_by_one(self, grads: Sequence[Tensor | None]) -> MatchedGradients:
        tensors: list[Tensor | None] = []
        table = np.zeros((len(self._expected), 2), dtype=np.int64)
        copied = False
        for index, given in enumerate(grads):
            if given is None:
                tensors.append(None)
                continue
            grad = self._brought_into_place(index, given)
            copied |= grad is not given
            tensors.append(grad)
            table[index] = grad.data_ptr() or EMPTY_GRADIENT, self._numbers[grad.dtype]
        there = any(tensor is not None for tensor in tensors)
        return self._matched(tensors, self._for_all_replicas(table, tensors), there, copied)

    def _brought_into_place(self, index: int, grad: Tensor) -> Tensor:
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
    """The gradients as 1-D tensors in the order of their slots' elements."""
    if grads.replicas is None:
        return [None if grad is None else flat_view(grad) for grad in grads.tensors]
    rows = range(grads.replicas)
    return [None if grad is None else flat_view(grad[row]) for row in rows for grad in grads.tensors]


def _dtypes_for(param: torch.dtype) -> dict[torch.dtype, int]:
    """The gradients that kernels read for parameters of a dtype, and their numbers: halves and singles are widened to
    float32 in registers, doubles stay among themselves."""
    wide = param == torch.float64
    return {dtype: number for number, dtype in enumerate(GRADIENT_DTYPES) if (dtype == torch.float64) == wide}


def _same_order(slot: Slot, strides: Sequence[int]) -> bool:
    each = zip(slot.shape, strides, slot.stride, strict=True)
    return all(size == 1 or got == own for size, got, own in each)


def _is_contiguous(slot: Slot) -> bool:
    expected = 1
    for size, stride in zip(reversed(slot.shape), reversed(slot.stride), strict=True):
        if size != 1 and stride != expected:
            return slot.numel == 0
        expected *= size
    return True


def chunks_of(spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """Spans cut into chunks, in order. Both [n, 4]: flat offset, offset in the slot, count and slot."""
    counts = spans[:, 2]
    per_span = -(-counts // CHUNK)
    span = np.repeat(np.arange(len(spans)), per_span)
    done = (np.arange(span.size) - (np.cumsum(per_span) - per_span)[span]) * CHUNK
    offset, start, count, slot = spans[span].T
    return np.stack([offset + done, start + done, np.minimum(count - done, CHUNK), slot], axis=1)
