"""Arguments of the operators themselves, for tests that call them as torch does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdet_kernels.buckets import Piece
from hdet_kernels.ops import STATES
from hdet_kernels.ops.backends import implementation
from hdet_kernels.ops.chunks import flat_gradients
from hdet_kernels.ops.compiled import SCRATCH_BYTES
from hdet_kernels.ops.pack import PieceTable
from hdet_kernels.ops.torch.companding import first_scales
from tests.ops.cases import BF16, FP32, Case


def is_compiled(backend: str) -> bool:
    return backend in ("cpp", "cuda")


def step_operators(backend: str) -> tuple[Any, Any]:
    """Return the operators of step and norm."""
    if is_compiled(backend):
        return torch.ops.hdet_kernels.step_.default, torch.ops.hdet_kernels.grad_norm.default
    return implementation(backend, "step").STEP, implementation(backend, "reduce").NORM


def step_arguments(case: Case, backend: str, table: Tensor, *scalars: Tensor | None) -> list[Any]:
    """Return the arguments of the step operator, with three ``scalars``."""
    flats = [case.param, case.master, *[*case.states, None, None][:3], None, None, None, case.steps]
    return [list(STATES).index(case.rule), *flats, table, *step_tables(case, backend), *scalars, False, 1]


def step_tables(case: Case, backend: str) -> list[Any]:
    """Return the arguments of the step operator between the hyperparameters and the scalars."""
    grads = case.chunks.match(case.grads)
    on_device = case.chunks.point_at(grads)
    if backend == "torch":
        spans = [slot.offset for slot in case.chunks.entries], first_scales(slot.numel for slot in case.chunks.entries)
        return [case.chunks.slots, on_device, *spans, flat_gradients(grads)]
    if is_compiled(backend):
        scratch = torch.zeros(SCRATCH_BYTES * len(case.chunks.entries), dtype=torch.uint8, device=case.param.device)
        return [case.chunks.slots, case.chunks.chunks, on_device, scratch]
    from hdet_kernels.ops.triton.step import dtypes_of

    return [case.chunks.slots, case.chunks.chunks, on_device, dtypes_of(grads)]


def norm_arguments(case: Case, backend: str) -> list[Any]:
    """Return the arguments of the norm operator."""
    grads = case.chunks.match(case.grads)
    return [case.chunks.chunks, flat_gradients(grads) if backend == "torch" else case.chunks.point_at(grads), 1]


def pack_operators(backend: str) -> tuple[Any, Any]:
    """Return the operators of packing and unpacking."""
    if is_compiled(backend):
        return torch.ops.hdet_kernels.pack.default, torch.ops.hdet_kernels.unpack.default
    module = implementation(backend, "pack")
    return module.PACK, module.UNPACK


def pack_arguments(backend: str, device: str) -> tuple[list[Tensor], list[Any], list[Any]]:
    """Return tensors of two rows, the arguments to pack them (both rows, over 3), and to unpack them (halved)."""
    tensors = [torch.randn(2, 70, device=device).to(kind) for kind in (FP32, BF16)]
    table = PieceTable([70, 70], [Piece(1, 3, 40), Piece(0, 0, 70)], 2, tensors[0].device, FP32)
    staging = torch.zeros(table.numel, device=device)
    if backend == "torch":
        return tensors, [tensors, *table.spans, 3, 3.0, staging], [tensors, *table.spans, 2.0, staging]
    tables = [table.chunks, table.point_at(table.match(tensors)), table.strides]
    return tensors, [*tables, 3, 3.0, staging], [*tables, 2, 2.0, staging]
