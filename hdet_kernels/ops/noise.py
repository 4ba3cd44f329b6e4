"""Normal noise, added in place to any number of tensors in one launch.

The noise of an element is a function of its slot's key and its index in the slot alone. Two 32-bit words are hashed
from the key and half the index: neighbours 2k and 2k + 1 share them. With u = (word₁ + ½)/2³² and v = word₂/2³², the
Box–Muller transform gives both of their numbers::

    z = √(−2 ln u)·cos(2π v)  and  √(−2 ln u)·sin(2π v)
    θ ← θ + scale·z

z is formed in float32, from the same sums and products in every backend, so all backends give the same bits. Its error
is at most 2e-6 of √(−2 ln u), and its magnitude at most 6.8. The sum is formed in float32 and rounded once to the dtype
of the tensor. For float64 tensors z is widened and the sum is formed in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hdet_kernels.ops.backends import implementation, resolve
from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients
from hdet_kernels.tensors import wide_dtype


@torch.no_grad()
def add_noise_(
    table: ChunkTable, tensors: MatchedGradients, keys: Tensor, scales: Tensor, *, backend: str | None = None
) -> None:
    """Add scale·z, z ~ N(0, 1), to every element of ``tensors``.

    Args:
        table: The slots of the tensors.
        tensors: The tensors, matched by ``table.match``; ``None`` is skipped.
        keys: int64 [slots]. Different keys give independent noise, equal keys the same.
        scales: float64 [slots] (float32 on devices without it).
        backend: A backend by name; the fastest available by default.

    Raises:
        ValueError: If a tensor had to be copied to fit its slot, or keys or scales do not fit.
    """
    slots = len(table.entries)
    if len(tensors.table) != slots:
        raise ValueError(f"the chunk table has {slots} slots, got {len(tensors.table)} tensors")
    if tensors.copied:
        raise ValueError(
            "a tensor has another layout than its slot, or a dtype that kernels do not read, and was copied: the noise "
            "would be added to the copy alone; pass tensors that are laid out as their slots"
        )
    for name, given, dtype in (("keys", keys, torch.int64), ("scales", scales, wide_dtype(table.device))):
        if given.shape != (slots,) or given.dtype != dtype or not given.is_contiguous():
            raise ValueError(
                f"{name} must be {slots} contiguous elements of {dtype}, one a slot, got {given.dtype} of shape "
                f"{tuple(given.shape)}"
            )
        if given.device != table.device:
            raise ValueError(f"{name} is on {given.device} and the tensors on {table.device}; they must be together")
    module = implementation(resolve(table.device, backend))
    if not tensors.any:
        return
    module.add_noise_(table, tensors, keys, scales)
    # The operators write through addresses, which autograd does not see. As after any write in place, it must learn
    # that tensors which it saved have changed.
    changed = [tensor for tensor in tensors.tensors if tensor is not None and not tensor.is_inference()]
    torch.autograd.graph.increment_version(changed)
