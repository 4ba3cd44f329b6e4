"""The sweep that costs as much as one run: short runs at eight learning rates, then the rest with the best."""

from __future__ import annotations

from dataclasses import replace

import torch

from .spec import Record, Spec
from .tasks import Task
from .train import train

#: Eight learning rates, a factor of 4 apart, around the start: from 1/256 to 64 of it.
FACTORS = tuple(4.0**k for k in range(-4, 4))


def train_sweep(task: Task, spec: Spec, device: torch.device) -> Record:
    """Half of the steps go to eight plain runs of a sixteenth each, half to a run with what came out best of them."""
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
