"""The choice of a backend: which ones can run on this machine, and why the others cannot.

This is the only place that asks what the machine has. A backend is probed when it is first needed, never at import:
without a compiler, a GPU or Triton the package still imports, and :func:`backends` says what is missing.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from hdet_kernels.checks import spell
from hdet_kernels.ops.operators import has_cuda, why_not

#: The environment variable that sets the backend of a whole process.
ENVIRONMENT = "HDET_BACKEND"

# The backends for each kind of device, fastest first. Other devices have "torch" alone. Triton runs on the CPU only
# through its interpreter, which is meant for tests, so it comes last there and is never chosen by default.
_BY_DEVICE: dict[str, tuple[str, ...]] = {"cuda": ("cuda", "triton", "torch"), "cpu": ("cpp", "torch", "triton")}

# Where the operations of each backend are, in this folder: a module for each of them, or one for all. It is imported by
# name and only when it is used: the implementations import the operations, which import this module.
_PLACES = {"torch": "torch.{}", "triton": "triton.{}", "cpp": "compiled", "cuda": "compiled"}

_chosen: str | None = None


def backends() -> dict[str, str]:
    """Return ``{name: "ok" or the reason why it cannot be used here}`` for every backend."""
    return {name: _reason(name) or "ok" for name in _PROBES}


def use_backend(name: str | None) -> None:
    """Set the backend of this process. It takes precedence over :data:`ENVIRONMENT`.

    Args:
        name: A backend by name; ``None`` goes back to choosing by device.

    Raises:
        ValueError: If there is no backend of this name.
        RuntimeError: If the backend cannot be used here.
    """
    global _chosen
    if name is not None:
        _check_available(name, "use_backend()")
    _chosen = name


def chosen() -> str | None:
    """Return the backend that :func:`use_backend` set, if any."""
    return _chosen


def resolve(device: torch.device | str, requested: str | None = None) -> str:
    """Return the name of the backend that runs on ``device``.

    It is ``requested`` if given, else that of :func:`use_backend`, else that of ``HDET_BACKEND``, else the fastest
    available. A request that cannot be met raises; it never falls back to another backend.
    """
    kind = torch.device(device).type
    serving = serving_on(kind)
    for name, origin in (
        (requested, "backend="),
        (_chosen, "use_backend()"),
        (os.environ.get(ENVIRONMENT) or None, ENVIRONMENT),
    ):
        if name is None:
            continue
        _check_available(name, origin)
        if name not in serving:
            raise ValueError(
                f"backend {name!r} ({origin}) cannot serve tensors on {kind}; "
                f"backends for {kind} are {', '.join(serving)}. {_listing()}"
            )
        return name
    return next(name for name in serving if _reason(name) is None)


def serving_on(kind: str) -> tuple[str, ...]:
    """Return the backends that can work on tensors of a kind of device, fastest first, whether available or not."""
    serving = _BY_DEVICE.get(kind, ("torch",))
    return serving if kind != "cpu" or interpreting() else tuple(name for name in serving if name != "triton")


def implementation(backend: str, operation: str) -> ModuleType:
    """Return the module that implements an operation of this folder, by the name of its module, in a backend."""
    return import_module(f"hdet_kernels.ops.{_PLACES[backend].format(operation)}")


def interpreting() -> bool:
    """Return whether Triton kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _check_available(name: str, origin: str) -> None:
    if not isinstance(name, str) or name not in _PROBES:
        raise ValueError(f"unknown backend {spell(name)} ({origin}); choose one of {', '.join(_PROBES)}. {_listing()}")
    if _reason(name) is not None:
        raise RuntimeError(f"backend {name!r} ({origin}) is not available. {_listing()}")


def _listing() -> str:
    return "Here: " + "; ".join(f"{name}: {state}" for name, state in backends().items())


@cache
def _reason(name: str) -> str | None:
    return _PROBES[name]()


def _why_not_cuda() -> str | None:
    if (missing := why_not()) is not None:
        return missing
    if not has_cuda():
        return "the compiled extension has no CUDA part: it was built without nvcc or against a torch without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no usable NVIDIA GPU"
    return None


def _why_not_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if interpreting() or torch.cuda.is_available():
        return None
    return "torch finds no usable NVIDIA GPU (TRITON_INTERPRET=1 runs the kernels in Triton's interpreter on the CPU)"


_PROBES: dict[str, Callable[[], str | None]] = {
    "cuda": _why_not_cuda,
    "triton": _why_not_triton,
    "cpp": why_not,
    "torch": lambda: None,
}
