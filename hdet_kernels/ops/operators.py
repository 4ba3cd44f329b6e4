"""The operators: those that are written in Python are registered here, and the compiled ones are loaded.

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

# Parts of the schemas that all backends share. csrc/library.cpp repeats them.
FLATS = (
    "int rule, Tensor(a!) param, Tensor(b!)? master, Tensor(c!)? state0, Tensor(d!)? state1, Tensor(e!)? state2, "
    "Tensor(f!)? scales0, Tensor(g!)? scales1, Tensor(h!) steps, Tensor table"
)
SCALARS = "Tensor? grad_scale, Tensor? norm, Tensor? found_inf, bool stochastic_rounding, int rows"
ENCODE = "int format, Tensor x, Tensor consensus, Tensor(a!)? error, Tensor(b!) wire"
MERGE = "int format, Tensor wires, float divisor, Tensor(a!)? error, Tensor(b!) wire"
ROWWISE = (
    "Tensor(a!) param, Tensor(b!) sums, Tensor steps, Tensor table, int table_row, Tensor values, Tensor? rows, "
    "Tensor? order, Tensor? grad_scale, Tensor? found_inf, bool decoupled, bool stochastic_rounding"
)
DECODE = "int format, Tensor wire, Tensor(a!) consensus, Tensor(b!)? target"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(name: str, arguments: str, returns: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Declare ``hdet_kernels::name`` with its kernel and fake kernel, and return the operator.

    Args:
        name: The operator's name within the namespace.
        arguments: The arguments of its schema; those that it changes are marked, as in ``Tensor(a!)``.
        returns: The return type of its schema.
        kernel: The implementation, for every device.
        fake: The fake kernel, which returns empty tensors of the right shape and dtype.
    """
    _library.define(f"{name}({arguments}) -> {returns}")
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(torch.ops.hdet_kernels, name).default


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
