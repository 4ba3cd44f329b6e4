"""Compare operations in a stack with separate modules, in fp32 and under autocast.

    python -m bench.stack_operations [--device cuda] [--out FILE]

Every operation is computed in a stack of three replicas and in three separate modules, forward and backward
(``stack_comparison.py``). The record says whether the stack is as precise, and what it computes in a loop over the
replicas. The exit code is 1 if a result is wrong. Without --out the record is written to
``bench/results/<device>_stack_operations.json``.

A case with parameters is an :class:`Operation`: a linear layer before it, so that gradients pass through the operation,
its layers, and a function of the layers, the output h [b, 6, 8] of the linear layer and the input x [b, 6, 8]. A case
without parameters is a function of h and x.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cpuinfo
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hdet_kernels as hk
from bench.records import provenance
from bench.stack_comparison import Comparison, SeparateModulesFail, autocast, compare, watch_loops

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

PureFunction = Callable[[Tensor, Tensor], Tensor]


def image(h: Tensor) -> Tensor:
    return h.reshape(len(h), 4, 3, 4)


def volume(h: Tensor) -> Tensor:
    return h.reshape(len(h), 2, 3, 2, 4)


def labels(x: Tensor) -> Tensor:
    """Return classes [b, 6] below 8."""
    return tokens_of(x).clamp(max=7)


def signs(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype) * 2 - 1


def spd(h: Tensor) -> Tensor:
    """Return positive definite matrices [b, 6, 6], in the precision that decompositions have."""
    wide = h if h.dtype == torch.float64 else h.float()
    with torch.autocast(h.device.type, enabled=False):
        return wide @ wide.mT + 4 * torch.eye(6, dtype=wide.dtype, device=wide.device)


def ctc(h: Tensor, x: Tensor) -> Tensor:
    scores = F.log_softmax(h.transpose(0, 1), -1)
    lengths = torch.full((len(h),), 6, device=h.device), torch.full((len(h),), 2, device=h.device)
    return F.ctc_loss(scores, labels(x)[:, :2].clamp(min=1), *lengths, zero_infinity=True)


def weights(x: Tensor) -> Tensor:
    """Return weights of classes in the precision of the model's input, as users register them."""
    return torch.linspace(0.5, 2, 8, dtype=x.dtype, device=x.device)


def classes(h: Tensor) -> Tensor:
    return h.flatten(0, 1)


