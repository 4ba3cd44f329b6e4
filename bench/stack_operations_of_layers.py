"""Operations with parameters in the table of ``stack_operations.py``: layers, norms, embeddings, cells, attention.

A case is an :class:`Operation`: a linear layer before it, so that gradients pass through the operation, its layers, and
a function of the layers, the output h [b, 6, 8] of the linear layer and the input x [b, 6, 8].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHANNELS, WIDTH, TOKENS = 6, 8, 11

Function = Callable[[Any, Tensor, Tensor], Tensor]


class Operation(nn.Module):
    """A linear layer, and a function of its output; the loss depends on every element of the result."""

    def __init__(self, layers: nn.Module, function: Function) -> None:
        super().__init__()
        self.first, self.layers, self.function = nn.Linear(WIDTH, WIDTH), layers, function

    def forward(self, x: Tensor) -> Tensor:
        result = self.function(self.layers, self.first(x), x)
        wide = result if result.dtype == torch.float64 else result.float()
        ramp = torch.linspace(-1, 2, wide[0].numel() if wide.dim() else 1, dtype=wide.dtype, device=wide.device)
        return (wide.flatten(1) * ramp if wide.dim() > 1 else wide * ramp[0]).square().mean()


def call(layers: Any, h: Tensor, x: Tensor) -> Tensor:
    """Call the layers with h."""
    result: Tensor = layers(h)
    return result


def of_shape(*shape: int) -> Function:
    """Return a function that calls the layers with h in another shape [b, *shape]."""
    return lambda layers, h, x: layers(h.reshape(len(h), *shape))


def tokens_of(x: Tensor) -> Tensor:
    """Return tokens [b, 6] below :data:`TOKENS`; they do not depend on the precision."""
    return (x[..., 0].abs() * 4).long().clamp(max=TOKENS - 1)


def qkv(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [b, 2, 6, 4] of h."""
    heads = h.unflatten(-1, (2, 4)).transpose(1, 2)
    return heads, heads.sin(), heads.cos()


def bag_offsets(x: Tensor) -> Tensor:
    return torch.arange(0, tokens_of(x).numel(), CHANNELS, device=x.device)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)), reentrant

    def forward(self, h: Tensor) -> Any:
        return checkpoint(self.inner, h, use_reentrant=self.reentrant)


