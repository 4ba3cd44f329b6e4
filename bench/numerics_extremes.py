"""Measure every backend at extreme learning rates and at subnormal numbers, beside torch.optim.

A subnormal number of float32 is smaller than 2⁻¹²⁶ ≈ 1.2e-38. Hardware can be told to flush such numbers to zero;
torch does not, by default. ``flushed`` counts results that are zero here and not in torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import hdet_kernels as hk
from bench.numerics_rules import RULES, Recursion, Rule, torch_optimizer
from hdet_kernels.ops.backends import serving_on

RATES = [10.0**power for power in range(-12, 4)]
RATE_STEPS, SUBNORMAL_STEPS = 8, 3

#: Sizes of the gradients, so that g and g² are subnormal in turn, and of the parameters. No update and no weight decay
#: is about as large as what it is added to: a difference of nearly equal numbers would show other errors.
SIZES = (1e-44, 1e-42, 1e-40, 1e-38, 1e-30, 1e-22, 1e-20, 1e-19, 2e-2, 1.0)
PARAM_SIZES = tuple(0.7 * size for size in SIZES)

#: Rules and learning rates that Triton's interpreter runs, which takes a tenth of a second for a step.
INTERPRETED = ("adamw", "lion")
INTERPRETED_RATES = (1e-12, 1e3)


def backends(device: str) -> list[str]:
    """Return the backends that run on a device here."""
    return [name for name in serving_on(device) if hk.backends()[name] == "ok"]


def rules_for(backend: str, device: str) -> dict[str, Rule]:
    interpreted = (backend, device) == ("triton", "cpu")
    return {name: rule for name, rule in RULES.items() if not interpreted or name in INTERPRETED}


def _trained(optimizer: Any, param: nn.Parameter, gradients: list[Tensor]) -> Tensor:
    for g in gradients:
        param.grad = g.to(param.device, param.dtype)
        optimizer.step()
    return param.detach().cpu().double()


def _three(
    rule: Rule, value: Tensor, gradients: list[Tensor], device: str, backend: str, lr: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parameter after some steps: ours, torch's in float32, and the truth in float64."""
    ours, plain = (nn.Parameter(value.to(device, copy=True)) for _ in range(2))
    truth = nn.Parameter(value.double())
    fused = rule.fused([ours], backend=backend, **(rule.options | {"lr": lr}))
    return (
        _trained(fused, ours, gradients),
        _trained(torch_optimizer(rule, plain, lr=lr), plain, gradients),
        _trained(Recursion(rule, truth, lr=lr), truth, gradients),
    )


def rate_errors(rule: Rule, device: str, backend: str, lr: float) -> tuple[float, float]:
    """Return the largest relative error of ours and of torch's at a learning rate, in units of float32's rounding."""
    generator = torch.Generator().manual_seed(0)
    value = torch.linspace(-1, 1, 16)
    grads = [torch.randn(16, generator=generator) for _ in range(RATE_STEPS)]
    ours, plain, truth = _three(rule, value, grads, device, backend, lr)
    unit = truth.abs().max() * torch.finfo(torch.float32).eps
    return float((ours - truth).abs().max() / unit), float((plain - truth).abs().max() / unit)


def learning_rates(device: str) -> dict[str, Any]:
    """Return, by backend and rule, the largest error over all learning rates, ours and torch's."""
    found: dict[str, Any] = {}
    for backend in backends(device):
        for name, rule in rules_for(backend, device).items():
            rates = INTERPRETED_RATES if (backend, device) == ("triton", "cpu") else RATES
            pairs = [rate_errors(rule, device, backend, lr) for lr in rates]
            worst = {"ours": max(a for a, _ in pairs), "torch": max(b for _, b in pairs)}
            found.setdefault(backend, {})[name] = worst
    return found


def subnormal_case(rule: Rule, device: str, backend: str) -> dict[str, Any]:
    """Return how many results were flushed to zero, and the largest distance to torch's and to the truth.

    Distances are in units of the last place of float32 at the true result, which is 2⁻¹⁴⁹ for a subnormal one.
    """
    grid = torch.tensor([(theta, sign * g) for theta in PARAM_SIZES for g in SIZES for sign in (1, -1)])
    value, g = grid[:, 0].contiguous(), grid[:, 1].contiguous()
    ours, plain, truth = _three(rule, value, [g] * SUBNORMAL_STEPS, device, backend, rule.options["lr"])
    unit = torch.tensor([math.ulp(abs(x)) for x in truth.tolist()], dtype=torch.float64) * 2.0**29
    unit = unit.clamp(min=2.0**-149)
    return {
        "results": len(truth),
        "flushed": int(((ours == 0) & (plain != 0)).sum()),
        "units from torch": float(((ours - plain).abs() / unit).max()),
        "units from truth": float(((ours - truth).abs() / unit).max()),
        "torch from truth": float(((plain - truth).abs() / unit).max()),
    }


def subnormals(device: str) -> dict[str, Any]:
    """Return the results of :func:`subnormal_case` by backend and rule."""
    return {
        backend: {name: subnormal_case(rule, device, backend) for name, rule in rules_for(backend, device).items()}
        for backend in backends(device)
    }
