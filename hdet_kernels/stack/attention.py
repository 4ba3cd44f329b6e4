"""``F.scaled_dot_product_attention`` under ``torch.func.vmap``, with the replicas as part of its batch.

torch's own rules for its fused kernels under vmap are incomplete: on a GPU gradients are NaN in half precision; in fp32
and on the CPU the replicas are computed in a loop. Here the replicas are folded into the batch before torch chooses a
kernel, and one ordinary call computes them all.

The losses of a stack are differentiated outside of vmap. Below vmap, autograd therefore records ordinary tensors, and
the ordinary call brings its own backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import (
    FuncTorchInterpreter,
    VmapInterpreter,
    retrieve_all_functorch_interpreters,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

# dropout_p, is_causal, scale, enable_gqa
Options = tuple[float, bool, float | None, bool]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` under vmap; the arguments are the same.

    Every replica draws its own dropout mask. Inside further transforms of the caller that cannot be folded
    (``torch.func.grad``, or a vmap with the same random numbers everywhere) attention is computed by matrix products,
    which every transform supports.
    """
    if _is_causal_bias(attn_mask):
        attn_mask, is_causal = _causal_mask(attn_mask, query.device)
    options = dropout_p, is_causal, scale, enable_gqa
    transforms = retrieve_all_functorch_interpreters()
    if not all(_is_foldable(transform, dropout_p) for transform in transforms):
        with sdpa_kernel(SDPBackend.MATH):
            return _attention(query, key, value, attn_mask, options)
    # A random number differs between replicas even if nothing else does: the dropout masks then differ too.
    replica = torch.rand((), device=query.device) if dropout_p > 0 else None
    return _fold(transforms, (query, key, value, attn_mask, replica), options)


def _is_foldable(transform: FuncTorchInterpreter, dropout_p: float) -> bool:
    return isinstance(transform, VmapInterpreter) and (dropout_p == 0 or transform.randomness() == "different")


def _fold(transforms: Sequence[Any], tensors: Sequence[Tensor | None], options: Options) -> Tensor:
    """Compute attention of query, key, value and mask below the vmaps ``transforms``, the outermost first."""
    if not transforms:
        query, key, value, mask, _ = tensors
        return _attention(query, key, value, mask, options)
    *outer, vmap = transforms
    level = vmap.level()
    unwrapped = [(None, None) if tensor is None else _functorch._unwrap_batched(tensor, level) for tensor in tensors]
    with vmap.lower():
        if all(dim is None for _, dim in unwrapped):
            return _fold(outer, tensors, options)
        rows = [
            (tensor if tensor is None or dim is None else tensor.movedim(dim, 0), dim is not None)
            for tensor, dim in unwrapped
        ]
        result = _fold_rows(outer, rows, vmap.batch_size(), options)
    wrapped: Tensor = _functorch._add_batch_dim(result, 0, level)
    return wrapped


def _fold_rows(outer: Sequence[Any], tensors: Sequence[tuple[Any, bool]], rows: int, options: Options) -> Tensor:
    """Compute attention [rows, …] of tensors that are [rows, …], or the same for all rows."""
    inputs = [tensor if has_rows else tensor.expand(rows, *tensor.shape) for tensor, has_rows in tensors[:3]]
    dims = max(tensor.dim() for tensor in inputs) - 1
    inputs = [_with_dims(tensor, max(dims, 3)) for tensor in inputs]
    batch = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in inputs))
    enable_gqa = options[3]
    heads = () if enable_gqa else torch.broadcast_shapes(*(tensor.shape[-3:-2] for tensor in inputs))
    inputs = [
        tensor.expand(*batch, *(heads or tensor.shape[-3:-2]), *tensor.shape[-2:]).flatten(0, -4) for tensor in inputs
    ]
    (mask, mask_has_rows), (replica, _) = tensors[3:]
    mask = None if mask is None else _fold_mask(mask, mask_has_rows, batch)
    result = _fold(outer, (*inputs, mask, replica), options).unflatten(0, batch)
    return result.squeeze(1) if dims == 2 else result


def _attention(query: Any, key: Any, value: Any, mask: Tensor | None, options: Options) -> Tensor:
    dropout_p, is_causal, scale, enable_gqa = options
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _with_dims(tensor: Tensor, dims: int) -> Tensor:
    """Return [rows, *shape] with dimensions of size 1 before ``shape``, so that it has ``dims`` dimensions."""
    return tensor[(slice(None), *[None] * (dims + 1 - tensor.dim()))]


def _fold_mask(mask: Tensor, has_rows: bool, batch: torch.Size) -> Tensor:
    """Return a mask for attention over the dimensions ``batch`` (the first are the rows) folded into one.

    A mask that is the same over ``batch`` is not copied: it is broadcast by torch.
    """
    if not has_rows:
        if mask.dim() <= 2:
            return mask
        if mask.shape[:-3].numel() == 1:
            return mask.reshape(1, *mask.shape[-3:])
        mask = mask[None]
    mask = _with_dims(mask, len(batch) + 2)
    return mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)


def _is_causal_bias(mask: Any) -> TypeGuard[CausalBias]:
    # Its module imports the compiler, for seconds: whoever has such a mask has imported it.
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def _causal_mask(bias: CausalBias, device: torch.device) -> tuple[Tensor | None, bool]:
    """Return the mask, or whether attention is causal without one, of the masks in ``torch.nn.attention.bias``."""
    queries, keys = bias.seq_len_q, bias.seq_len_kv
    if bias.variant == type(bias.variant).UPPER_LEFT or queries == keys:
        return None, True
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries), False
