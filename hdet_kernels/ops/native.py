"""The compiled extension: loading it, its typed wrappers and its fake kernels.

``csrc/library.cpp`` declares the operators. The library only registers operators with torch (stable ABI) and is no
Python module, so it is loaded as a library, on first use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.ops import Scalars, StepArguments, operators
from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients
from hdet_kernels.ops.pack import Matched, PieceTable

_FAKES: dict[str, Callable[..., Any]] = {
    "step_": operators.fake_step,
    "grad_norm": operators.fake_norm,
    "all_finite": operators.fake_finite,
    "pack": operators.fake_pack,
    "unpack": operators.fake_pack,
    "encode": operators.fake_step,
    "merge": operators.fake_step,
    "decode": operators.fake_step,
    "add_noise_": operators.fake_noise,
}

#: ``kScratchBytes`` of ``csrc/step.h``.
SCRATCH_BYTES = 128


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
    if not has_kernels("CPU"):
        return f"the extension {spec.origin} lacks one of {', '.join(_FAKES)}; it is of another version, build it again"
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"{operators.NAMESPACE}::{name}", fake)
    return None


def has_kernels(dispatch_key: str) -> bool:
    """Whether the loaded extension implements all operators for ``dispatch_key`` (``"CPU"``, ``"CUDA"``)."""
    names = [f"{operators.NAMESPACE}::{name}" for name in _FAKES]
    return all(
        torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key)
        for name in names
    )


def bind_step(work: StepArguments) -> Callable[[MatchedGradients, Scalars], None]:
    chunks, rounding, rows = work.chunks, work.stochastic_rounding, work.rows
    # Of zeros: a kernel that loads a whole row of it loads the gaps between its numbers too.
    scratch = torch.zeros(SCRATCH_BYTES * rows * len(chunks.entries), dtype=torch.uint8, device=work.param.device)
    operator = partial(torch.ops.hdet_kernels.step_.default, *work.flats, chunks.slots, chunks.chunks)

    def run(grads: MatchedGradients, scalars: Scalars) -> None:
        operator(chunks.point_at(grads), scratch, *scalars, rounding, rows)

    return run


def grad_norm(chunks: ChunkTable, grads: MatchedGradients, rows: int) -> Tensor:
    return torch.ops.hdet_kernels.grad_norm(chunks.chunks, chunks.point_at(grads), rows)


def all_finite(chunks: ChunkTable, grads: MatchedGradients, rows: int) -> Tensor:
    return torch.ops.hdet_kernels.all_finite(chunks.chunks, chunks.point_at(grads), rows)


def pack(table: PieceTable, matched: Matched, included: int, divisor: float, staging: Tensor) -> None:
    torch.ops.hdet_kernels.pack(table.chunks, table.point_at(matched), table.strides, included, divisor, staging)


def unpack(table: PieceTable, matched: Matched, divisor: float, staging: Tensor) -> None:
    torch.ops.hdet_kernels.unpack(table.chunks, table.point_at(matched), table.strides, table.rows, divisor, staging)


def wire_operators() -> tuple[Any, Any, Any]:
    library = torch.ops.hdet_kernels
    return library.encode.default, library.merge.default, library.decode.default


def add_noise_(table: ChunkTable, tensors: MatchedGradients, keys: Tensor, scales: Tensor) -> None:
    torch.ops.hdet_kernels.add_noise_(table.chunks, table.point_at(tensors), keys, scales)
