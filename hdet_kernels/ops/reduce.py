"""The norm of all gradients, in one read of them."""

from __future__ import annotations

from torch import Tensor

from hdet_kernels.ops.backends import implementation, resolve
from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients


def grad_norm(
    chunks: ChunkTable, grads: MatchedGradients, *, rows: int | None = None, backend: str | None = None
) -> Tensor:
    """Return √(Σ g²) over all gradients, without waiting for the device.

    The sum is formed in float64 (float32 on devices without it), in the same order every time.

    Args:
        chunks: The table that ``grads`` were matched with.
        grads: One gradient for each slot of ``chunks``; missing ones count as zero.
        rows: The number of replicas whose slots ``chunks`` holds, one replica after the other, equally many for each.
        backend: A backend by name; the fastest available by default.

    Returns:
        A scalar on the device of the gradients; with ``rows``, a tensor [rows] with the norm of each replica.
    """
    slots, pieces = len(chunks.entries), len(chunks.chunks)
    if rows is not None and (rows < 1 or slots % rows or pieces % rows):
        raise ValueError(
            f"slots and chunks must be equally many for each of rows={rows} replicas, got {slots} slots and {pieces} "
            "chunks; pass the number of replicas that the chunk table was made for"
        )
    norms: Tensor = implementation(resolve(chunks.device, backend), "reduce").grad_norm(chunks, grads, rows or 1)
    return norms.squeeze(0) if rows is None else norms
