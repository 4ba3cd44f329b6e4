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
# Operators that work on the host, whatever the device of their tensors, and are not traced.
_UNTRACED = ("has_cuda", "fill_gradient_table", "write_")


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
    missing = [name for name in (*_FAKES, *_UNTRACED) if not hasattr(torch.ops.hdet_kernels, name)]
    if missing:
        return f"the extension {spec.origin} lacks {', '.join(missing)}; it is of another version, build it again"
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
    return None


@cache
def has_cuda() -> bool:
    """Return whether the extension can be used and has kernels for CUDA."""
    return why_not() is None and bool(torch.ops.hdet_kernels.has_cuda())
