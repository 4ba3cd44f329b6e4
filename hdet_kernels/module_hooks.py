"""Hooks on the user's modules that last as long as an object of this package, and do not keep it alive.

In a copy of the module (``copy.deepcopy``, ``torch.save(model)``) there are others in their places, which do nothing
and need no part of this package.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def weak_method(method: Any) -> Callable[[], Any]:
    """Return a function that returns a bound method as long as its object lives, and then None.

    ``weakref.WeakMethod`` has a callback that fails where the object ends after it, as while the interpreter ends.
    """
    function, reference = method.__func__, weakref.ref(method.__self__)
    return lambda: None if (owner := reference()) is None else function.__get__(owner)


class _Hook:
    """Calls a bound method as long as its object lives, and returns nothing. In a compiled module it does nothing."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = weak_method(method)

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if (method := self._method()) is not None:
            method(*arguments)

    def __reduce__(self) -> Any:
        # A function of the standard library that takes anything and does nothing.
        return getattr, (contextlib.nullcontext(), "__exit__")


def add_hook(register: Callable[..., RemovableHandle], method: Callable[..., None]) -> RemovableHandle:
    """Register a bound method as a hook until its object is garbage-collected.

    Args:
        register: the method of a module that takes a hook, such as ``module.register_state_dict_pre_hook``.
        method: the bound method. What it returns is left out.
    """
    handle = register(_Hook(method))
    weakref.finalize(method.__self__, handle.remove).atexit = False  # type: ignore[attr-defined]
    return handle
