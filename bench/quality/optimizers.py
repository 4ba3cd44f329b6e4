"""Optimizers of the tasks: torch's for plain training, and the fused ones for replicas, with the same options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

import hdet_kernels as hk


class Rule(NamedTuple):
    """An optimizer for one model and the same for replicas, with the options of both."""

    plain: Callable[..., Optimizer]
    replicas: Callable[..., Optimizer]
    options: dict[str, Any]


# torch has no Lion.
OPTIMIZERS: dict[str, Rule] = {
    "adamw": Rule(torch.optim.AdamW, hk.FusedAdamW, {"weight_decay": 0.01}),
    "adam": Rule(torch.optim.Adam, hk.FusedAdam, {}),
    "sgd": Rule(torch.optim.SGD, hk.FusedSGD, {"momentum": 0.9}),
    "adagrad": Rule(torch.optim.Adagrad, hk.FusedAdagrad, {}),
    "lion": Rule(hk.FusedLion, hk.FusedLion, {}),
}


def plain_optimizer(name: str, groups: list[dict[str, Any]], lr: float) -> Optimizer:
    """Return the optimizer of one model."""
    rule = OPTIMIZERS[name]
    return rule.plain(groups, lr=lr, **rule.options)


def replica_optimizer(name: str, groups: list[dict[str, Any]], lr: float) -> Optimizer:
    """Return the optimizer of a stack's or a process' replicas."""
    rule = OPTIMIZERS[name]
    return rule.replicas(groups, lr=lr, **rule.options)