FUNCTIONS: dict[str, PureFunction] = {
    "matmul": lambda h, x: h @ h.mT,
    "bmm": lambda h, x: torch.bmm(h, h.mT),
    "baddbmm": lambda h, x: torch.baddbmm(torch.ones_like(h[:, :, :6]), h, h.mT, alpha=0.5),
    "addmm": lambda h, x: torch.addmm(h[0, 0], h[:, 0], h[0, :, :8].mT @ h[0]),
    "addbmm": lambda h, x: torch.addbmm(torch.ones_like(h[0, :, :6]), h, h.mT),
    "einsum": lambda h, x: torch.einsum("bid,bjd,bkd->bijk", h, h.sin(), h.cos()),
    "einsum, batched matmul": lambda h, x: torch.einsum("bid,bjd->bij", h, h.sin()),
    "dot": lambda h, x: torch.dot(h[0, 0], h[0, 1]),
    "mv": lambda h, x: torch.mv(h[0], h[0, 0]),
    "outer": lambda h, x: torch.outer(h[0, 0], h[0, 1]),
    "tensordot": lambda h, x: torch.tensordot(h, h.sin(), dims=([2], [2])),
    "cdist": lambda h, x: torch.cdist(h, h.sin()),
    "pairwise_distance": lambda h, x: F.pairwise_distance(h, h.sin()),
    "cosine_similarity": lambda h, x: F.cosine_similarity(h, h.exp(), -1),
    "normalize": lambda h, x: F.normalize(h, dim=-1),
    "norm": lambda h, x: torch.linalg.vector_norm(h, dim=-1),
    "std": lambda h, x: h.std(-1),
    "logsumexp": lambda h, x: h.logsumexp(-1),
    "max_pool1d": lambda h, x: F.max_pool1d(h, 2),
    "max_pool2d": lambda h, x: F.max_pool2d(image(h), 2),
    "max_pool3d": lambda h, x: F.max_pool3d(volume(h), 2),
    "max_unpool1d": lambda h, x: F.max_unpool1d(*F.max_pool1d(h, 2, return_indices=True), 2),
    "avg_pool1d": lambda h, x: F.avg_pool1d(h, 2),
    "avg_pool2d": lambda h, x: F.avg_pool2d(image(h), 2),
    "avg_pool3d": lambda h, x: F.avg_pool3d(volume(h), 2),
    "lp_pool1d": lambda h, x: F.lp_pool1d(h.exp(), 2, 2),
    "adaptive_avg_pool2d": lambda h, x: F.adaptive_avg_pool2d(image(h), 2),
    "adaptive_max_pool2d": lambda h, x: F.adaptive_max_pool2d(image(h), 2),
    "interpolate, nearest": lambda h, x: F.interpolate(image(h), scale_factor=2),
    "interpolate, linear": lambda h, x: F.interpolate(h, 12, mode="linear"),
    "interpolate, bilinear": lambda h, x: F.interpolate(image(h), (5, 6), mode="bilinear", antialias=False),
    "interpolate, antialiased": lambda h, x: F.interpolate(image(h), (2, 3), mode="bilinear", antialias=True),
    "interpolate, bicubic": lambda h, x: F.interpolate(image(h), (5, 6), mode="bicubic"),
    "interpolate, trilinear": lambda h, x: F.interpolate(volume(h), (4, 3, 5), mode="trilinear"),
    "interpolate, area": lambda h, x: F.interpolate(image(h), (2, 2), mode="area"),
    "grid_sample": lambda h, x: F.grid_sample(
        image(h), image(h)[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False
    ),
    "pixel_shuffle": lambda h, x: F.pixel_shuffle(image(h), 2),
    "pixel_unshuffle": lambda h, x: F.pixel_unshuffle(h.reshape(len(h), 1, 6, 8), 2),
    "unfold": lambda h, x: F.unfold(image(h), 2),
    "fold": lambda h, x: F.fold(h.reshape(len(h), 8, 6), (3, 4), 2),
    "pad, reflect": lambda h, x: F.pad(h, (2, 2), mode="reflect"),
    "pad, replicate": lambda h, x: F.pad(image(h), (1, 1, 1, 1), mode="replicate"),
    "softmax": lambda h, x: F.softmax(h, -1),
    "softmax, method": lambda h, x: h.softmax(-1),
    "softmin": lambda h, x: F.softmin(h, -1),
    "log_softmax": lambda h, x: F.log_softmax(h, -1),
    "cumsum": lambda h, x: h.cumsum(-1),
    "cumprod": lambda h, x: h.cumprod(-1),
    "logcumsumexp": lambda h, x: h.logcumsumexp(-1),
    "topk": lambda h, x: h.topk(3).values,
    "sort": lambda h, x: h.sort().values,
    "max": lambda h, x: h.max(-1).values + h.amin(-1),
    "median": lambda h, x: h.median(-1).values,
    "gather": lambda h, x: h.gather(-1, labels(x)[..., None]),
    "scatter": lambda h, x: torch.zeros_like(h).scatter(-1, labels(x)[..., None], h[..., :1]),
    "scatter_add": lambda h, x: torch.ones_like(h).scatter_add(-1, labels(x)[..., None].expand(-1, -1, 2), h[..., :2]),
    "index_select": lambda h, x: h.index_select(1, torch.arange(0, 6, 2, device=h.device)),
    "index_add": lambda h, x: h.index_add(1, torch.arange(3, device=h.device), h[:, 3:]),
    "indexing": lambda h, x: h[torch.arange(len(h), device=h.device), labels(x)[:, 0].clamp(max=5)],
    "masked_fill": lambda h, x: h.masked_fill(x > 1, -1.0),
    "where": lambda h, x: torch.where(x > 0, h, h.sin()),
    "roll and flip": lambda h, x: h.roll(2, -1) + h.flip(1),
    "linalg.cholesky": lambda h, x: torch.linalg.cholesky(spd(h)),
    "linalg.inv": lambda h, x: torch.linalg.inv(spd(h)),
    "linalg.solve": lambda h, x: torch.linalg.solve(spd(h), spd(h)[..., :1].sin()),
    "linalg.eigvalsh": lambda h, x: torch.linalg.eigvalsh(spd(h)),
    "linalg.svdvals": lambda h, x: torch.linalg.svdvals(spd(h)),
    "logdet": lambda h, x: torch.logdet(spd(h)),
    "fft.rfft": lambda h, x: torch.view_as_real(torch.fft.rfft(spd(h))),
    **{
        name: (lambda function: lambda h, x: function(h))(getattr(F, name))
        for name in (
            *("relu", "gelu", "silu", "mish", "glu", "elu", "selu", "celu", "leaky_relu", "softplus", "hardswish"),
            *("hardtanh", "tanhshrink", "softsign", "logsigmoid", "relu6"),
        )
    },
    "gelu, tanh": lambda h, x: F.gelu(h, approximate="tanh"),
    "cross_entropy": lambda h, x: F.cross_entropy(classes(h), labels(x).flatten()),
    "cross_entropy, weights": lambda h, x: F.cross_entropy(classes(h), labels(x).flatten(), weights(x)),
    "cross_entropy, ignore_index": lambda h, x: F.cross_entropy(classes(h), labels(x).flatten(), ignore_index=1),
    "cross_entropy, smoothed": lambda h, x: F.cross_entropy(classes(h), labels(x).flatten(), label_smoothing=0.1),
    "cross_entropy, probabilities": lambda h, x: F.cross_entropy(classes(h), F.softmax(classes(x), -1)),
    "cross_entropy, sequences": lambda h, x: F.cross_entropy(h.mT, labels(x), reduction="sum"),
    "nll_loss": lambda h, x: F.nll_loss(F.log_softmax(classes(h), -1), labels(x).flatten(), ignore_index=0),
    "mse_loss": lambda h, x: F.mse_loss(h, x),
    "l1_loss": lambda h, x: F.l1_loss(h, x),
    "smooth_l1_loss": lambda h, x: F.smooth_l1_loss(h, x, beta=0.5),
    "huber_loss": lambda h, x: F.huber_loss(h, x, delta=0.5),
    "binary_cross_entropy": lambda h, x: F.binary_cross_entropy(h.sigmoid(), x.sigmoid()),
    "binary_cross_entropy_with_logits": lambda h, x: F.binary_cross_entropy_with_logits(
        h, x.sigmoid(), pos_weight=weights(x)
    ),
    "kl_div": lambda h, x: F.kl_div(F.log_softmax(h, -1), F.softmax(x, -1), reduction="batchmean"),
    "poisson_nll_loss": lambda h, x: F.poisson_nll_loss(h, x.abs()),
    "gaussian_nll_loss": lambda h, x: F.gaussian_nll_loss(h, x, h.exp()),
    "ctc_loss": ctc,
    "cosine_embedding_loss": lambda h, x: F.cosine_embedding_loss(h[:, 0], h[:, 1], signs(x)[:, 0, 0]),
    "hinge_embedding_loss": lambda h, x: F.hinge_embedding_loss(h, signs(x)),
    "margin_ranking_loss": lambda h, x: F.margin_ranking_loss(h[:, 0], h[:, 1], signs(x)[:, 0]),
    "triplet_margin_loss": lambda h, x: F.triplet_margin_loss(h[:, 0], h[:, 1], h[:, 2]),
    "multi_margin_loss": lambda h, x: F.multi_margin_loss(classes(h), labels(x).flatten()),
    "multilabel_soft_margin_loss": lambda h, x: F.multilabel_soft_margin_loss(classes(h), (classes(x) > 0).to(x.dtype)),
    "multilabel_margin_loss": lambda h, x: F.multilabel_margin_loss(classes(h), classes(x > 0).long()),
    "soft_margin_loss": lambda h, x: F.soft_margin_loss(h, signs(x)),
}

# Functions that draw random numbers: these must differ between replicas.
RANDOM: dict[str, PureFunction] = {
    "dropout": lambda h, x: F.dropout(h),
    "dropout1d": lambda h, x: F.dropout1d(h),
    "dropout2d": lambda h, x: F.dropout2d(image(h)),
    "alpha_dropout": lambda h, x: F.alpha_dropout(h, training=True),
    "feature_alpha_dropout": lambda h, x: F.feature_alpha_dropout(h, training=True),
    "rrelu": lambda h, x: F.rrelu(h, training=True),
    "gumbel_softmax": lambda h, x: F.gumbel_softmax(h),
    "fractional_max_pool2d": lambda h, x: F.fractional_max_pool2d(h[:, None], 2, output_size=(4, 5)),
    "attention, dropout": lambda h, x: F.scaled_dot_product_attention(*qkv(h), dropout_p=0.5),
    "rand_like": lambda h, x: h * torch.rand_like(h),
    "normal": lambda h, x: h + torch.randn(8, device=h.device),
    "multinomial": lambda h, x: h.gather(-1, torch.multinomial(h[0].softmax(-1), 1)[None].expand(len(h), -1, -1)),
    "bernoulli": lambda h, x: h * torch.bernoulli(x.sigmoid()),
}

RESULTS = Path(__file__).parent / "results"
REPLICAS, SLICE = 3, 4
PRECISIONS = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "bf16", "fp16")}
# All operations: those that are compared, and those that draw random numbers.
OPERATIONS = [*LAYERS, *FUNCTIONS]
RANDOM_OPERATIONS = list(RANDOM)


