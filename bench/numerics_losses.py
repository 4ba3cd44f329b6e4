"""Measure the loss that training reaches after many steps with noisy gradients, beside the same training in float64.

Each of :data:`SEEDS` runs has a quadratic loss ½·Σ h·(θ - θ*)² of :data:`ELEMENTS` parameters, one block of 8-bit
state, with h from 1e-4 to 1 as if the inputs of a linear regression had sizes from 0.01 to 1. Gradients have the noise
of such a regression, √h times standard normal numbers: neighbours in a block differ a hundredfold. The learning rate
falls linearly to 0, and there is no weight decay. All precisions see the same noise, so the ratio of their final loss
to that of float64 is paired by run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bench.numerics_rules import Recursion, Rule

SEEDS, ELEMENTS, BLOCK = 16, 256, 100

#: The 0.975 quantile of Student's t with SEEDS - 1 degrees of freedom.
QUANTILE = 2.13


def losses(
    rule: Rule, steps: int, device: str, precisions: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """Return the mean final loss in float64, and for each precision the ratio to it with a 95 % interval.

    Args:
        rule: The update rule.
        steps: Number of steps.
        device: Where to train.
        precisions: Options of the fused optimizer of float32 parameters, by name.
    """
    generator = torch.Generator().manual_seed(0)
    curvature = torch.logspace(-4, 0, ELEMENTS, dtype=torch.float64, device=device)
    target = torch.randn(SEEDS, ELEMENTS, generator=generator, dtype=torch.float64).to(device)
    options = {"weight_decay": 0.0}
    truth = nn.Parameter(torch.zeros_like(target))
    recursion = Recursion(rule, truth, **options)
    params, optimizers = {"fp64": truth}, {}
    for name, changes in precisions.items():
        params[name] = nn.Parameter(torch.zeros_like(target, dtype=torch.float32))
        optimizers[name] = rule.fused([params[name]], **(rule.options | options | changes))
    known = {dtype: (curvature.to(dtype), target.to(dtype)) for dtype in (torch.float32, torch.float64)}
    for step in range(steps):
        if step % BLOCK == 0:
            drawn = torch.randn(BLOCK, SEEDS, ELEMENTS, generator=generator).to(device) * known[torch.float32][0].sqrt()
        lr = rule.options["lr"] * (1 - step / steps)
        for param in params.values():
            h, optimum = known[param.dtype]
            param.grad = h * (param.detach() - optimum) + drawn[step % BLOCK]
        recursion.options["lr"] = lr
        recursion.step()
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
    found = {name: (curvature * (param.detach() - target).square()).sum(1) / 2 for name, param in params.items()}
    exact = found.pop("fp64")
    reached = {"loss": exact.mean().item(), "runs": SEEDS}
    return {"fp64": reached} | {name: _ratio(loss, exact) for name, loss in found.items()}


def _ratio(loss: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the geometric mean of the ratios and the ends of its interval."""
    logarithms = (loss / exact).log()
    mean, half = logarithms.mean().item(), QUANTILE * logarithms.std().item() / math.sqrt(len(loss))
    return {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}
