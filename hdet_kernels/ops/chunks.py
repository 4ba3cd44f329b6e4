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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.ops.operators import why_not
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

# Bits of the result of the operator fill_gradient_table, as in csrc/gradient_table.cpp.
_PRESENT, _ABSENT, _MOVED = 1, 2, 4

# The bytes of an element of each of GRADIENT_DTYPES.
_SIZES = np.array([dtype.itemsize for dtype in GRADIENT_DTYPES], dtype=np.int64)

# What that operator takes for "no gradient".
_MISSING = torch.empty(0, dtype=torch.uint8, device="cpu")


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
    """

    tensors: Sequence[Tensor | None]
    table: NDArray[np.int64]
    any: bool
    copied: bool = False
    complete: bool = False
    permanent: bool = False
    replicas: int | None = None


class ChunkTable:
    """The tables of one flat buffer.

    Args:
        slots: The parameters of the buffer, each once.
        table_rows: For each slot, its row of the hyperparameter table.
        device, dtype: Those of the buffer.

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
        #: How many replicas the slots are of; None for gradients without a dimension of replicas.
        self._held: int | None = None
        table = [(slot.offset, slot.numel, row) for slot, row in zip(slots, table_rows, strict=True)]
        spans = np.array(table, dtype=np.int64).reshape(-1, 3)
        self.slots = torch.from_numpy(spans).to(device)
        whole = np.stack([spans[:, 0], np.zeros(len(spans), np.int64), spans[:, 1], np.arange(len(spans))], axis=1)
        self.chunks = torch.from_numpy(chunks_of(whole)).to(device)
        self._gradients = Staged((len(slots), 2), torch.int64, device)
        self._pointed: NDArray[np.int64] | None = None
        self._numbers = _dtypes_for(dtype)
        self._expect(slots, [[_layout(slot.numel, () if is_contiguous(slot) else slot.stride) for slot in slots]])
        self.extent = max((slot.offset + slot.numel for slot in slots), default=0)
        self.table_row_count = max(table_rows, default=-1) + 1

    def _expect(self, slots: Sequence[Slot], layouts: Sequence[Sequence[Sequence[int]]]) -> None:
        """Store what :meth:`match` compares gradients with: the slots, and one or more layouts that all may have."""
        self._expected = tuple(slots)
        self._layouts = [
            torch.tensor([n for each in of_all for n in each], dtype=torch.int64, device="cpu") for of_all in layouts
        ]
        self._likely_layouts = list(range(len(layouts)))
        # Of the last match: whether gradients were missing, the operator's table, and the table of all replicas.
        self._some_missing = False
        self._filled = torch.zeros((len(slots), 2), dtype=torch.int64, device="cpu")
        self._filled_array: NDArray[np.int64] = self._filled.numpy()
        self._known: NDArray[np.int64] | None = None

    def match(self, grads: Sequence[Tensor | None]) -> MatchedGradients:
        """Check one gradient for each slot.

        A gradient that lies in another order than its parameter, or whose dtype the kernels do not read, is copied.

        Raises:
            RuntimeError: If a gradient is sparse, complex or freed, or has another shape or device than its parameter.
        """
        # (torch itself ensures that a gradient is on the device of its parameter, and has its shape.)
        for layout in self._likely_layouts if why_not() is None else ():
            found = self._fill(grads, layout)
            if found < 0:
                self._known = None  # a part of the table was written
                continue
            if self._known is None or found & _MOVED:
                self._likely_layouts = [layout, *(other for other in self._likely_layouts if other != layout)]
                self._known = self._for_all_replicas(self._filled_array.copy(), layout)
            return self._matched(grads, self._known, any=bool(found & _PRESENT), complete=not found & _ABSENT)
        return self._match_one_by_one(grads)

    def _fill(self, grads: Sequence[Tensor | None], layout: int) -> int:
        """Write the table of ``grads`` by the operator, and return its result."""
        rest = self._layouts[layout], self.dtype == torch.float64, self._filled
        fill = torch.ops.hdet_kernels.fill_gradient_table.default
        if not self._some_missing:
            try:
                return int(fill(grads, *rest))
            except RuntimeError:  # one of them is None
                self._some_missing = True
        found = int(fill([_MISSING if grad is None else grad for grad in grads], *rest))
        self._some_missing = bool(found & _ABSENT)
        return found

    def point_at(self, grads: MatchedGradients) -> Tensor:
        """Return the gradient table on the device. It is written only if an entry has changed."""
        # A replayed CUDA graph writes the addresses of its capture, which other steps may have overwritten since.
        if grads.table is not self._pointed or (not grads.permanent and self._gradients.capturing):
            self._gradients.write(grads.table.tobytes())
            self._pointed = grads.table if self._gradients.settled else None
        return self._gradients.tensor

    def _matched(self, grads: Sequence[Tensor | None], table: NDArray[np.int64], **found: bool) -> MatchedGradients:
        return MatchedGradients(grads, table, replicas=self._held, **found)

    def _for_all_replicas(self, table: NDArray[np.int64], layout: int) -> NDArray[np.int64]:
        """Return the gradient table of all replicas, given that of the first and the number of the layout."""
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
        there = [tensor is not None for tensor in tensors]
        return self._matched(tensors, table, any=any(there), complete=all(there), copied=copied)

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
        if grad.is_complex():
            raise RuntimeError(
                f"the gradient of parameter {index}, of shape {slot.shape}, is {grad.dtype}, and its parameter "
                f"{self.dtype}: the imaginary part would be lost; give it a real gradient, as in gradient.real"
            )
        if grad.dtype in self._numbers and slot.in_order(grad.stride()):
            return grad
        dtype = grad.dtype if grad.dtype in self._numbers else self.dtype
        return torch.empty_strided(slot.shape, slot.stride, dtype=dtype, device=self.device).copy_(grad)


