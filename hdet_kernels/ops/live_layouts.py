"""The layouts of many tensors, compared with those of an earlier look in one call.

What is known about tensors (which of them share memory, a hash of their shapes, the addresses for a kernel) holds as
long as none of them has changed its layout: address, dtype, device, shape and strides. To look is much less work than
to find all that out again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.ops.live_tensors import handles_of, library_for
from hdet_kernels.ops.native_calls import address_of
from hdet_kernels.sharded import part_of

# Of one tensor: address, dtype, device, shape and strides.
_Layout = tuple[int, torch.dtype, torch.device, tuple[int, ...], tuple[int, ...]]


class LiveLayouts:
    """Tensors and their layouts at the last look. It keeps none of them alive.

    Args:
        backend: The backend that works on the tensors, by name. ``"torch"`` is Python alone.
    """

    def __init__(self, backend: str | None = None) -> None:
        self._backend = backend
        self._ids: list[int] = []
        self._layouts: NDArray[np.int64] | list[_Layout] | None = None

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """Take these tensors, with the layouts that they have now, as the expected ones."""
        self._ids = list(map(id, tensors))
        self._library = library_for(tensors, self._backend)
        self._types = set(map(type, tensors))
        self._handles = handles_of(self._ids) if self._library else np.zeros(0, dtype=np.int64)
        # Most tensors have two dimensions at most. If more room is needed, it is made when that is known.
        self._room = np.empty(9 * len(tensors), dtype=np.int64)
        self._layouts = self._look(tensors)

    def match(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the expected tensors, in this order, and have the layouts that are expected.

        Another tensor in the place of one that was freed counts as the same, if it has the same layout.
        """
        if self._layouts is None or list(map(id, tensors)) != self._ids:
            return False
        if isinstance(self._layouts, list):
            return self._look(tensors) == self._layouts
        if set(map(type, tensors)) != self._types:
            return False
        found = self._look(tensors)
        return isinstance(found, np.ndarray) and np.array_equal(found, self._layouts)

    def _look(self, tensors: Sequence[Tensor]) -> NDArray[np.int64] | list[_Layout] | None:
        """Return the layouts; ``None`` if a tensor has none, because it is sparse, for example."""
        if self._library is None:
            try:
                return [_layout_of(part_of(tensor)) for tensor in tensors]
            except RuntimeError:
                return None
        size = self._words()
        if size > len(self._room):
            self._room = np.empty(size, dtype=np.int64)
            size = self._words()
        return None if size < 0 else self._room[:size].copy()

    def _words(self) -> int:
        found: int = self._library.hdet_layouts(
            address_of(self._handles), len(self._handles), address_of(self._room), len(self._room)
        )
        return found


def _layout_of(tensor: Tensor) -> _Layout:
    return tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()
