"""Functions of torch that ``torch.func.vmap`` computes wrongly or slowly, computed as without it.

:class:`StackMode` sees the functions that a loss function calls, and handles

- attention: torch's own rules compute the replicas in a loop, and on a GPU give NaN gradients in half precision. Here
  the replicas become part of the batch, and one ordinary call, with its ordinary backward pass, computes them all;
- autocast: vmap decomposes most functions before autocast sees them. The precision of the whole function is then lost:
  losses come out in bf16, layers with a bias in fp32, norms are summed in bf16;
- ``padding_idx`` of an embedding whose weight has rows, which vmap ignores.

``bench/stack_operations.py`` compares operations in a stack with separate modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


def _functions(place: Any, names: str) -> set[Any]:
    return {getattr(place, name) for name in names.split()}


# Functions that autocast computes in the lower precision and vmap decomposes.
_LOWER = (
    _functions(F, "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu")
    | _functions(F, "multi_head_attention_forward")
    | _functions(torch, "addmm baddbmm")
    | _functions(Tensor, "addmm baddbmm")
)

# Functions that autocast computes in fp32: on every device, and on accelerators only.
_FULL = (
    _functions(F, "binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy hinge_embedding_loss")
    | _functions(F, "huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss")
    | _functions(F, "nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss")
    | _functions(torch, "cdist")
)
_FULL_ON_ACCELERATORS = (
    _functions(
        F, "cosine_similarity group_norm gumbel_softmax layer_norm log_softmax pairwise_distance softmax softmin"
    )
    | _functions(torch, "log_softmax softmax")
    | _functions(Tensor, "log_softmax softmax")
)

# Functions that compute in fp32 if their weights are, and return the dtype of their input.
_AS_INPUT = _functions(F, "batch_norm group_norm instance_norm layer_norm")


class StackMode(TorchFunctionMode):
    """A mode in which functions compute under vmap what they compute without it, by the autocast rules of ``device``.

    ``replica`` is a tensor that vmap has cut into one slice per replica; its values do not matter.
    """

    def __init__(self, device: torch.device, replica: Tensor) -> None:
        super().__init__()
        self._kind, self._replica = device.type, replica
        self._full = _FULL if self._kind == "cpu" else _FULL | _FULL_ON_ACCELERATORS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(self._replica, *args, **options)
        if func is F.embedding:
            return _embedding(*args, **options)
        if func is torch.embedding:
            return _native_embedding(*args, **options)
        if func is F.multi_head_attention_forward:
            return self._heads(func, args, options)
        return self._with_autocast(func, args, options)

    def _heads(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Compute the heads by matrix products, which vmap knows: the mode does not see what ``func`` calls.

        On accelerators autocast is off inside, since all arguments are in its precision already. There it would give
        the softmax a result in fp32 of an input in bf16, and torch has no backward pass of that.
        """
        with sdpa_kernel(SDPBackend.MATH):
            if self._kind == "cpu" or not torch.is_autocast_enabled(self._kind):
                return self._with_autocast(func, args, options)
            dtype = torch.get_autocast_dtype(self._kind)
            with torch.autocast(self._kind, enabled=False):
                return self._call(func, args, options, dtype)

    def _with_autocast(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        if not torch.is_autocast_enabled(self._kind):
            return func(*args, **options)
        if func in _LOWER:
            return self._call(func, args, options, torch.get_autocast_dtype(self._kind))
        if func in self._full:
            return self._call(func, args, options, torch.float32)
        if func in _AS_INPUT:
            return self._call(func, args, options, torch.float32).to(args[0].dtype)
        return func(*args, **options)

    def _call(self, func: Any, args: Sequence[Any], options: dict[str, Any], dtype: torch.dtype) -> Any:
        def cast(value: Any) -> Any:
            eligible = isinstance(value, Tensor) and value.is_floating_point() and value.device.type == self._kind
            return value.to(dtype) if eligible and value.dtype != torch.float64 else value

        return func(*map(cast, args), **{name: cast(value) for name, value in options.items()})


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **options: Any) -> Tensor:
    found = F.embedding(input, weight, None, *args, **options)
    return found if padding_idx is None else _padded(found, input, padding_idx % weight.shape[0])


