"""A whole training step of a GPT-2 under bf16 autocast, forward to zero_grad: torch's fused AdamW beside ours.

    python -m pytest bench/test_training_step.py --benchmark-only -k gpu

Every optimizer has its own copy of the model. They take turns, a few steps each, so that a drift of the clocks decides
nothing; the time that pytest-benchmark shows is that of a turn of all. ``least ratio`` is what an optimizer at the copy
bandwidth would come to: the training step of torch's, less what its optimizer takes alone, and more what moving the
bytes takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
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

    @property
    def shapes(self) -> models.Shapes:
        layers, width, _, hidden, vocabulary, context = self.size
        return models.transformer(layers, width, hidden, vocabulary, context)


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


class Steps:
    """Training with one optimizer: the whole step, and its parts."""

    def __init__(self, training: Training, device: str, way: str, clip: float | None) -> None:
        layers, width, heads, hidden, vocabulary, context = training.size
        torch.manual_seed(0)  # the same model and batch for every optimizer
        with torch.device(device):
            self.model = GPT2(layers, width, heads, hidden, vocabulary, context)
        self.params = list(self.model.parameters())
        if sorted(tuple(param.shape) for param in self.params) != sorted(training.shapes):
            raise ValueError("the model of bench/gpt2.py has other parameters than that of bench/models.py")
        self.device = device
        self.tokens = torch.randint(vocabulary, (training.batch, context + 1), device=device)
        ours = way.startswith("hdet-")
        self.clip = None if ours else clip  # ours clips within its step
        self.optimizer = ways.optimizer(way, "adamw", self.params, **({"max_grad_norm": clip} if ours else {}))

    def backward(self) -> None:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self.model(self.tokens)
        loss.backward()

    def update(self) -> None:
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.params, self.clip)
        self.optimizer.step()

    def whole(self) -> None:
        self.backward()
        self.update()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(("device", "model", "clipping"), list(_cases()))
def test_training_step(benchmark: Any, device: str, model: str, clipping: str) -> None:
    known = yardstick.yardstick(device)
    training, clip = TRAININGS[device][model], CLIPPING[clipping]
    steps = {way: Steps(training, device, way, clip) for way in ("torch-fused", training.ours)}
    calls = {way: each.whole for way, each in steps.items()}
    measure.take_turns(benchmark, calls, device, turns=training.turns, iterations=training.steps)
    theirs = steps["torch-fused"]
    theirs.backward()
    alone = statistics.median(measure.sample(theirs.update, device, 0.3))
    moved = (28 if clip is None else 32) * sum(map(prod, training.shapes))
    whole = benchmark.extra_info["ways"]["torch-fused"]["ms"] / 1e3
    least = (whole - alone + moved / known["copy B/s"]) / whole
    tokens = training.batch * training.size[-1]
    benchmark.extra_info |= {"tokens": tokens, "torch's update ms": alone * 1e3, "least ratio": least}
    print(f"torch's update alone takes {alone * 1e3:.3f} ms: the ratio is {least:.4f} at least")
