"""The update rules as recursions, written out once more, for the truth in float64.

θ is a parameter, g its gradient, s a dict of the state, t the number of this step from 1. Each function changes θ and s
in place, in whatever dtype they have. They are independent of the package and of torch.optim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hdet_kernels as hk

State = dict[str, Tensor]


def sgd(theta: Tensor, g: Tensor, s: State, t: int, *, lr: float, momentum: float, weight_decay: float) -> None:
    g = g + weight_decay * theta
    s["b"] = momentum * s["b"] + g if "b" in s else g
    theta -= lr * s["b"]


def adam(
    theta: Tensor,
    g: Tensor,
    s: State,
    t: int,
    *,
    lr: float,
    weight_decay: float,
    decoupled: bool,
    amsgrad: bool = False,
) -> None:
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    if decoupled:
        theta *= 1 - lr * weight_decay
    else:
        g = g + weight_decay * theta
    zero = torch.zeros_like(theta)
    s["m"] = beta1 * s.get("m", zero) + (1 - beta1) * g
    s["v"] = beta2 * s.get("v", zero) + (1 - beta2) * g * g
    s["u"] = torch.maximum(s.get("u", zero), s["v"]) if amsgrad else s["v"]
    theta -= lr / (1 - beta1**t) * s["m"] / (s["u"].sqrt() / (1 - beta2**t) ** 0.5 + eps)


def adagrad(theta: Tensor, g: Tensor, s: State, t: int, *, lr: float, lr_decay: float, weight_decay: float) -> None:
    g = g + weight_decay * theta
    s["s"] = s.get("s", torch.zeros_like(theta)) + g * g
    theta -= lr / (1 + (t - 1) * lr_decay) * g / (s["s"].sqrt() + 1e-10)


def lion(theta: Tensor, g: Tensor, s: State, t: int, *, lr: float, weight_decay: float) -> None:
    m = s.get("m", torch.zeros_like(theta))
    theta *= 1 - lr * weight_decay
    theta -= lr * (0.9 * m + 0.1 * g).sign()
    s["m"] = 0.99 * m + 0.01 * g


@dataclass(frozen=True)
class Rule:
    """A rule: its recursion, our class, torch's class (None: the recursion in float32), and the options of each."""

    recursion: Callable[..., None]
    fused: Callable[..., Any]
    torch: Callable[..., Any] | None
    options: dict[str, Any]
    recursion_options: dict[str, Any]


def _rule(recursion: Any, fused: Any, plain: Any, options: dict[str, Any], **only_in_recursion: Any) -> Rule:
    given = {name: value for name, value in options.items() if name != "betas"}
    return Rule(recursion, fused, plain, options, given | only_in_recursion)


RULES: dict[str, Rule] = {
    "sgd": _rule(sgd, hk.FusedSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.0, "weight_decay": 1e-3}),
    "sgd-momentum": _rule(sgd, hk.FusedSGD, torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-3}),
    "adam-amsgrad": _rule(
        adam, hk.FusedAdam, torch.optim.Adam, {"lr": 1e-3, "weight_decay": 1e-3, "amsgrad": True}, decoupled=False
    ),
    "adamw": _rule(adam, hk.FusedAdamW, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 1e-2}, decoupled=True),
    "adagrad": _rule(
        adagrad, hk.FusedAdagrad, torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 1e-5, "weight_decay": 1e-3}
    ),
    "lion": _rule(lion, hk.FusedLion, None, {"lr": 1e-4, "weight_decay": 1e-1}),
}


class Recursion:
    """An optimizer that applies a recursion to one parameter, in that parameter's dtype."""

    def __init__(self, rule: Rule, param: Tensor, **changes: Any) -> None:
        self.rule, self.param, self.options = rule, param, rule.recursion_options | changes
        self.state: State = {}
        self.t = 0

    @torch.no_grad()
    def step(self) -> None:
        assert self.param.grad is not None
        self.t += 1
        self.rule.recursion(self.param, self.param.grad, self.state, self.t, **self.options)


def torch_optimizer(rule: Rule, param: Tensor, **changes: Any) -> Any:
    """Return torch's optimizer of a rule, or the recursion in the parameter's dtype where torch has none."""
    if rule.torch is None:
        return Recursion(rule, param, **changes)
    return rule.torch([param], foreach=False, **(rule.options | changes))
