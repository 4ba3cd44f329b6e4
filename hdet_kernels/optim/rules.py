"""The optimizers whose step is one pass over the parameters: SGD, Adam, AdamW, Adagrad and Lion.

Each states the options of its groups and maps a group to a row of the hyperparameter table; ``hdet_kernels/ops`` has
the arithmetic. ``shared`` stands for the keywords of :class:`.options.SharedOptions`, which all of them take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.optim.group_entries import Group
from hdet_kernels.optim.options import (
    SharedOptions,
    check_at_least_zero,
    check_below_one,
    check_finite,
    check_flags,
    on_host,
)


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
        **shared: Unpack[SharedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **shared)

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
        return _entries(group, "lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize")

    def state_names(self, group: Group) -> tuple[str, ...]:
        # A scheduler may turn momentum on: OneCycleLR does, for an optimizer that was built without.
        with_momentum = isinstance(group["momentum"], Tensor) or group["momentum"] != 0
        return ("momentum_buffer",) if with_momentum else ()


class FusedAdam(FusedOptimizer):
    """Adam as in torch.optim: ``g ← g + weight_decay·θ``, then ``θ ← θ − lr·m̂/(√v̂ + eps)``."""

    rule = "adam"
    #: Whether weight decay acts on the parameters directly, not through the gradient.
    decoupled: ClassVar[bool] = False

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
        **shared: Unpack[SharedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **shared)

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
        return _entries(group, "lr", "weight_decay", "eps", "amsgrad", "maximize") | _betas(group["betas"])

    def state_names(self, group: Group) -> tuple[str, ...]:
        names = super().state_names(group)
        return names if group["amsgrad"] else tuple(name for name in names if name != "max_exp_avg_sq")

    def known_states(self, group: Group) -> tuple[str, ...]:
        # Of a group whose amsgrad was turned off the maximum is kept, but in 8 bits there is none.
        return self.state_names(group) if self.options.state_dtype == torch.int8 else super().known_states(group)


class FusedAdamW(FusedAdam):
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
        **shared: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad=amsgrad, maximize=maximize, **shared)


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
        **shared: Unpack[SharedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **shared)

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group, "maximize")
        check_at_least_zero(group, "lr", "lr_decay", "weight_decay", "eps")
        check_at_least_zero(group, "initial_accumulator_value", at_most=torch.finfo(torch.float32).max)

    def row(self, group: Group) -> dict[str, float | Tensor]:
        return _entries(group, "lr", "weight_decay", "eps", "lr_decay", "maximize")

    def initial_state(self, name: str, group: Group) -> float:
        return float(group["initial_accumulator_value"])


class FusedLion(FusedOptimizer):
    """Lion: ``θ ← θ·(1 − lr·weight_decay) − lr·sign(β₁·m + (1 − β₁)·g)``, then ``m ← β₂·m + (1 − β₂)·g``.

    Every element moves by ``lr`` (arXiv 2302.06675), so learning rates are 3 to 10 times smaller than AdamW's, and
    weight decay is that much larger for the same strength ``lr·weight_decay``. A NaN gradient makes its parameter NaN,
    in all backends: with torch's sign(NaN), which is 0, the parameter would stand still in silence.
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
        **shared: Unpack[SharedOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **shared)

    def check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group, "maximize")
        check_at_least_zero(group, "lr", "weight_decay")
        check_below_one(group, "betas")

    def row(self, group: Group) -> dict[str, float | Tensor]:
        return _entries(group, "lr", "weight_decay", "maximize") | _betas(group["betas"])


def _entries(group: Group, *names: str) -> dict[str, float | Tensor]:
    return {name: group[name] for name in names}


def _betas(betas: tuple[float | Tensor, float | Tensor]) -> dict[str, float | Tensor]:
    return {"beta1": betas[0], "beta2": betas[1]}
