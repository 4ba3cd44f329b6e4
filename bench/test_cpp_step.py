"""Time steps on the CPU with two threads: the ``cpp`` backend beside torch and its peers, in turns.

    python -m pytest bench/test_cpp_step.py --benchmark-only

The time that pytest-benchmark shows is that of a turn of all implementations.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch

from bench import copy_bandwidth, implementations, measure, models, peers

MODELS: dict[str, models.Shapes] = {
    "10M-in-10": [(1000, 1000)] * 10,
    "2000-small": models.many_small(2000),
}
WAYS = ("torch-foreach", "torch-fused", *peers.PEERS, "hdet-cpp")
BYTES = 28
PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp64": (torch.float64, {}),
    "bf16": (torch.bfloat16, {"state_dtype": torch.bfloat16, "master_weights": False}),
    "fp16": (torch.float16, {"master_weights": False}),
}
STEPS = [f"{rule}-{name}" for name in PRECISIONS for rule, (theirs, _, _) in implementations.RULES.items() if theirs]
REASON = implementations.why_not("hdet-cpp", "cpu")


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
    copy_bandwidth.measure_once("cpu")
    calls, moved, count = {}, {}, sum(map(prod, MODELS[model]))
    for way in WAYS:
        if implementations.why_not(way, "cpu", tensors=len(MODELS[model])) is not None:
            continue
        params = models.parameters(MODELS[model], "cpu")
        models.set_gradients(params)
        optimizer = implementations.optimizer(way, "adamw", params)
        try:
            optimizer.step()
        except Exception as error:
            if way not in peers.PEERS:
                raise
            peers.fail(way, error)
            continue
        calls[way] = optimizer.step
        moved[way] = peers.bytes_moved(params, optimizer, False) if way in peers.PEERS else BYTES * count
    measure.take_turns(benchmark, calls, "cpu", turns=30, iterations=3)
    for way, found in benchmark.extra_info["ways"].items():
        found |= copy_bandwidth.share(moved[way], found["ms"] / 1e3, "cpu", held=0)
        if abs(moved[way] / count / BYTES - 1) > 0.01:
            found |= {"bytes a parameter": moved[way] / count, "work's bytes a parameter": BYTES}


@pytest.mark.skipif(REASON is not None, reason=f"hdet-cpp: {REASON}")
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("model", STEPS)
def test_cpp_precision(benchmark: Any, model: str) -> None:
    """Time a rule in a precision. torch's fused SGD in 16 bits leaves the parameters unchanged and is left out."""
    rule, precision = model.rsplit("-", 1)
    dtype, options = PRECISIONS[precision]
    calls = {}
    for way in ("torch-foreach", "torch-fused", "hdet-cpp"):
        params = models.parameters([(1000, 1000)] * 4, "cpu", dtype)
        models.set_gradients(params)
        before = params[0].detach().clone()
        optimizer = implementations.optimizer(way, rule, params, **(options if way == "hdet-cpp" else {}))
        optimizer.step()
        if not torch.equal(params[0], before):
            calls[way] = optimizer.step
    measure.take_turns(benchmark, calls, "cpu", turns=15, iterations=2)
