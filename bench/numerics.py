"""Measure the error of every update rule and precision against float64 over many steps, and at extreme numbers.

    python -m bench.numerics [--steps 100000] [--device cuda] [--jobs 6] [--precisions NAME …] [--out FILE]

One parameter of 64 elements. Its gradients are scripted, exact in every precision, and of sizes from 1e-4 to 1. The
truth is the recursion of ``numerics_rules.py`` in float64. Errors are relative to the largest parameter: the root mean
square and the maximum over the elements, ours beside torch.optim's in float32 (the same work in the same precision) and
in bf16. ``numerics_extremes.py`` adds learning rates from 1e-12 to 1e3 and subnormal numbers, for every backend, and
``numerics_losses.py`` the loss that training with noisy gradients reaches in as many steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.numerics_extremes import learning_rates, subnormals
from bench.numerics_losses import losses
from bench.numerics_rules import RULES, Recursion, Rule, torch_optimizer
from bench.provenance import provenance

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
