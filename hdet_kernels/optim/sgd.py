"""Stochastic gradient descent, with or without (Nesterov) momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.optim.checks import check_at_least_zero, check_finite, check_flags, on_host
from hdet_kernels.optim.group_entries import Group
from hdet_kernels.optim.options import GradientStorage, MasterWeights, Options, StateDtype


class FusedSGD(FusedOptimizer):
    """SGD as in torch.optim: ``θ ← θ − lr·d`` with ``d`` the (Nesterov) momentum of ``g + weight_decay·θ``.

    As in torch, the momentum buffer starts as the first gradient, without dampening. If a GradScaler skips the very
    first step with momentum, the buffer exists and is zero; a run resumed from a checkpoint then applies dampening.
    """

    rule = "sgd"
    shows_step = False
    optional_state = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
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
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        options = Options(gradients, master_weights, state_dtype, stochastic_rounding, backend, advance_versions)
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, options=options)

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group, "nesterov", "maximize")
        check_at_least_zero(group, "lr", "momentum", "weight_decay")
        check_finite(group, "dampening")
        readable = on_host(group["momentum"]) and on_host(group["dampening"])
        if group["nesterov"] and readable and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov=True needs momentum above 0 and dampening 0, got momentum={group['momentum']} and "
                f"dampening={group['dampening']}; set momentum=0.9 and leave dampening out"
            )

    def row(self, group: Group) -> dict[str, float | Tensor]:
        return {
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "momentum": group["momentum"],
            "dampening": group["dampening"],
            "nesterov": group["nesterov"],
            "maximize": group["maximize"],
        }

    def state_names(self, group: Group) -> tuple[str, ...]:
        # A scheduler may turn momentum on: OneCycleLR does, for an optimizer that was built without.
        with_momentum = isinstance(group["momentum"], Tensor) or group["momentum"] != 0
        return ("momentum_buffer",) if with_momentum else ()
