"""The layouts of many tensors, compared with those of an earlier call.

What is known about tensors (which of them share memory, a hash of their shapes, the addresses for a kernel) holds as
long as none of them has changed its layout: address, dtype, device, shape and strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_kernels.sharded import part_of

# Of one tensor: address, dtype, device, shape and strides.
_Layout = tuple[int, torch.dtype, torch.device, tuple[int, ...], tuple[int, ...]]


class LiveLayouts:
    """Tensors and their layouts at an earlier call. It keeps none of them alive."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._layouts: list[_Layout] | None = None

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """Take these tensors, with the layouts that they have now, as the expected ones."""
        self._ids = list(map(id, tensors))
        self._layouts = _layouts_of(tensors)

    def match(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the expected tensors, in this order, and have the layouts that are expected.

        Another tensor in the place of one that was freed counts as the same, if it has the same layout.
        """
        if self._layouts is None or list(map(id, tensors)) != self._ids:
            return False
        return _layouts_of(tensors) == self._layouts


def _layouts_of(tensors: Sequence[Tensor]) -> list[_Layout] | None:
    """Return the layouts; ``None`` if a tensor has none, because it is sparse, for example."""
    try:
        return [_layout_of(part_of(tensor)) for tensor in tensors]
    except RuntimeError:
        return None


def _layout_of(tensor: Tensor) -> _Layout:
    return tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()