def outcome(name: str, precision: str, device: str) -> dict[str, Any]:
    """Return the entry of one operation in one precision.

    Its ``result`` is ``"equal"`` or ``"wrong"``; ``"refused"`` if the stack raises; ``"unknown"`` if torch itself
    cannot compute the operation in this precision.
    """
    torch.manual_seed(0)
    entry: dict[str, Any] = {"operation": name, "precision": precision}
    try:
        found = _random(name, precision, device) if name in RANDOM else _compared(name, precision, device)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        return entry | {"result": "unknown" if isinstance(error, SeparateModulesFail) else "refused", "reason": reason}
    entry |= {
        "result": "equal" if found.excess <= 1 else "wrong",
        "excess": round(found.excess, 4),
        "where": found.where,
    }
    return entry | {"loops": found.loops, "one by one": found.one_by_one}


def _compared(name: str, precision: str, device: str) -> Comparison:
    build, function = LAYERS.get(name) or (nn.Identity, _with_layers(FUNCTIONS[name]))
    return compare(Operation(build(), function).to(device), _loss, [_input(device)], precision, REPLICAS)


def _random(name: str, precision: str, device: str) -> Comparison:
    """Compare nothing, but find out whether replicas that are equal draw different random numbers."""
    module = Operation(nn.Identity(), _with_layers(RANDOM[name])).to(device)
    with autocast(device, precision):
        try:
            _loss(module, _input(device)[:SLICE])
        except RuntimeError as error:
            raise SeparateModulesFail(str(error)) from error
    stack = hk.ReplicaStack(module, REPLICAS, gradients="local")
    found = Comparison()
    with autocast(device, precision), watch_loops(found):
        stack.backward(_loss, _input(device)[:SLICE], same_batch=True)
    gradient = stack._parameters[("first.weight",)].grad
    rows = [] if gradient is None else [tuple(row.flatten().tolist()) for row in gradient]
    finite = gradient is not None and bool(gradient.isfinite().all())
    found.excess, found.where = 0.0 if finite and len(set(rows)) == REPLICAS else float("inf"), "random numbers"
    return found


