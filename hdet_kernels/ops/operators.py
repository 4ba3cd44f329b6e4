"""The operators that are written in Python, registered with torch; ``csrc/library.cpp`` declares the compiled ones.

A registered operator with a fake kernel can be traced: ``torch.compile`` calls it without looking inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.tensors import wide_dtype

NAMESPACE = "hdet_kernels"

#: The buffers of a step, as they stand in the schemas of all backends; ``csrc/library.cpp`` has the same.
FLATS = (
    "int rule, Tensor(a!) param, Tensor(b!)? master, Tensor(c!)? state0, Tensor(d!)? state1, Tensor(e!)? state2, "
    "Tensor(f!) steps, Tensor table"
)
SCALARS = "Tensor? grad_scale, Tensor? norm, Tensor? found_inf, bool stochastic_rounding, int rows"

#: Of the compressed average; ``csrc/library.cpp`` has the same.
ENCODE = "int format, Tensor x, Tensor consensus, Tensor(a!)? error, Tensor(b!) wire"
MERGE = "int format, Tensor wires, float divisor, Tensor(a!)? error, Tensor(b!) wire"
DECODE = "int format, Tensor wire, Tensor(a!) consensus, Tensor(b!)? target"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(name: str, arguments: str, returns: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Declare ``hdet_kernels::name``; returns the operator."""
    _library.define(f"{name}({arguments}) -> {returns}")
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(torch.ops.hdet_kernels, name).default


def fake_step(*arguments: object) -> None:
    """A step returns nothing, nor does a part of an average; what they change is in their schemas."""


def fake_norm(chunks: Tensor, gradients: object, rows: int) -> Tensor:
    return chunks.new_empty((rows,), dtype=wide_dtype(chunks.device))


def fake_finite(chunks: Tensor, gradients: object, rows: int) -> Tensor:
    return chunks.new_empty((rows,), dtype=torch.bool)


def fake_pack(*arguments: object) -> None:
    """Packing and unpacking return nothing; what they change is in their schemas."""


def fake_noise(*arguments: object) -> None:
    """Noise returns nothing; what it changes is in its schemas."""
