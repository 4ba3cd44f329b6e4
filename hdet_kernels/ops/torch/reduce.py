"""The norm of all gradients in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients, flat_gradients
from hdet_kernels.tensors import wide_dtype


def grad_norm(chunks: ChunkTable, grads: MatchedGradients, rows: int) -> Tensor:
    """Return the norm of the gradients of each of ``rows`` replicas."""
    tensors = flat_gradients(grads)
    wide = wide_dtype(chunks.device)
    norms = torch.zeros(rows, dtype=wide, device=chunks.device)
    each = len(tensors) // rows
    for row in range(rows):
        own = [grad for grad in tensors[row * each : (row + 1) * each] if grad is not None and grad.numel()]
        if own:
            parts = [torch.linalg.vector_norm(grad, dtype=wide) for grad in own]
            norms[row] = torch.linalg.vector_norm(torch.stack(parts))
    return norms
