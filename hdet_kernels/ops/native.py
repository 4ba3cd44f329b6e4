"""The compiled extension: loading it, its typed wrapper and its fake kernel.

``csrc/library.cpp`` declares the operator. The library only registers operators with torch (stable ABI) and is no
Python module, so it is loaded as a library, on first use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import ChunkTable, Gradients

_OPERATOR = "hdet_kernels::step_"

#: The order of ``enum class Rule`` in ``csrc/rules.h``.
_RULES = ("sgd", "adam", "adamw", "adagrad", "lion")


@cache
def why_not() -> str | None:
    """Load the extension; returns why it cannot be used, or ``None`` if it can."""
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
    if not has_kernel("CPU"):
        return f"the extension {spec.origin} has no operator {_OPERATOR}; it is of another version, build it again"
    torch.library.register_fake(_OPERATOR, _step_fake)
    return None


def has_kernel(dispatch_key: str) -> bool:
    """Whether the loaded extension implements the step for ``dispatch_key`` (``"CPU"``, ``"CUDA"``)."""
    exists = torch._C._dispatch_has_kernel(_OPERATOR)
    return bool(exists and torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, dispatch_key))


def step(
    rule: str,
    param: Tensor,
    states: Sequence[Tensor | None],
    steps: Tensor,
    table: Tensor,
    chunks: ChunkTable,
    grads: Gradients,
    multiplier: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Apply ``rule`` to every slot that has a gradient; see :func:`hdet_kernels.ops.step`."""
    first, second, third = [*states, None, None][:3]
    torch.ops.hdet_kernels.step_(
        _RULES.index(rule),
        param,
        first,
        second,
        third,
        steps,
        table,
        chunks.slots,
        chunks.chunks,
        chunks.point_at(grads),
        multiplier,
        found_inf,
    )


def _step_fake(
    rule: int,
    param: Tensor,
    state0: Tensor | None,
    state1: Tensor | None,
    state2: Tensor | None,
    steps: Tensor,
    table: Tensor,
    slots: Tensor,
    chunks: Tensor,
    addresses: Tensor,
    multiplier: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    return None
