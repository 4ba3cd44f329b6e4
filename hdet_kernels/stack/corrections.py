"""Corrections for torch functions that compute something else under ``torch.func.vmap``.

vmap decomposes most functions before autocast sees them. Autocast's choice of a precision for the whole function is
then lost: losses come out in bf16, layers with a bias in fp32, norms are summed in bf16. vmap ignores ``padding_idx``
of an embedding whose weight has rows. And it computes attention wrongly or in a loop (``attention.py``).

``bench/stack_operations.py`` compares operations in a stack with separate modules.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hdet_kernels.stack.attention import attention

# Functions that autocast computes in the lower precision and vmap decomposes.
_LOWER = {
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    F.prelu,
    F.scaled_dot_product_attention,
    torch.addmm,
    torch.baddbmm,
    Tensor.addmm,
    Tensor.baddbmm,
}

# Functions that autocast computes in fp32: on every device, and on accelerators only.
_FULL = {
    F.binary_cross_entropy_with_logits,
    F.cosine_embedding_loss,
    F.cross_entropy,
    F.hinge_embedding_loss,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.margin_ranking_loss,
    F.mse_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.nll_loss,
    F.poisson_nll_loss,
    F.smooth_l1_loss,
    F.soft_margin_loss,
    F.triplet_margin_loss,
    torch.cdist,
}
_FULL_ON_ACCELERATORS = {
    F.cosine_similarity,
    F.group_norm,
    F.gumbel_softmax,
    F.layer_norm,
    F.log_softmax,
    F.pairwise_distance,
    F.softmax,
    F.softmin,
    Tensor.log_softmax,
    Tensor.softmax,
    torch.log_softmax,
    torch.softmax,
}

# Functions that compute in fp32 if their weights are, and return the dtype of their input.
_AS_INPUT = {F.batch_norm, F.group_norm, F.instance_norm, F.layer_norm}


class VmapCorrections(TorchFunctionMode):
    """A mode in which functions under vmap compute what they compute without it.

    Args:
        device: the device of the replicas, whose autocast rules apply.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._kind = device.type
        self._full = _FULL if self._kind == "cpu" else _FULL | _FULL_ON_ACCELERATORS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is F.embedding:
            return _embedding(*args, **options)
        if func is torch.embedding:
            return _native_embedding(*args, **options)
        if func is F.multi_head_attention_forward:
            with self:
                return _without_dispatch(func)(*args, **options)
        if func in _LOWER and torch.is_autocast_enabled(self._kind):
            args, options = self._cast((args, options), torch.get_autocast_dtype(self._kind))
        elif func in self._full and torch.is_autocast_enabled(self._kind):
            args, options = self._cast((args, options), torch.float32)
        elif func in _AS_INPUT and torch.is_autocast_enabled(self._kind):
            given, *rest = args
            wide, rest, options = self._cast((given, rest, options), torch.float32)
            return func(wide, *rest, **options).to(given.dtype)
        if func is F.scaled_dot_product_attention:
            return attention(*args, **options)
        return func(*args, **options)

    def _cast(self, arguments: Any, dtype: torch.dtype) -> Any:
        def cast(tensor: Tensor) -> Tensor:
            eligible = tensor.is_floating_point() and tensor.device.type == self._kind
            return tensor.to(dtype) if eligible and tensor.dtype != torch.float64 else tensor

        return pytree.tree_map_only(Tensor, cast, arguments)


def _without_dispatch(func: Any) -> Any:
    """Return the Python function ``func`` of torch without its first lines, which hand it to the mode as a whole.

    The mode then sees the functions that it calls.
    """
    return types.FunctionType(
        func.__code__, {**func.__globals__, "has_torch_function": lambda _: False}, argdefs=func.__defaults__
    )


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **options: Any) -> Tensor:
    found = F.embedding(input, weight, None, *args, **options)
    return found if padding_idx is None else _padded(found, input, padding_idx % weight.shape[0])


def _native_embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, *args: Any, **options: Any) -> Tensor:
    found = torch.embedding(weight, indices, -1, *args, **options)
    return found if padding_idx < 0 else _padded(found, indices, padding_idx)


def _padded(found: Tensor, indices: Tensor, padding: int) -> Tensor:
    """Return ``found`` of shape [*indices, d] without a gradient where an index is ``padding``."""
    return torch.where((indices == padding)[..., None], found.detach(), found)


@contextlib.contextmanager
def refuse_checkpointing() -> Iterator[None]:
    """Make non-reentrant activation checkpointing raise inside the block.

    It would compute forward again in the backward pass, when the replicas' tensors are no longer in the module. Saved
    tensor hooks of the caller stay in force.
    """
    try:
        refused = disable_saved_tensors_hooks("torch.utils.checkpoint would compute forward again outside of vmap")
        refused.__enter__()
    except RuntimeError:  # the caller has hooks already
        yield
        return
    try:
        yield
    finally:
        refused.__exit__(None, None, None)
