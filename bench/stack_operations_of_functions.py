"""Functions without parameters that the table of ``stack_operations.py`` lists: products, pooling, losses, random ones.

Each is a function of h and x, [b, 6, 8] both; h depends on parameters. See ``stack_operations_of_layers.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.stack_operations_of_layers import qkv, tokens_of

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
