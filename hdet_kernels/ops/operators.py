"""Registration of the operators that are written in Python; ``csrc/library.cpp`` declares the compiled ones.

A registered operator with a fake kernel can be traced: ``torch.compile`` calls it without looking inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.tensors import wide_dtype

NAMESPACE = "hdet_kernels"

# Parts of the schemas that all backends share. csrc/library.cpp repeats them.
FLATS = (
    "int rule, Tensor(a!) param, Tensor(b!)? master, Tensor(c!)? state0, Tensor(d!)? state1, Tensor(e!)? state2, "
    "Tensor(f!)? scales0, Tensor(g!)? scales1, Tensor(h!)? scales2, Tensor(i!) steps, Tensor table"
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
