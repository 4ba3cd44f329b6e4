"""Adagrad: steps that shrink with the sum of the squared gradients, element by element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.optim.checks import check_at_least_zero, check_flags
from hdet_kernels.optim.group_entries import Group
from hdet_kernels.optim.options import GradientStorage, MasterWeights, Options, StateDtype


class FusedAdagrad(FusedOptimizer):
    """Adagrad as in torch.optim: ``s ← s + g²``, ``θ ← θ − lr/(1 + (t − 1)·lr_decay)·g/(√s + eps)``."""

    rule = "adagrad"
    eager_state = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        gradients: GradientStorage = "autograd",
        master_weights: MasterWeights = None,
        state_dtype: StateDtype = torch.float32,
        stochastic_rounding: bool = False,
        backend: str | None = None,
        advance_versions: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        options = Options(gradients, master_weights, state_dtype, stochastic_rounding, backend, advance_versions)
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, options=options)

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group, "maximize")
        check_at_least_zero(group, "lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")

    def row(self, group: Group) -> dict[str, float | Tensor]:
        return {
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "lr_decay": group["lr_decay"],
            "maximize": group["maximize"],
        }

    def initial_state(self, name: str, group: Group) -> float:
        return float(group["initial_accumulator_value"])
