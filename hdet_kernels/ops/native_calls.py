"""Plain C functions of the compiled extension, called by ctypes.

An operator of torch costs the host about a microsecond for each argument. What every step does is called without
torch's dispatcher instead. A tensor is handed over as the address of the C++ tensor in its Python object
(:func:`handle_of`), an array as that of its first element (:func:`address_of`).
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hdet_kernels.ops.extension import why_not

# The releases of torch in which the functions that csrc/live_tensors.cpp takes by their symbols have the signatures
# that it expects. The stable ABI does not have them, so a new release has to be looked at first.
_OLDEST_TORCH, _NEWEST_TORCH = (2, 11), (2, 13)

# The types whose C++ tensors have everything: a subclass may keep its data and gradient elsewhere.
_PLAIN = (Tensor, nn.Parameter)

_WORD = ctypes.sizeof(ctypes.c_int64)

_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64

# The arguments of the functions. These hold the GIL, so that no other thread replaces a gradient meanwhile.
_LOOKS: dict[str, list[Any]] = {
    "hdet_can_look": [],
    "hdet_has_members": [ctypes.py_object, _ADDRESS, _NUMBER, _NUMBER],
    "hdet_lie_at": [_ADDRESS, _NUMBER, _ADDRESS],
    "hdet_layouts": [_ADDRESS, _NUMBER, _ADDRESS, _NUMBER],
    "hdet_gradients": [_ADDRESS, _ADDRESS, _ADDRESS],
    "hdet_advance_versions": [_ADDRESS, _NUMBER],
}

# These release it: a step on the CPU takes long, and a launch waits while the queue of the device is full.
_STEPS: dict[str, list[Any]] = {
    "hdet_bound_step_bytes": [],
    "hdet_bind_step": [_NUMBER, _NUMBER, _NUMBER, _ADDRESS],
    "hdet_step_cpu": [_ADDRESS],
}

# Only in an extension with a CUDA part.
_ON_CUDA: dict[str, list[Any]] = {
    "hdet_step_cuda": [_ADDRESS],
    "hdet_write_cuda": [_NUMBER, _ADDRESS, _NUMBER],
}


@cache
def why_not_callable() -> str | None:
    """Return why the functions cannot be called here, or ``None`` if they can."""
    reason = why_not()
    if reason is not None:
        return reason
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not _OLDEST_TORCH <= release <= _NEWEST_TORCH:
        return f"torch {torch.__version__} is not one of the releases that csrc/live_tensors.cpp was written for"
    library = ctypes.CDLL(_path())
    missing = [name for name in (*_LOOKS, *_STEPS) if not hasattr(library, name)]
    if missing:
        return f"the extension lacks {', '.join(missing)}; it is of another version, build it again"
    if not looks().hdet_can_look():
        return f"torch {torch.__version__} lacks a function that csrc/live_tensors.cpp needs"
    if tensor_offset() == 0:
        return "the C++ tensor of a Python tensor was not found"
    return None


@cache
def looks() -> Any:
    """Return the functions that look at tensors, and hold the GIL."""
    return _declared(ctypes.PyDLL(_path()), _LOOKS)


@cache
def steps() -> Any:
    """Return the functions that step and write, and release the GIL. Those of CUDA may be missing."""
    library = _declared(ctypes.CDLL(_path()), _STEPS)
    library.hdet_step_error.restype = ctypes.c_char_p
    if hasattr(library, "hdet_step_cuda"):
        _declared(library, _ON_CUDA)
    return library


def is_plain(tensor: Tensor) -> bool:
    """Return whether everything of a tensor is in its C++ tensor, where it is expected."""
    return type(tensor) in _PLAIN and _word(handle_of(tensor)) == tensor._cdata


def handle_of(tensor: Tensor) -> int:
    """Return the address of a tensor's C++ tensor. It is valid as long as the Python object lives."""
    return id(tensor) + tensor_offset()


def address_of(array: NDArray[np.generic]) -> int:
    """Return the address of an array's first element. It must be contiguous, and live as long as the address."""
    address: int = array.__array_interface__["data"][0]
    return address


def _path() -> str:
    spec = importlib.util.find_spec("hdet_kernels._native")
    assert spec is not None
    assert spec.origin is not None
    return spec.origin


def _declared(library: Any, functions: dict[str, list[Any]]) -> Any:
    for name, arguments in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _NUMBER
    return library


@cache
def tensor_offset() -> int:
    """Return where in a Python tensor its C++ tensor lies, in bytes; 0 if it is not found.

    It is the word with the value of ``_cdata``.
    """
    probe = torch.empty(0)
    offsets = range(_WORD, Tensor.__basicsize__ - _WORD + 1, _WORD)
    return next((offset for offset in offsets if _word(id(probe) + offset) == probe._cdata), 0)


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value
