"""Measure the loss that training reaches after many steps with noisy gradients, beside the same training in float64.

Each run has a quadratic loss ½·Σ h·(θ - θ*)² of :data:`ELEMENTS` parameters, one block of 8-bit state, as if the
inputs of a linear regression had sizes √h. Gradients have the noise of such a regression, √h times standard normal
numbers. The sizes in a block differ by one of :data:`SPREADS`, from the smallest to the largest. The learning rate
falls linearly to 0, and there is no weight decay. All precisions see the same noise, so the ratio of their final loss
to that of float64 is paired by run; each spread has :data:`SEEDS` of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bench.numerics_rules import Recursion, Rule

SEEDS, ELEMENTS, BLOCK = 16, 256, 100

#: How much larger the largest gradients of a block are than its smallest.
SPREADS = (1, 10, 100)

#: The 0.975 quantile of Student's t with SEEDS - 1 degrees of freedom.
QUANTILE = 2.13


def losses(
    rule: Rule, steps: int, device: str, precisions: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return for each spread the mean final loss in float64, and each precision's ratio to it with a 95 % interval.

    Args:
        rule: The update rule.
        steps: Number of steps.
        device: Where to train.
        precisions: Options of the fused optimizer of float32 parameters, by name.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = [torch.logspace(-math.log10(spread), 0, ELEMENTS, dtype=torch.float64) for spread in SPREADS]
    curvature = torch.stack(sizes).square().repeat_interleave(SEEDS, 0).to(device)
    target = torch.randn(curvature.shape, generator=generator, dtype=torch.float64).to(device)
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
            drawn = torch.randn(BLOCK, *target.shape, generator=generator).to(device) * known[torch.float32][0].sqrt()
        lr = rule.options["lr"] * (1 - step / steps)
        for param in params.values():
            h, optimum = known[param.dtype]
            param.grad = h * (param.detach() - optimum) + drawn[step % BLOCK]
        recursion.options["lr"] = lr
        recursion.step()
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
    found = {}
    for number, spread in enumerate(SPREADS):
        runs = slice(number * SEEDS, (number + 1) * SEEDS)
        reached = {
            name: (curvature * (param.detach() - target).square())[runs].sum(1) / 2 for name, param in params.items()
        }
        exact = reached.pop("fp64")
        whole = {"fp64": {"loss": exact.mean().item(), "runs": SEEDS}}
        found[str(spread)] = whole | {name: _ratio(loss, exact) for name, loss in reached.items()}
    return found


def _ratio(loss: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the geometric mean of the ratios and the ends of its interval."""
    logarithms = (loss / exact).log()
    mean, half = logarithms.mean().item(), QUANTILE * logarithms.std().item() / math.sqrt(len(loss))
    return {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}
