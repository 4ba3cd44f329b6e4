"""The norm of all gradients in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients, flat_gradients
from hdet_kernels.ops.operators import fake_norm, register
from hdet_kernels.tensors import wide_dtype


def grad_norm(chunks: ChunkTable, grads: MatchedGradients, rows: int) -> Tensor:
    """Return the norm of the gradients of each of ``rows`` replicas."""
    norms: Tensor = NORM(chunks.chunks, flat_gradients(grads), rows)
    return norms


def _grad_norm(chunks: Tensor, tensors: Sequence[Tensor | None], rows: int) -> Tensor:
    wide = wide_dtype(chunks.device)
    norms = chunks.new_zeros((rows,), dtype=wide)
    each = len(tensors) // rows
    for row in range(rows):
        own = [grad for grad in tensors[row * each : (row + 1) * each] if grad is not None and grad.numel()]
        if own:
            parts = [torch.linalg.vector_norm(grad, dtype=wide) for grad in own]
            norms[row] = torch.linalg.vector_norm(torch.stack(parts))
    return norms


#: The operator. It takes the gradients as flat tensors.
NORM = register("torch_grad_norm", "Tensor chunks, Tensor?[] tensors, int rows", "Tensor", _grad_norm, fake_norm)
