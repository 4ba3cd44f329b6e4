"""The cases that optimizer tests share: every fused optimizer beside torch's own, and gradients for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hdet_kernels.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLion, FusedOptimizer, FusedSGD

Maker = Callable[..., torch.optim.Optimizer]


#: Options by name; torch.optim's class, ours, and the options.
PAIRS: dict[str, tuple[Maker, type[FusedOptimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, FusedSGD, {"lr": 0.1}),
    "sgd-momentum": (torch.optim.SGD, FusedSGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    "sgd-nesterov": (torch.optim.SGD, FusedSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": (torch.optim.Adam, FusedAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "adam-amsgrad": (torch.optim.Adam, FusedAdam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, FusedAdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw-amsgrad": (torch.optim.AdamW, FusedAdamW, {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.95)}),
    "adagrad": (
        torch.optim.Adagrad,
        FusedAdagrad,
        {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2, "weight_decay": 0.01},
    ),
}


FUSED = {name: (ours, options) for name, (_, ours, options) in PAIRS.items()} | {
    "lion": (FusedLion, {"lr": 0.01, "weight_decay": 0.1}),
}


SHAPES = ((3, 5), (), (4097,), (0, 3), (1,))


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]
    pixels = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    return [*params, nn.Parameter(pixels.to(device, dtype))]


def give_gradients(*models: Iterable[Tensor], seed: int, scale: float = 1.0) -> None:
    """The same gradients to every list of parameters, whatever their dtype and device."""
    for params in models:
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            value = (torch.randn(param.shape, generator=generator) * scale).to(torch.bfloat16)
            param.grad = torch.empty_like(param).copy_(value)


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], seeds: Iterable[int]) -> None:
    for seed in seeds:
        give_gradients(params, seed=seed)
        optimizer.step()


def torch_optimizer(name: str, params: Iterable[Any], **changes: Any) -> torch.optim.Optimizer:
    make, _, options = PAIRS[name]
    return make(params, foreach=False, **(options | changes))


def fused_optimizer(name: str, params: Iterable[Any], **changes: Any) -> FusedOptimizer:
    make, options = FUSED[name]
    return make(params, **(options | changes))
