"""Measure the error of every update rule and precision against float64 over many steps, and at extreme numbers.

    python -m bench.numerics [--steps 100000] [--device cuda] [--jobs 6] [--precisions NAME …] [--out FILE]

One parameter of 64 elements. Its gradients are scripted, exact in every precision, and of sizes from 1e-4 to 1. The
truth is a recursion in float64. Errors are relative to the largest parameter: the root mean square and the maximum over
the elements, ours beside torch.optim's in float32 (the same work in the same precision) and in bf16. Further:
learning rates from 1e-12 to 1e3 and subnormal numbers, for every backend, and the loss that training with noisy
gradients reaches in as many steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hdet_kernels as hk
from bench.records import provenance
from hdet_kernels.ops.backends import serving_on

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


SEEDS, LOSS_ELEMENTS, LOSS_BLOCK = 16, 256, 100
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
    sizes = [torch.logspace(-math.log10(spread), 0, LOSS_ELEMENTS, dtype=torch.float64) for spread in SPREADS]
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
        if step % LOSS_BLOCK == 0:
            drawn = (
                torch.randn(LOSS_BLOCK, *target.shape, generator=generator).to(device) * known[torch.float32][0].sqrt()
            )
        lr = rule.options["lr"] * (1 - step / steps)
        for param in params.values():
            h, optimum = known[param.dtype]
            param.grad = h * (param.detach() - optimum) + drawn[step % LOSS_BLOCK]
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


STEPS, ELEMENTS, BLOCK = 100_000, 64, 1000
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: dtype of the parameters and options of the fused optimizer; the baseline that does as much work.
PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any], str]] = {
    "fp32": (FP32, {}, "torch fp32"),
    "bf16, master": (BF16, {}, "torch fp32"),
    "fp16, master": (FP16, {}, "torch fp32"),
    "bf16, stochastic rounding": (BF16, {"stochastic_rounding": True}, "torch bf16"),
    "fp32, state bf16": (FP32, {"state_dtype": BF16}, "torch bf16"),
    "bf16, master, state bf16": (BF16, {"state_dtype": BF16}, "torch bf16"),
    "fp32, state int8": (FP32, {"state_dtype": "int8"}, "torch bf16"),
}

BASELINES = {"torch fp32": FP32, "torch bf16": BF16}


def gradients(steps: int, device: str) -> Iterator[Tensor]:
    """Yield the gradient of each step in float32: a mean, a slow wave and noise, exact in bf16 and fp16."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-4, 0, ELEMENTS)
    phase = torch.linspace(0, 6, ELEMENTS)
    for start in range(0, steps, BLOCK):
        count = min(BLOCK, steps - start)
        wave = torch.sin(torch.arange(start, start + count)[:, None] / 500 + phase)
        block = (torch.randn(count, ELEMENTS, generator=generator) + wave + 0.1) * size
        block = block.to(BF16).float()
        yield from block.masked_fill(block.abs() < 2.0**-14, 0.0).to(device)


def start(dtype: torch.dtype, device: str) -> nn.Parameter:
    """Return the parameter before the first step, exact in every dtype."""
    return nn.Parameter(torch.linspace(-1, 1, ELEMENTS).to(BF16).to(device, dtype))


def errors(
    rule: Rule,
    steps: int,
    device: str = "cpu",
    backend: str | None = None,
    precisions: Iterable[str] = tuple(PRECISIONS),
) -> dict[str, dict[str, float]]:
    """Return the errors of the precisions and of each baseline after ``steps`` steps of a rule."""
    truth = start(torch.float64, device)
    params = {"truth": truth}
    optimizers: dict[str, Any] = {"truth": Recursion(rule, truth)}
    for name, dtype in BASELINES.items():
        params[name] = start(dtype, device)
        optimizers[name] = torch_optimizer(rule, params[name])
    for name in _possible(rule, precisions):
        dtype, options, _ = PRECISIONS[name]
        params[name] = start(dtype, device)
        optimizers[name] = rule.fused([params[name]], backend=backend, **rule.options, **options)
    for g in gradients(steps, device):
        by_dtype = {param.dtype: g.to(param.dtype) for param in params.values()}
        for name, param in params.items():
            param.grad = by_dtype[param.dtype]
            optimizers[name].step()
    found = {}
    scale = truth.detach().abs().max()
    for name, param in params.items():
        if name != "truth":
            state = optimizers[name].state.get(param, {}) if name in PRECISIONS else {}
            error = (state.get("master", param).detach().double() - truth.detach()) / scale
            found[name] = {"rms": float(error.square().mean().sqrt()), "max": float(error.abs().max())}
    return found


def _possible(rule: Rule, precisions: Iterable[str]) -> list[str]:
    """Return the precisions that a rule has: state in 8 bits excludes amsgrad."""
    return [name for name in precisions if not (rule.options.get("amsgrad") and name.endswith("state int8"))]


def _errors_of(name: str, steps: int, device: str, precisions: Iterable[str]) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    found = errors(RULES[name], steps, device, precisions=precisions)
    line = ", ".join(f"{precision}: {entry['rms']:.2g}" for precision, entry in found.items())
    print(f"{name}: {line}", flush=True)
    return found


def _losses_of(name: str, steps: int, device: str, precisions: Iterable[str]) -> dict[str, Any]:
    """Return the losses with float32 parameters, and with float32 state beside that of the precisions."""
    torch.set_num_threads(1)
    possible = _possible(RULES[name], ("fp32", *precisions))
    options = {each: PRECISIONS[each][1] for each in possible if PRECISIONS[each][0] == FP32}
    found = losses(RULES[name], steps, device, options)
    print(f"{name}: {json.dumps(found)}", flush=True)
    return found


def measured(
    steps: int, device: str, jobs: int = 1, precisions: Iterable[str] = tuple(PRECISIONS), *, of: Any = _errors_of
) -> dict[str, Any]:
    """Return the errors (or what ``of`` measures) of all rules, each measured in one of ``jobs`` processes."""
    calls = [(name, steps, device, tuple(precisions)) for name in RULES]
    if jobs == 1:
        return dict(zip(RULES, itertools.starmap(of, calls), strict=True))
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return dict(zip(RULES, pool.starmap(of, calls, chunksize=1), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=1, help="rules that are measured at the same time")
    parser.add_argument(
        "--precisions",
        nargs="+",
        default=list(PRECISIONS),
        choices=list(PRECISIONS),
        help="those to measure",
        metavar="NAME",
    )
    parser.add_argument("--out", type=Path, help="write a JSON file")
    arguments = parser.parse_args()
    device = arguments.device
    torch.set_num_threads(1)
    record = {
        **provenance(f"python -m bench.numerics --steps {arguments.steps} --device {device}"),
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "steps": arguments.steps,
        "elements": ELEMENTS,
        "learning rates": learning_rates(device),
        "subnormals": subnormals(device),
    }
    for part in ("learning rates", "subnormals"):
        print(part, json.dumps(record[part], indent=1))
    record["errors"] = measured(arguments.steps, device, arguments.jobs, arguments.precisions)
    record["losses"] = measured(arguments.steps, device, arguments.jobs, arguments.precisions, of=_losses_of)
    if arguments.precisions != list(PRECISIONS):
        record["command"] += " --precisions " + " ".join(f'"{name}"' for name in arguments.precisions)
    if arguments.out is not None:
        record["command"] += f" --out {arguments.out.name}"
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