def inplace(layers: Any, h: Tensor, x: Tensor) -> Tensor:
    y = layers(h)
    y[:, 0] = 0
    y += h
    return torch.relu_(y)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Function]] = {
    "linear": (lambda: nn.Linear(8, 5), call),
    "linear, no bias": (lambda: nn.Linear(8, 5, bias=False), call),
    "bilinear": (lambda: nn.Bilinear(8, 8, 3), lambda m, h, x: m(h, h.sin())),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3, padding=1), call),
    "conv1d, strided and dilated": (lambda: nn.Conv1d(6, 4, 2, stride=2, dilation=2), call),
    "conv1d, grouped": (lambda: nn.Conv1d(6, 4, 3, groups=2), call),
    "conv1d, depthwise": (lambda: nn.Conv1d(6, 6, 3, groups=6, bias=False), call),
    "conv1d, circular padding": (lambda: nn.Conv1d(6, 4, 3, padding=1, padding_mode="circular"), call),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, padding=1), of_shape(2, 3, 8)),
    "conv2d, grouped": (lambda: nn.Conv2d(4, 6, (1, 3), groups=2), of_shape(4, 3, 4)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 2, groups=4), of_shape(4, 3, 4)),
    "conv2d, channels last": (
        lambda: nn.Conv2d(4, 3, 2).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        lambda m, h, x: m(h.reshape(len(h), 3, 4, 4).permute(0, 3, 1, 2)),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, (1, 2, 2)), of_shape(2, 3, 2, 4)),
    "conv3d, depthwise": (lambda: nn.Conv3d(2, 2, (1, 2, 2), groups=2), of_shape(2, 3, 2, 4)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(6, 4, 3, stride=2), call),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), of_shape(2, 3, 8)),
    "conv_transpose2d, grouped": (lambda: nn.ConvTranspose2d(4, 4, 2, groups=2), of_shape(4, 3, 4)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), of_shape(2, 3, 2, 4)),
    "batch_norm, training": (lambda: nn.BatchNorm1d(6), call),
    "batch_norm, evaluation": (lambda: nn.BatchNorm1d(6).eval(), call),
    "batch_norm, no statistics": (lambda: nn.BatchNorm1d(6, track_running_stats=False), call),
    "batch_norm 2d": (lambda: nn.BatchNorm2d(2), of_shape(2, 3, 8)),
    "batch_norm 3d": (lambda: nn.BatchNorm3d(2), of_shape(2, 3, 2, 4)),
    "batch_norm after conv2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        of_shape(2, 3, 8),
    ),
    "layer_norm": (lambda: nn.LayerNorm(8), call),
    "layer_norm, no weights": (lambda: nn.LayerNorm((6, 8), elementwise_affine=False), call),
    "group_norm": (lambda: nn.GroupNorm(2, 6), call),
    "instance_norm": (lambda: nn.InstanceNorm1d(6, affine=True), call),
    "instance_norm, statistics": (lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True), call),
    "rms_norm": (lambda: nn.RMSNorm(8), call),
    "local_response_norm": (lambda: nn.LocalResponseNorm(2), call),
    "embedding": (lambda: nn.Embedding(TOKENS, 8), lambda m, h, x: h * m(tokens_of(x))),
    "embedding, padding": (lambda: nn.Embedding(TOKENS, 8, padding_idx=1), lambda m, h, x: h * m(tokens_of(x))),
    "embedding, by frequency": (
        lambda: nn.Embedding(TOKENS, 8, scale_grad_by_freq=True),
        lambda m, h, x: h * m(tokens_of(x)),
    ),
    "embedding, sparse": (lambda: nn.Embedding(TOKENS, 8, sparse=True), lambda m, h, x: h * m(tokens_of(x))),
    "embedding_bag, sum": (
        lambda: nn.EmbeddingBag(TOKENS, 8, mode="sum"),
        lambda m, h, x: h[:, 0] * m(tokens_of(x)),
    ),
    "embedding_bag, mean": (lambda: nn.EmbeddingBag(TOKENS, 8), lambda m, h, x: h[:, 0] * m(tokens_of(x))),
    "embedding_bag, max": (
        lambda: nn.EmbeddingBag(TOKENS, 8, mode="max"),
        lambda m, h, x: h[:, 0] * m(tokens_of(x)),
    ),
    "embedding_bag, offsets": (
        lambda: nn.EmbeddingBag(TOKENS, 8, mode="sum", padding_idx=2),
        lambda m, h, x: h[:, 0] * m(tokens_of(x).flatten(), bag_offsets(x)),
    ),
    "RNNCell": (lambda: nn.RNNCell(8, 5), lambda m, h, x: m(h[:, 1], m(h[:, 0]))),
    "GRUCell": (lambda: nn.GRUCell(8, 5), lambda m, h, x: m(h[:, 1], m(h[:, 0]))),
    "LSTMCell": (lambda: nn.LSTMCell(8, 5), lambda m, h, x: torch.cat(m(h[:, 1], m(h[:, 0])), -1)),
    "RNN": (lambda: nn.RNN(8, 5, batch_first=True), lambda m, h, x: m(h)[0]),
    "GRU": (lambda: nn.GRU(8, 5, 2, batch_first=True), lambda m, h, x: m(h)[0]),
    "LSTM": (lambda: nn.LSTM(8, 5, batch_first=True, bidirectional=True), lambda m, h, x: m(h)[0]),
    "prelu": (lambda: nn.PReLU(6), call),
    "attention": (nn.Identity, lambda m, h, x: F.scaled_dot_product_attention(*qkv(h))),
    "attention, causal": (nn.Identity, lambda m, h, x: F.scaled_dot_product_attention(*qkv(h), is_causal=True)),
    "attention, boolean mask": (
        nn.Identity,
        lambda m, h, x: F.scaled_dot_product_attention(*qkv(h), attn_mask=(x[:, None, None, :, 0] > -2)),
    ),
    "attention, learned bias": (
        lambda: nn.Embedding(6, 6),
        lambda m, h, x: F.scaled_dot_product_attention(*qkv(h), attn_mask=m.weight.to(qkv(h)[0].dtype)),
    ),
    "attention, grouped queries": (
        nn.Identity,
        lambda m, h, x: F.scaled_dot_product_attention(qkv(h)[0], *(t[:, :1] for t in qkv(h)[1:]), enable_gqa=True),
    ),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, h, x: m(h, h, h, need_weights=False)[0],
    ),
    "MultiheadAttention, weights": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, h, x: torch.cat(m(h, h, h), -1),
    ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), call),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda m, h, x: m(h, h.sin()),
    ),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 5)), call),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 5)), call),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), call),
    "checkpoint": (lambda: Checkpointed(False), call),
    "checkpoint, reentrant": (lambda: Checkpointed(True), call),
    "in-place operations": (lambda: nn.Linear(8, 8), inplace),
}
