"""Tensors that every step looks at: their addresses, their gradients and their versions, for all of them in one call.

A step needs the address of every parameter and of its gradient. In Python that is several calls for each tensor, and
reading ``param.grad`` after a backward pass makes a Python object, which takes longer than everything else. The
extension (``csrc/live_tensors.cpp``) reads the C++ tensors behind the Python objects instead. Without the extension,
with the backend ``"torch"`` and for subclasses of tensors, the same is done in Python.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.native_calls import address_of, handle_of, is_plain, looks, tensor_offset, why_not_callable
from hdet_kernels.sharded import parts_of


class LiveTensors:
    """Tensors that are looked at again and again, together.

    Args:
        tensors: The tensors. They are kept alive.
        backend: The backend that works on them, by name. ``"torch"`` is Python alone.

    Attributes:
        library: The extension's functions that look at tensors; ``None`` if everything is done in Python.
        handles: For ``library``, the address of the C++ tensor of each.
    """

    def __init__(self, tensors: Iterable[Tensor], backend: str | None = None) -> None:
        self.tensors = list(tensors)
        self._parts = parts_of(self.tensors)  # of distributed tensors, whose data is in others
        self.library = _library_for(self.tensors, backend)
        handles = list(map(handle_of, self.tensors)) if self.library else []
        self.handles = np.array(handles, dtype=np.int64)
        self._handles_at = address_of(self.handles)
        self.remember_addresses()

    def are(self, members: list[Tensor]) -> bool:
        """Return whether a list has these tensors and no others, in this order."""
        if self.library is not None and type(members) is list:
            return bool(self.library.hdet_has_members(members, self._handles_at, len(self.tensors), tensor_offset()))
        return len(members) == len(self.tensors) and all(map(is_, members, self.tensors))

    def remember_addresses(self) -> None:
        """Take the addresses that the tensors have now as the expected ones."""
        self._addresses = np.array(self._addresses_now(), dtype=np.int64)
        self._addresses_at = address_of(self._addresses)

    def moved(self) -> bool:
        """Return whether a tensor has another address than expected."""
        if self.library is not None:
            found = self.library.hdet_lie_at(self._handles_at, len(self.tensors), self._addresses_at)
            if found >= 0:
                return not found
        return self._addresses_now() != self._addresses.tolist()

    def _addresses_now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._parts(self.tensors)))

    def advance_versions(self, where: NDArray[np.intp] | None = None) -> None:
        """Tell autograd that the tensors were written in place.

        Args:
            where: The indices of those that were written; all by default.
        """
        done = 0
        if self.library is not None:
            handles, at = self.handles, self._handles_at
            if where is not None:
                handles = handles[where]
                at = address_of(handles)
            done = self.library.hdet_advance_versions(at, len(handles))
            if done == len(handles):
                return
        written = self.tensors if where is None else [self.tensors[index] for index in where]
        increment_version(written[done:])


def _library_for(tensors: list[Tensor], backend: str | None) -> Any:
    """Return the library that can look at ``tensors``, or ``None``."""
    if not tensors or resolve(tensors[0].device, backend) == "torch" or why_not_callable() is not None:
        return None
    return looks() if all(map(is_plain, tensors)) else None