def _native_embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, *args: Any, **options: Any) -> Tensor:
    found = torch.embedding(weight, indices, -1, *args, **options)
    return found if padding_idx < 0 else _padded(found, indices, padding_idx)


def _padded(found: Tensor, indices: Tensor, padding: int) -> Tensor:
    """Return ``found`` of shape [*indices, d] without a gradient where an index is ``padding``."""
    return torch.where((indices == padding)[..., None], found.detach(), found)


def _attention(
    replica: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` of one replica; every replica draws its own dropout mask."""
    if type(attn_mask) not in (type(None), Tensor, torch.nn.Parameter):  # as those of torch.nn.attention.bias
        raise NotImplementedError(f"attention with a mask of type {type(attn_mask).__name__} under vmap")
    result: Tensor = _Attention.apply(replica, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return result


class _Attention(torch.autograd.Function):
    """Attention with a rule for vmap: fold the replicas into the batch.

    The losses of a stack are differentiated outside of vmap. Below vmap autograd records ordinary tensors, so the rule
    brings the backward pass of the ordinary call, and this class needs none. Under ``torch.func.grad`` inside a loss
    function torch misses one and raises; the replicas are then computed one after another.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *operands: Any) -> tuple[Tensor, int]:
        """Compute attention for the first dimension of the operands that have ``in_dims``."""
        replica, query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = operands
        if dropout_p > 0 and info.randomness != "different":
            raise NotImplementedError("attention with a dropout mask that is the same for all slices of a vmap")
        rows = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((query, key, value), in_dims[1:4], strict=True)
        ]
        dims = max(tensor.dim() for tensor in rows) - 1
        rows = [_with_dims(tensor, max(dims, 3)) for tensor in rows]
        batch = _broadcast([tensor.shape[:-3] for tensor in rows])
        heads = () if enable_gqa else _broadcast([tensor.shape[-3:-2] for tensor in rows])
        folded = [
            tensor.expand(*batch, *(heads or tensor.shape[-3:-2]), *tensor.shape[-2:]).flatten(0, -4) for tensor in rows
        ]
        if mask is not None:
            mask = _fold_mask(mask, in_dims[4], batch)
        attend: Callable[..., Tensor] = F.scaled_dot_product_attention
        if in_dims[0] is None:  # a vmap of the loss function's own, inside of that over the replicas
            attend = partial(_attention, replica)
        result = attend(*folded, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa).unflatten(0, batch)
        return (result.squeeze(1) if dims == 2 else result), 0


def _broadcast(shapes: Sequence[torch.Size]) -> torch.Size:
    """Return the shape that ``shapes`` broadcast to; torch's function takes long, even where all are equal."""
    return shapes[0] if len(set(shapes)) == 1 else torch.broadcast_shapes(*shapes)


def _with_dims(tensor: Tensor, dims: int) -> Tensor:
    """Return [rows, *shape] with dimensions of size 1 before ``shape``, so that it has ``dims`` dimensions."""
    return tensor[(slice(None), *[None] * (dims + 1 - tensor.dim()))]


def _fold_mask(mask: Tensor, dim: int | None, batch: torch.Size) -> Tensor:
    """Return a mask for attention over the dimensions ``batch`` (the first are the rows) folded into one.

    A mask that is the same over ``batch`` is not copied: it is broadcast by torch.
    """
    if dim is None:
        if mask.dim() <= 2:
            return mask
        if mask.shape[:-3].numel() == 1:
            return mask.reshape(1, *mask.shape[-3:])
        mask = mask[None]
    else:
        mask = mask.movedim(dim, 0)
    mask = _with_dims(mask, len(batch) + 2)
    return mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)


@contextlib.contextmanager
def refuse_checkpointing() -> Iterator[None]:
    """Make non-reentrant activation checkpointing raise inside the block.

    It would compute forward again in the backward pass, when the replicas' tensors are no longer in the module. Saved
    tensor hooks of the caller stay in force.
    """
    with contextlib.ExitStack() as block:
        with contextlib.suppress(RuntimeError):  # the caller has hooks already
            message = "torch.utils.checkpoint would compute forward again outside of vmap"
            block.enter_context(disable_saved_tensors_hooks(message))
        yield
