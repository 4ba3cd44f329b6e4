"""GPT-2's shape, computed for R replicas at once, so that plain training and a stack run the same code.

``Losses.stacked`` has every parameter as [R, *shape] and returns the losses [R]. Plain training calls it with R = 1. A
stack calls ``Losses.replica`` under ``torch.func.vmap``, which takes the parameters of all replicas below vmap to that
function. Products are computed in bfloat16 on a GPU; parameters, residuals, norms and losses are float32, as under
autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from bench.models import GPT2

# Parameters of a block.
IN_BLOCK = 12


@dataclass(frozen=True)
class Size:
    """Shape of a model: ``vocabulary`` is a multiple of 64, which the matrix products want."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int

    def build(self, seed: int, device: torch.device) -> GPT2:
        """Return the model, initialised as GPT-2: normal with 0.02, less for what is added to the residuals."""
        with device:
            model = GPT2(self.layers, self.width, self.heads, 4 * self.width, self.vocabulary, self.context)
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                added = name.endswith(("attended.weight", "down.weight"))
                deviation = 0.02 / math.sqrt(2 * self.layers) if added else 0.02
                nn.init.normal_(parameter, std=deviation, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        return model

    def flops(self, tokens: int) -> float:
        """Return the operations of a training step: 6 for each weight of a product and token, and attention's."""
        weights = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        attention = self.layers * self.width * self.context  # causal: half of the products
        return 6.0 * tokens * (weights + attention)


FULL = Size(layers=12, width=768, heads=12, vocabulary=50304, context=1024)
TINY = Size(layers=2, width=32, heads=2, vocabulary=512, context=32)


class Losses:
    """The losses of R replicas.

    Args:
        size: the shape of the model.
        dtype: the precision of matrix products and attention.
        compiled: compile blocks and losses with ``torch.compile``.
    """

    def __init__(self, size: Size, dtype: torch.dtype, compiled: bool) -> None:
        def maybe(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self._size, self._dtype = size, dtype
        self._block, self._norm = maybe(_block), maybe(_norm)
        self._cross_entropy = maybe(_cross_entropy), maybe(_with_gradient)

    def plain(self, model: GPT2, tokens: Tensor) -> Tensor:
        """Return the loss of one model; ``tokens`` is [batch, context + 1]."""
        return self.stacked(tokens[None], *(parameter[None] for parameter in model.parameters()))[0]

    def replica(self, model: GPT2, tokens: Tensor) -> Tensor:
        """Return the loss of one replica, as the loss function of a stack."""
        return self._below_modes(tokens, *model.parameters())

    def _below_modes(self, tokens: Tensor, *parameters: Tensor) -> Tensor:
        # A function mode, such as that of a stack, is off while it handles a function. torch.compile would trace it.
        if has_torch_function((tokens, *parameters)):
            found: Tensor = handle_torch_function(self._below_modes, (tokens,), tokens, *parameters)
            return found
        result: Tensor = _BelowVmap.apply(self.stacked, tokens, *parameters)
        return result

    def stacked(self, tokens: Tensor, *parameters: Tensor) -> Tensor:
        """Return the losses [R]; ``tokens`` is [R, batch, context + 1], every parameter [R, *shape], in their order."""
        read, wanted = tokens[..., :-1], tokens[..., 1:].flatten(1)
        table, positions, *inner, weight, bias = parameters
        # One lookup for each replica: as one for all, it would copy the tables, whose rows lie apart.
        found = torch.stack([F.embedding(own, row) for own, row in zip(read, table.unbind(), strict=True)])
        x = (found + positions[:, None]).flatten(1, 2)  # [R, batch · context, width]
        for first in range(0, len(inner), IN_BLOCK):
            x = self._block(x, self._size, self._dtype, *inner[first : first + IN_BLOCK])
        x, output = self._norm(x, weight, bias, self._dtype), table.to(self._dtype)
        losses: Tensor = _Output.apply(x, output, wanted, *self._cross_entropy)
        return losses


class _BelowVmap(torch.autograd.Function):
    """Call a function of stacked tensors from inside of vmap; autograd records what it computes there."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], stacked: Callable[..., Tensor], *operands: Tensor) -> Any:
        rows = [tensor.movedim(dim, 0) for tensor, dim in zip(operands, in_dims[1:], strict=True) if dim is not None]
        return stacked(*rows), 0


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.bmm(x, weight.to(x.dtype).mT) + bias.to(x.dtype)[:, None]


def _norm(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    return (F.layer_norm(x, x.shape[-1:]) * weight[:, None] + bias[:, None]).to(dtype)


def _block(x: Tensor, size: Size, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
    """Return the residuals, [R, batch · context, width] in float32, after a block."""
    norm1, shift1, qkv, qkv_bias, attended, attended_bias, norm2, shift2, up, up_bias, down, down_bias = parameters
    wide = _linear(_norm(x, norm1, shift1, dtype), qkv, qkv_bias)
    query, key, value = wide.view(-1, size.context, 3, size.heads, size.width // size.heads).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + _linear(mixed.transpose(1, 2).reshape(x.shape), attended, attended_bias)
    hidden = F.gelu(_linear(_norm(x, norm2, shift2, dtype), up, up_bias), approximate="tanh")
    return x + _linear(hidden, down, down_bias)


def _cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the losses [R, N] of logits [R, N, vocabulary]."""
    scores = logits.float()
    return scores.logsumexp(-1) - scores.gather(-1, wanted[..., None])[..., 0]


def _with_gradient(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses, and the gradient of their mean over N in the logits' precision."""
    scores = logits.float()
    total = scores.logsumexp(-1, keepdim=True)
    is_wanted = torch.arange(logits.shape[-1], device=logits.device) == wanted[..., None]
    gradient = ((scores - total).exp() - is_wanted.float()) / wanted.shape[-1]
    # Not in the memory of the logits: compiled by torch 2.11, the losses would read what was written there.
    return _cross_entropy(logits, wanted), gradient.to(logits.dtype)


class _Output(torch.autograd.Function):
    """Output layer and mean cross entropy; gradients are computed with the loss, so that no logits are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, wanted: Tensor, loss_of: Any, with_gradient: Any) -> Tensor:
        logits = torch.bmm(x, table.mT)
        if not any(ctx.needs_input_grad):
            return loss_of(logits, wanted).mean(-1)
        losses, gradient = with_gradient(logits, wanted)
        ctx.save_for_backward(torch.bmm(gradient, table), torch.bmm(gradient.mT, x))
        return losses.mean(-1)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        by_x, by_table = ctx.saved_tensors
        scale = given[0].to(by_x.dtype)[:, None, None]
        return by_x * scale, by_table * scale, None, None, None