def _with_layers(function: PureFunction) -> Any:
    return lambda layers, h, x: function(h, x)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    return loss


def _input(device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(REPLICAS * SLICE, CHANNELS, WIDTH, generator=generator).to(device)


def measured(device: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the entries of the named operations in all precisions of the device."""
    if device == "cuda":  # else convolutions in fp32 are rounded to 10 bits
        torch.backends.cudnn.allow_tf32 = False
    return [outcome(name, precision, device) for name in names for precision in PRECISIONS[device]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=PRECISIONS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    arguments = parser.parse_args()
    device: str = arguments.device
    machine = torch.cuda.get_device_name() if device == "cuda" else cpuinfo.get_cpu_info()["brand_raw"]
    short_name = machine.split()[-1] if device == "cuda" else "CPU"
    record = {
        **provenance(f"python -m bench.stack_operations --device {device}"),
        "device": short_name,
        "machine": machine,
        "replicas": REPLICAS,
        "operations": measured(device, [*OPERATIONS, *RANDOM_OPERATIONS]),
    }
    out = arguments.out or RESULTS / f"{short_name.lower()}_stack_operations.json"
    out.write_text(json.dumps(record, indent=1) + "\n")
    for entry in record["operations"]:
        if entry["result"] != "equal" or entry["one by one"] or entry["loops"]:
            print(f"{entry['operation']}, {entry['precision']}: {entry}")
    print(f"\nrecord: {out}", file=sys.stderr)
    return 1 if any(entry["result"] == "wrong" for entry in record["operations"]) else 0  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(main())
