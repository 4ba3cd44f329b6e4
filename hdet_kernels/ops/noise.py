"""Normal noise, added in place to any number of tensors in one launch.

The noise of an element is a function of its slot's key and of its index in the slot alone. Two 32-bit words are hashed
from them, u = (word₁ + 1)/2³² and v = word₂/2³², and by Box and Muller::

    z = √(−2 ln u)·cos(2π v)
    θ ← θ + scale·z

z is formed in float32, and from the same sums and products in every backend: all of them give the same bits. The sum
is formed in float32 and rounded once to the dtype of the tensor; for float64 tensors z is widened and the sum is one of
float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients
from hdet_kernels.tensors import wide_dtype


@torch.no_grad()
def add_noise_(
    table: ChunkTable, tensors: MatchedGradients, keys: Tensor, scales: Tensor, *, backend: str | None = None
) -> None:
    """θ ← θ + scale·z, z ~ N(0, 1), for every element of ``tensors``, which ``table.match`` made; ``None`` is skipped.

    ``keys`` [slots] int64 say which noise: any difference makes it independent. ``scales`` [slots] are float64 (float32
    on devices without it).
    """
    slots = len(table.entries)
    if len(tensors.table) != slots:
        raise ValueError(f"the chunk table has {slots} slots, got {len(tensors.table)} tensors")
    if tensors.copied:
        raise ValueError(
            "a tensor has another layout than its slot, or a dtype that kernels do not know, and was copied, which the "
            "noise would not leave again; pass tensors as their slots describe them"
        )
    for name, given, dtype in (("keys", keys, torch.int64), ("scales", scales, wide_dtype(table.device))):
        if given.shape != (slots,) or given.dtype != dtype or not given.is_contiguous():
            raise ValueError(
                f"{name} must be {slots} contiguous elements of {dtype}, one a slot, got {given.dtype} of shape "
                f"{tuple(given.shape)}"
            )
        if given.device != table.device:
            raise ValueError(f"{name} is on {given.device} and the tensors on {table.device}; they must be together")
    implementation = ops._implementation(resolve(table.device, backend))
    if not tensors.any:
        return
    implementation.add_noise_(table, tensors, keys, scales)
    # As after any other write in place, autograd is to see that what it saved is not what it was. The operators that
    # reach tensors through their addresses do not tell it.
    changed = [tensor for tensor in tensors.tensors if tensor is not None and not tensor.is_inference()]
    torch.autograd.graph.increment_version(changed)
