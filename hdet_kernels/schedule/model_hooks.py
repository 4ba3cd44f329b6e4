"""Hooks on the user's model: one before its ``state_dict()``, and one after its ``load_state_dict()``.

They call methods of a scheduler as long as it lives. In a copy of the model (``copy.deepcopy``, ``torch.save(model)``)
there are others in their places, which do nothing and need no part of this package.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hdet_kernels.stack import ReplicaStack
from hdet_kernels.torch_internals import uncompiled


class _Hook:
    """Calls a bound method as long as its object lives, and returns nothing."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *arguments: Any) -> None:
        if (method := self._method()) is not None:
            method(*arguments)

    def __reduce__(self) -> Any:
        # A function of the standard library that takes anything and does nothing.
        return getattr, (contextlib.nullcontext(), "__exit__")


def call_before_saving(model: object, method: Callable[..., None]) -> None:
    """Call a bound method before each ``state_dict()`` of a module, which its wrappers call too."""
    if isinstance(model, nn.Module):
        inner = uncompiled(model)
        while isinstance(inner, DistributedDataParallel | DataParallel):
            inner = uncompiled(inner.module)
        _keep(inner.register_state_dict_pre_hook(_Hook(method)), method)


def call_after_loading(model: object, method: Callable[..., None]) -> None:
    """Call a bound method, with the module, after each ``load_state_dict()`` of a stack or of a module with buffers."""
    found = model.modules() if isinstance(model, nn.Module) else [model] if isinstance(model, ReplicaStack) else []
    for module in found:
        if any(True for _ in _own_buffers(module)):
            _keep(module.register_load_state_dict_post_hook(_Hook(method)), method)


def _own_buffers(module: nn.Module | ReplicaStack) -> Iterator[Any]:
    return iter(module.buffers(recurse=False) if isinstance(module, nn.Module) else module.buffers())


def _keep(handle: Any, method: Any) -> None:
    """Remove a hook when the object of its method is garbage-collected."""
    weakref.finalize(method.__self__, handle.remove).atexit = False
