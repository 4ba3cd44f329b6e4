"""The gradients that parameters have at the moment, as entries of the gradient table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.ops.chunks import MatchedGradients, is_contiguous
from hdet_kernels.ops.live_tensors import LiveTensors
from hdet_kernels.ops.native_calls import address_of
from hdet_kernels.tensors import Slot

# Bits of what the extension's function returns. csrc/live_tensors.cpp has the same.
PRESENT, ABSENT, MOVED = 1, 2, 4

#: The most bytes of tables that are allocated for later steps.
SPARE_BYTES = 1 << 16


class LiveGradients:
    """Gradients of parameters, checked against the slots of the parameters in one call of the extension.

    Args:
        params: The parameters, one for each slot.
        slots: Their slots.
        dtype: The dtype of the parameters.
    """

    def __init__(self, params: LiveTensors, slots: Sequence[Slot], dtype: torch.dtype) -> None:
        self._library = params.library
        self._tensors = _GradientsOf(params.tensors)
        orders = [() if is_contiguous(slot) else slot.stride for slot in slots]
        # They are read through their addresses in `expected`, so they are kept.
        self._arrays = handles, counts, starts, strides = (
            params.handles,
            np.array([slot.numel for slot in slots], dtype=np.int64),
            np.cumsum([0, *map(len, orders)], dtype=np.int64),
            np.array([stride for order in orders for stride in order], dtype=np.int64),
        )
        rest = (address_of(counts), address_of(starts), address_of(strides), int(dtype == torch.float64))
        self._expected = np.array([address_of(handles), len(handles), *rest], dtype=np.int64)
        self._expected_at = address_of(self._expected)
        self._last: MatchedGradients | None = None
        self._table = np.zeros((len(slots), 2), dtype=np.int64)
        self._table_at = address_of(self._table)
        self._spare: list[tuple[NDArray[np.int64], int]] = []
        self._renew_next()

    def match(self) -> MatchedGradients | None:
        """Return the gradients that the parameters have now; ``None`` if they have to be looked at in Python.

        Gradients at the addresses of the last call are the same object again.
        """
        if self._library is None:
            return None
        found = self._library.hdet_gradients(self._expected_at, self._table_at, self._next_at)
        if found < 0:
            return None
        if self._last is None or found & MOVED:
            table, at = self._table, self._table_at = self._next, self._next_at
            self._renew_next()
            present, absent = bool(found & PRESENT), bool(found & ABSENT)
            self._last = MatchedGradients(self._tensors, table, any=present, complete=not absent, address=at)
        return self._last

    def _renew_next(self) -> None:
        """Take new memory for the next table: gradients that were returned keep theirs."""
        if not self._spare:
            size = self._table.nbytes
            # Several at once: after a backward pass, making an array takes longer than a look at 100 gradients.
            tables = np.empty((min(max(SPARE_BYTES // max(size, 1), 1), 16), *self._table.shape), dtype=np.int64)
            first = address_of(tables)
            self._spare = [(table, first + size * number) for number, table in enumerate(tables)]
        self._next, self._next_at = self._spare.pop()


class _GradientsOf(Sequence[Tensor | None]):
    """The gradients of parameters, read when they are asked for."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params

    def __len__(self) -> int:
        return len(self._params)

    @overload
    def __getitem__(self, index: int) -> Tensor | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor | None]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor | None] | None:
        if isinstance(index, slice):
            return [param.grad for param in self._params[index]]
        return self._params[index].grad
