"""A whole training step of a GPT-2 under bf16 autocast, forward to zero_grad: torch's fused AdamW beside ours.

    python -m pytest bench/test_training_step.py --benchmark-only -k gpu

Every optimizer has its own copy of the model. They take turns, a few steps each, so that a drift of the clocks decides
nothing; the time that pytest-benchmark shows is that of a turn of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import measure
import models
import pytest
import torch
import ways
import yardstick
from gpt2 import GPT2


@dataclass(frozen=True)
class Training:
    """``size`` is layers, width, heads, hidden width, vocabulary and context."""

    size: tuple[int, int, int, int, int, int]
    batch: int
    ours: str
    turns: int
    steps: int


TRAININGS = {
    "cuda": {"gpt2-124M": Training((12, 768, 12, 3072, 50304, 1024), batch=8, ours="hdet-cuda", turns=24, steps=5)},
    "cpu": {"gpt2-tiny": Training((1, 32, 2, 64, 128, 16), batch=2, ours="hdet-cpp", turns=4, steps=1)},
}


CLIPPING = {"no-clipping": None, "clip-1.0": 1.0}


def _cases() -> Iterator[Any]:
    for device, known in TRAININGS.items():
        for model, training in known.items():
            for clipping in CLIPPING:
                yield ways.case(device, model, clipping, why_not=ways.why_not(training.ours, device))


def stepper(training: Training, device: str, way: str, clip: float | None) -> measure.Call:
    layers, width, heads, hidden, vocabulary, context = training.size
    torch.manual_seed(0)  # the same model and batch for every optimizer
    with torch.device(device):
        model = GPT2(layers, width, heads, hidden, vocabulary, context)
    shapes = sorted(tuple(param.shape) for param in model.parameters())
    if shapes != sorted(models.transformer(layers, width, hidden, vocabulary, context)):
        raise ValueError("the model of bench/gpt2.py has other parameters than that of bench/models.py")
    tokens = torch.randint(vocabulary, (training.batch, context + 1), device=device)
    params = list(model.parameters())
    options = {"max_grad_norm": clip} if way.startswith("hdet-") else {}
    optimizer = ways.optimizer(way, "adamw", params, **options)

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        if clip is not None and not options:  # ours clips within its step
            torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(("device", "model", "clipping"), list(_cases()))
def test_training_step(benchmark: Any, device: str, model: str, clipping: str) -> None:
    yardstick.yardstick(device)
    training = TRAININGS[device][model]
    calls = {way: stepper(training, device, way, CLIPPING[clipping]) for way in ("torch-fused", training.ours)}
    measure.take_turns(benchmark, calls, device, turns=training.turns, iterations=training.steps)
    benchmark.extra_info["tokens"] = training.batch * training.size[-1]
