"""Lion (arXiv 2302.06675): the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.optim.checks import check_at_least_zero, check_below_one, check_flags
from hdet_kernels.optim.group_entries import Group
from hdet_kernels.optim.options import GradientStorage, MasterWeights, Options, StateDtype


class FusedLion(FusedOptimizer):
    """Lion: ``θ ← θ·(1 − lr·weight_decay) − lr·sign(β₁·m + (1 − β₁)·g)``, then ``m ← β₂·m + (1 − β₂)·g``.

    Every element moves by ``lr``, so learning rates are 3 to 10 times smaller than AdamW's, and weight decay is that
    much larger for the same strength ``lr·weight_decay``. A NaN gradient makes its parameter NaN, in all backends: with
    torch's sign(NaN), which is 0, the parameter would stand still in silence.
    """

    rule = "lion"
    shows_step = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
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
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        options = Options(gradients, master_weights, state_dtype, stochastic_rounding, backend, advance_versions)
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, options=options)

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group, "maximize")
        check_at_least_zero(group, "lr", "weight_decay")
        check_below_one(group, "betas")

    def row(self, group: Group) -> dict[str, float | Tensor]:
        beta1, beta2 = group["betas"]
        return {
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "beta1": beta1,
            "beta2": beta2,
            "maximize": group["maximize"],
        }
