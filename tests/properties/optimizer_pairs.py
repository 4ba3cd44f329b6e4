"""The optimizers that are compared: torch's class, the fused class, options of both, and what may be edited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from hdet_kernels.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLion, FusedOptimizer, FusedSGD


class Lion(Optimizer):
    """Lion in torch, which has none: θ ← θ·(1 − lr·λ) − lr·sign(β₁·m + (1 − β₁)·g), m ← β₂·m + (1 − β₂)·g."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), **options: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0, "maximize": False, **options})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                g = -p.grad if group["maximize"] else p.grad
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(beta1 * m + (1 - beta1) * g))
                m.mul_(beta2).add_((1 - beta2) * g)


@dataclass(frozen=True)
class Pair:
    """torch's class, the fused class, the options of both, and the values that may be written to a group's entries."""

    torch: Any
    fused: type[FusedOptimizer]
    options: dict[str, Any]
    edits: dict[str, tuple[Any, ...]]


_RATES = {"lr": (0.0, 1e-4, 0.02), "maximize": (False, True)}
_DECAY = {"weight_decay": (0.0, 0.1)}
_ADAM = {**_RATES, **_DECAY, "betas": ((0.9, 0.999), (0.5, 0.9), (0.0, 0.8)), "eps": (1e-8, 1e-3)}

PAIRS: dict[str, Pair] = {
    "sgd": Pair(torch.optim.SGD, FusedSGD, {"lr": 0.1}, {**_RATES, **_DECAY, "momentum": (0.0, 0.9)}),
    "sgd-momentum": Pair(
        torch.optim.SGD,
        FusedSGD,
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
        {**_RATES, **_DECAY, "momentum": (0.0, 0.5, 0.9), "dampening": (0.0, 0.5)},
    ),
    "sgd-nesterov": Pair(
        torch.optim.SGD,
        FusedSGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "maximize": True},
        {**_RATES, **_DECAY, "momentum": (0.5, 0.9), "nesterov": (False, True)},
    ),
    "adam": Pair(torch.optim.Adam, FusedAdam, {"lr": 0.01, "weight_decay": 0.1}, _ADAM),
    "adam-amsgrad": Pair(torch.optim.Adam, FusedAdam, {"lr": 0.01, "amsgrad": True}, _ADAM),
    "adamw": Pair(torch.optim.AdamW, FusedAdamW, {"lr": 0.01, "weight_decay": 0.1}, _ADAM),
    "adamw-amsgrad": Pair(torch.optim.AdamW, FusedAdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}, _ADAM),
    "adagrad": Pair(
        torch.optim.Adagrad,
        FusedAdagrad,
        {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2, "weight_decay": 0.01},
        {**_RATES, **_DECAY, "lr_decay": (0.0, 0.5), "eps": (1e-10, 1e-3)},
    ),
    "lion": Pair(
        Lion,
        FusedLion,
        {"lr": 0.01, "weight_decay": 0.1},
        {**_RATES, **_DECAY, "betas": ((0.9, 0.99), (0.5, 0.8), (0.0, 0.9))},
    ),
}
