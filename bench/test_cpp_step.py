"""The ``cpp`` backend beside torch's own steps on the CPU, with two threads, in turns.

    python -m pytest bench/test_cpp_step.py --benchmark-only

The time that pytest-benchmark shows is that of a turn of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import measure
import models
import pytest
import torch
import ways
import yardstick

MODELS: dict[str, models.Shapes] = {
    "10M-in-10": [(1000, 1000)] * 10,
    "2000-small": models.many_small(2000),
}
WAYS = ("torch-foreach", "torch-fused", "hdet-cpp")
BYTES = 28
REASON = ways.why_not("hdet-cpp", "cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(REASON is not None, reason=f"hdet-cpp: {REASON}")
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("model", MODELS)
def test_cpp_step(benchmark: Any, model: str) -> None:
    yardstick.yardstick("cpu")
    calls = {}
    for way in WAYS:
        params = models.parameters(MODELS[model], "cpu")
        models.set_gradients(params)
        calls[way] = ways.optimizer(way, "adamw", params).step
    measure.take_turns(benchmark, calls, "cpu", turns=30, iterations=3)
    moved = BYTES * sum(map(prod, MODELS[model]))
    for found in benchmark.extra_info["ways"].values():
        found |= yardstick.share(moved, found["ms"] / 1e3, "cpu", held=0)