class StackedTable(ChunkTable):
    """The tables of a flat buffer [replicas, n] of stacked parameters, whose gradients are [replicas, …].

    With ``shares_state`` the tables describe one replica, and all replicas have the same gradient (expanded, with a
    stride of 0). Otherwise they have slots and chunks for each replica, one after the other, as for ``replicas · n``
    elements: replica r steps a slot of table row g with table row ``r · table_rows_per_replica + g``.

    Args:
        slots: The parameters of one replica.
        table_rows: For each slot, its row of the hyperparameter table within one replica's rows.
        device, dtype: Those of the buffer.
        replicas: The number of replicas.
        row_stride: Elements from one replica to the next in the flat buffer.
        table_rows_per_replica: Rows of the hyperparameter table that each replica has.
        shares_state: Whether the replicas share gradients and states.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        table_rows: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        *,
        replicas: int,
        row_stride: int,
        table_rows_per_replica: int,
        shares_state: bool,
    ) -> None:
        self.replicas, self.shares_state = replicas, shares_state
        held = range(1 if shares_state else replicas)
        moved = [replace(slot, offset=slot.offset + r * row_stride) for r in held for slot in slots]
        own_rows = [row + r * table_rows_per_replica for r in held for row in table_rows]
        super().__init__(moved, own_rows, device, dtype)
        shared = [_layout(replicas * slot.numel, (0, *slot.stride)) for slot in slots]
        own = [() if is_contiguous(slot) else (slot.numel, *slot.stride) for slot in slots]
        local = [_layout(replicas * slot.numel, strides) for slot, strides in zip(slots, own, strict=True)]
        self._expect(slots, [shared] if shares_state and replicas > 1 else [shared, local])
        self._held = len(held)

    def _for_all_replicas(self, table: NDArray[np.int64], layout: int) -> NDArray[np.int64]:
        numels = np.array([slot.numel for slot in self._expected], dtype=np.int64)
        return self._spread(table, layout * numels * _SIZES[table[:, 1]])

    def _match_one_by_one(self, grads: Sequence[Tensor | None]) -> MatchedGradients:
        found = super()._match_one_by_one(grads)
        apart = [0 if grad is None else grad.stride(0) * grad.element_size() for grad in found.tensors]
        return replace(found, table=self._spread(found.table, np.array(apart, dtype=np.int64)))

    def _spread(self, table: NDArray[np.int64], apart: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the table of all replicas, given that of the first and the bytes from one replica to the next."""
        if self.shares_state:
            return table
        spread = np.tile(table, (self.replicas, 1, 1))
        spread[:, :, 0] += np.arange(self.replicas)[:, None] * np.where(table[:, 0] > EMPTY_GRADIENT, apart, 0)
        return spread.reshape(-1, 2)

    def _in_slot_order(self, index: int, grad: Tensor) -> Tensor:
        slot = self._expected[index]
        shape = (self.replicas, *slot.shape)
        if grad.layout is torch.strided and tuple(grad.shape) != shape:
            raise RuntimeError(
                f"the gradient of stacked parameter {index} has shape {tuple(grad.shape)}; its parameter has {shape}"
            )
        if grad.layout is not torch.strided:
            return super()._in_slot_order(index, grad)  # raises
        shared = grad.stride(0) == 0
        if self.shares_state and self.replicas > 1 and not shared:
            raise RuntimeError(
                f"the gradient of stacked parameter {index}, of shape {shape}, differs from replica to replica, but "
                'the stack shares one: build it with ReplicaStack(…, gradients="local"), or give it one gradient, as '
                "in param.grad = gradient.expand_as(param)"
            )
        row = super()._in_slot_order(index, grad[0])
        if grad.dtype == row.dtype and row.stride() == grad.stride()[1:]:
            return grad
        if shared:
            return row.unsqueeze(0).expand(shape)
        strides = (slot.numel, *slot.stride)
        return torch.empty_strided(shape, strides, dtype=row.dtype, device=self.device).copy_(grad)


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


def _layout(numel: int, strides: Sequence[int]) -> tuple[int, ...]:
    """Return the entry of ``layouts`` of the operator fill_gradient_table; without strides it is contiguous."""
    return (numel, len(strides), *strides)


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
