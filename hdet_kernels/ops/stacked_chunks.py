"""The chunk table of stacked parameters: R replicas as the rows of one flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.ops.chunks import EMPTY_GRADIENT, ChunkTable, MatchedGradients
from hdet_kernels.tensors import Slot


class StackedTable(ChunkTable):
    """The tables of a flat buffer [replicas, n] of stacked parameters, whose gradients are [replicas, …].

    With ``shares_state`` the tables describe one replica, and all replicas have the same gradient (expanded, with a
    stride of 0). Otherwise they have slots and chunks for each replica, one after the other, as for ``replicas · n``
    elements: replica r steps a slot of table row g with table row ``r · table_rows_per_replica + g``.

    Args:
        slots: The parameters of one replica.
        table_rows: For each slot, its row of the hyperparameter table within one replica's rows.
        device: The device of the buffer.
        dtype: The dtype of the buffer.
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
        self._expect(slots)
        self._counts = [replicas * slot.numel for slot in slots]
        self._shared = [(0, *slot.stride) for slot in slots]
        self._local = [(max(slot.numel, 1), *slot.stride) for slot in slots]

    def _common_layout(
        self, grads: Sequence[Tensor | None], present: Sequence[Tensor | None], where: list[int] | None
    ) -> str | None:
        strides = list(map(Tensor.stride, present))  # type: ignore[arg-type]
        if strides == _at(self._shared, where):
            return "shared"
        if self.shares_state and self.replicas > 1:
            return None
        if strides == _at(self._local, where):
            return "local"
        if not self._permuted and all(map(Tensor.is_contiguous, present)):  # type: ignore[arg-type]
            return "local"
        return None

    def _matched(
        self, grads: Sequence[Tensor | None], table: NDArray[np.int64], any: bool, copied: bool = False
    ) -> MatchedGradients:
        return MatchedGradients(grads, table, any, copied, replicas=len(self.entries) // max(len(self._expected), 1))

    def _for_all_replicas(self, table: NDArray[np.int64], grads: Sequence[Tensor | None]) -> NDArray[np.int64]:
        if self.shares_state:
            return table
        apart = np.array([0 if grad is None else grad.stride(0) * grad.element_size() for grad in grads])
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


def _at(strides: list[tuple[int, ...]], where: list[int] | None) -> list[tuple[int, ...]]:
    return strides if where is None else [strides[index] for index in where]
