"""Adam and AdamW: one update rule with two kinds of weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.optim.checks import check_at_least_zero, check_below_one, check_flags
from hdet_kernels.optim.group_entries import Group
from hdet_kernels.optim.options import GradientStorage, MasterWeights, Options, StateDtype


class _AdamFamily(FusedOptimizer):
    #: Whether weight decay acts on the parameters directly, not through the gradient.
    decoupled: ClassVar[bool]

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group, "amsgrad", "maximize")
        if group["amsgrad"] and self.options.state_dtype == torch.int8:
            raise ValueError(
                "amsgrad=True needs state_dtype=torch.float32 or torch.bfloat16, got state_dtype=int8: the maximum of "
                "a second moment that is rounded at random in every step would grow by that alone"
            )
        check_at_least_zero(group, "lr", "eps", "weight_decay")
        check_below_one(group, "betas")
        if group.get("decoupled_weight_decay", self.decoupled) != self.decoupled:
            other = "FusedAdam" if self.decoupled else "FusedAdamW"
            raise ValueError(
                f"the loaded state_dict has decoupled_weight_decay={not self.decoupled}, {type(self).__name__} has "
                f"{self.decoupled}; load it into {other}"
            )

    def row(self, group: Group) -> dict[str, float | Tensor]:
        beta1, beta2 = group["betas"]
        return {
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "amsgrad": group["amsgrad"],
            "maximize": group["maximize"],
        }

    def state_names(self, group: Group) -> tuple[str, ...]:
        names = super().state_names(group)
        return names if group["amsgrad"] else tuple(name for name in names if name != "max_exp_avg_sq")

    def known_states(self, group: Group) -> tuple[str, ...]:
        # Of a group whose amsgrad was turned off the maximum is kept, but in 8 bits there is none.
        return self.state_names(group) if self.options.state_dtype == torch.int8 else super().known_states(group)


class FusedAdam(_AdamFamily):
    """Adam as in torch.optim: ``g ← g + weight_decay·θ``, then ``θ ← θ − lr·m̂/(√v̂ + eps)``."""

    rule = "adam"
    decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        gradients: GradientStorage = "autograd",
        master_weights: MasterWeights = None,
        state_dtype: StateDtype = torch.float32,
        stochastic_rounding: bool = False,
        backend: str | None = None,
        advance_versions: bool = True,
    ) -> None:
        defaults = _defaults(lr, betas, eps, weight_decay, amsgrad, maximize)
        options = Options(gradients, master_weights, state_dtype, stochastic_rounding, backend, advance_versions)
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, options=options)


class FusedAdamW(_AdamFamily):
    """AdamW as in torch.optim: ``θ ← θ·(1 − lr·weight_decay)``, then ``θ ← θ − lr·m̂/(√v̂ + eps)``."""

    rule = "adamw"
    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        gradients: GradientStorage = "autograd",
        master_weights: MasterWeights = None,
        state_dtype: StateDtype = torch.float32,
        stochastic_rounding: bool = False,
        backend: str | None = None,
        advance_versions: bool = True,
    ) -> None:
        defaults = _defaults(lr, betas, eps, weight_decay, amsgrad, maximize)
        options = Options(gradients, master_weights, state_dtype, stochastic_rounding, backend, advance_versions)
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, options=options)


def _defaults(
    lr: float | Tensor,
    betas: tuple[float | Tensor, float | Tensor],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
) -> dict[str, Any]:
    return {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
