"""Which backends can run here, and if one cannot, why. The only place that asks what the machine has.

A backend is probed when it is first needed, never at import: without a compiler, a GPU or Triton the package still
imports, and :func:`backends` says what is missing.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache

import torch

#: Environment variable that sets the backend for a whole process.
ENVIRONMENT = "HDET_BACKEND"

#: The backends that serve a kind of device, fastest first. Any other device has ``torch`` alone. Triton serves the CPU
#: only through its interpreter, which is for tests: it comes last, and never by itself.
_BY_DEVICE: dict[str, tuple[str, ...]] = {"cuda": ("cuda", "triton", "torch"), "cpu": ("cpp", "torch", "triton")}

_chosen: str | None = None


def backends() -> dict[str, str]:
    """``{name: "ok" or the reason why it cannot be used here}`` for every backend of this version."""
    return {name: _reason(name) or "ok" for name in _PROBES}


def use_backend(name: str | None) -> None:
    """Set the backend of this process, over :data:`ENVIRONMENT`; ``None`` goes back to choosing by device."""
    global _chosen
    if name is not None:
        _check_available(name, "use_backend()")
    _chosen = name


def chosen() -> str | None:
    """What :func:`use_backend` set."""
    return _chosen


def resolve(device: torch.device | str, requested: str | None = None) -> str:
    """The backend that runs on ``device``: ``requested``, else :func:`use_backend`, else ``HDET_BACKEND``, else the
    fastest available. A request that cannot be met raises; it never falls back to another backend."""
    kind = torch.device(device).type
    serving = _BY_DEVICE.get(kind, ("torch",))
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


def _check_available(name: str, origin: str) -> None:
    if name not in _PROBES:
        raise ValueError(f"unknown backend {name!r} ({origin}); choose one of {', '.join(_PROBES)}. {_listing()}")
    if _reason(name) is not None:
        raise RuntimeError(f"backend {name!r} ({origin}) is not available. {_listing()}")


def _listing() -> str:
    return "Here: " + "; ".join(f"{name}: {state}" for name, state in backends().items())


@cache
def _reason(name: str) -> str | None:
    return _PROBES[name]()


def _why_not_cuda() -> str | None:
    from hdet_kernels.ops import native

    if (missing := native.why_not()) is not None:
        return missing
    if not native.has_kernels("CUDA"):
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


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _why_not_cpp() -> str | None:
    from hdet_kernels.ops import native

    return native.why_not()


def _why_not_torch() -> str | None:
    return None


_PROBES: dict[str, Callable[[], str | None]] = {
    "cuda": _why_not_cuda,
    "triton": _why_not_triton,
    "cpp": _why_not_cpp,
    "torch": _why_not_torch,
}
