"""Sweep learning rates at the cost of one run: short runs at eight of them, then a run with the best."""

from __future__ import annotations

from dataclasses import replace

import torch

from .spec import Record, Spec
from .tasks import Task
from .train import train

# Factors of the start: eight learning rates, a factor of 4 apart, from 1/256 to 64.
FACTORS = tuple(4.0**k for k in range(-4, 4))


def train_sweep(task: Task, spec: Spec, device: torch.device) -> Record:
    """Spend half of the steps on eight plain runs of a sixteenth each, and half on one run with the best of them."""
    steps = spec.steps or task.steps
    plain = replace(spec, method="plain")
    short = [
        train(task, replace(plain, lr=spec.lr * factor, steps=steps // (2 * len(FACTORS))), device)
        for factor in FACTORS
    ]
    best = min(short, key=lambda record: record["val"])
    final = train(task, replace(plain, lr=best["lr"], steps=steps // 2), device)
    seconds = sum(record["seconds"] for record in (*short, final))
    return {**final, **spec.record(), "chosen": best["lr"], "seconds": seconds}
