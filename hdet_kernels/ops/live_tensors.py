"""Tensors that every step looks at: their addresses, their gradients and their versions, for all of them in one call.

A step needs the address of every parameter and of its gradient. In Python that is several calls for each tensor, and
reading ``param.grad`` after a backward pass makes a Python object, which takes longer than everything else. The
extension (``csrc/live_tensors.cpp``) reads the C++ tensors behind the Python objects instead. Without the extension,
with the backend ``"torch"`` and for subclasses of tensors, the same is done in Python.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.extension import why_not
from hdet_kernels.sharded import parts_of

# The releases of torch in which the functions that csrc/live_tensors.cpp takes by their symbols have the signatures
# that it expects. The stable ABI does not have them, so a new release has to be looked at first.
_OLDEST_TORCH, _NEWEST_TORCH = (2, 11), (2, 13)

# The types whose C++ tensors have everything: a subclass may keep its data and gradient elsewhere.
_PLAIN = (Tensor, nn.Parameter)

_WORD = ctypes.sizeof(ctypes.c_int64)


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
        self.library = library_for(self.tensors, backend)
        self.handles = handles_of(map(id, self.tensors)) if self.library else np.zeros(0, dtype=np.int64)
        self._handles_at = address_of(self.handles)
        self.remember_addresses()

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


def address_of(array: NDArray[np.int64]) -> int:
    """Return the address of an array's first element. It must be contiguous, and live as long as the address."""
    address: int = array.__array_interface__["data"][0]
    return address


@cache
def why_not_compiled() -> str | None:
    """Return why the extension cannot look at tensors here, or ``None`` if it can."""
    reason = why_not()
    if reason is not None:
        return reason
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not _OLDEST_TORCH <= release <= _NEWEST_TORCH:
        return f"torch {torch.__version__} is not one of the releases that csrc/live_tensors.cpp was written for"
    if not _library().hdet_can_look():
        return f"torch {torch.__version__} lacks a function that csrc/live_tensors.cpp needs"
    if _tensor_offset() == 0:
        return "the C++ tensor of a Python tensor was not found"
    return None


def library_for(tensors: Sequence[Tensor], backend: str | None) -> Any:
    """Return the extension's functions that can look at ``tensors``, or ``None``."""
    if not tensors or resolve(tensors[0].device, backend) == "torch" or why_not_compiled() is not None:
        return None
    # All tensors of a type have their C++ tensor at the same place, so one of each is looked at.
    return _library() if all(map(_is_plain, {type(tensor): tensor for tensor in tensors}.values())) else None


def handles_of(ids: Iterable[int]) -> NDArray[np.int64]:
    """Return, for :func:`library_for`, the address of the C++ tensor of each Python tensor, given by its ``id``."""
    handles: NDArray[np.int64] = np.fromiter(ids, dtype=np.int64) + _tensor_offset()
    return handles


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and _word(id(tensor) + _tensor_offset()) == tensor._cdata


@cache
def _library() -> Any:
    spec = importlib.util.find_spec("hdet_kernels._native")
    assert spec is not None
    library = ctypes.PyDLL(spec.origin)  # PyDLL: the GIL is held, so no other thread replaces a gradient meanwhile
    address, number = ctypes.c_void_p, ctypes.c_int64
    for name, arguments in {
        "hdet_can_look": [],
        "hdet_lie_at": [address, number, address],
        "hdet_layouts": [address, number, address, number],
        "hdet_gradients": [address, address, address],
        "hdet_advance_versions": [address, number],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number
    return library


@cache
def _tensor_offset() -> int:
    """Return where in a Python tensor its C++ tensor lies, in bytes; 0 if it is not found.

    It is the word with the value of ``_cdata``.
    """
    probe = torch.empty(0)
    offsets = range(_WORD, Tensor.__basicsize__ - _WORD + 1, _WORD)
    return next((offset for offset in offsets if _word(id(probe) + offset) == probe._cdata), 0)


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value
