"""Loading of the compiled extension ``hdet_kernels._native``, and the fake kernels of its operators.

``csrc/library.cpp`` declares the operators; :mod:`~hdet_kernels.ops.compiled` calls them. The library only registers
operators with torch (stable ABI). It is not a Python module, so it is loaded as a shared library, on first use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from hdet_kernels.ops.operators import NAMESPACE, fake_in_place, fake_norm

_FAKES: dict[str, Callable[..., Any]] = {
    "step_": fake_in_place,
    "grad_norm": fake_norm,
    "pack": fake_in_place,
    "unpack": fake_in_place,
    "encode": fake_in_place,
    "merge": fake_in_place,
    "decode": fake_in_place,
    "rowwise_adagrad_": fake_in_place,
    "pair_mean_": fake_in_place,
    "join_halves": fake_in_place,
    "split_into_halves": fake_in_place,
}
# Operators that have no CUDA kernel.
_CPU_ALONE = ("pair_mean_", "join_halves", "split_into_halves")


@cache
def why_not() -> str | None:
    """Load the extension. Return ``None`` if it can be used, else the reason why it cannot."""
    spec = importlib.util.find_spec("hdet_kernels._native")
    if spec is None or spec.origin is None:
        return (
            "the extension hdet_kernels._native is not built; "
            "build it with a C++ compiler: pip install --no-build-isolation -e ."
        )
    try:
        torch.ops.load_library(spec.origin)
    except OSError as error:
        return (
            f"the extension {spec.origin} could not be loaded ({error}); build it again for torch {torch.__version__}"
        )
    if not has_kernels("CPU"):
        return f"the extension {spec.origin} lacks one of {', '.join(_FAKES)}; it is of another version, build it again"
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
    return None


def has_kernels(dispatch_key: str) -> bool:
    """Return whether the loaded extension implements every operator for ``dispatch_key`` (``"CPU"`` or ``"CUDA"``)."""
    names = [f"{NAMESPACE}::{name}" for name in _FAKES if dispatch_key == "CPU" or name not in _CPU_ALONE]
    return all(
        torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key)
        for name in names
    )
