"""The compiled operators: the extension that has them is loaded here, and they get their fake kernels.

An operator with a fake kernel can be traced: ``torch.compile`` calls it without looking inside. ``csrc/library.cpp``
declares the compiled operators; :mod:`~hdet_kernels.ops.compiled` calls them. The extension ``hdet_kernels._native``
only registers operators with torch (stable ABI). It is not a Python module, so it is loaded as a shared library, on
first use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.tensors import wide_dtype

NAMESPACE = "hdet_kernels"


def fake_in_place(*arguments: object) -> None:
    """Return nothing, as every operator that works in place does. Its schema names the tensors that it changes."""


def fake_norm(chunks: Tensor, gradients: object, rows: int) -> Tensor:
    """Return an empty tensor of the shape and dtype of ``grad_norm``'s result."""
    return chunks.new_empty((rows,), dtype=wide_dtype(chunks.device))


_FAKES: dict[str, Callable[..., Any]] = {
    "step_": fake_in_place,
    "grad_norm": fake_norm,
    "pack": fake_in_place,
    "unpack": fake_in_place,
    "encode": fake_in_place,
    "merge": fake_in_place,
    "decode": fake_in_place,
    "rowwise_adagrad_": fake_in_place,
    "join_halves": fake_in_place,
    "split_into_halves": fake_in_place,
}
# Operators that work on the host, whatever the device of their tensors, and are not traced.
_UNTRACED = ("has_cuda", "fill_gradient_table", "write_", "divide")


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
