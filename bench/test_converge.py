"""Time the average of two replicas over gloo, in turns with what a loop of one's own would do.

The peers are one all-reduce per tensor, and one all-reduce of all of them, each with the division that makes it a mean.
Tensors that do not lie in one buffer are first copied there and then back. The yardsticks are one all-reduce of as many
bytes in one flat buffer, with nothing around it, and a copy of them. ``over flat`` in the record is the time of every
method over that all-reduce.

    python -m pytest bench/test_converge.py --benchmark-only
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

import hdet_kernels as hk
from bench import measure, models, two_ranks
from hdet_kernels.converge import Report

# Elements of every tensor: 64 MB in few, a GPT-2 of an eighth of its width, many small ones.
MODELS: dict[str, list[int]] = {
    "16 x 1 M": [1_000_000] * 16,
    "148 of GPT-2": [math.prod(shape) for shape in models.transformer(12, 96, 384, 50257, 1024)],
    "10 000 x 100": [100] * 10_000,
}
if measure.QUICK:
    MODELS = {name: sizes[:500] if len(sizes) > 500 else [100] * len(sizes) for name, sizes in MODELS.items()}
# Whether the parameters are in buckets, and arguments of the converger. The names are keys in the records.
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "hdet, in place": (True, {}),
    "hdet, loose": (False, {}),
    "hdet, in place, no backup": (True, {"backup": False}),
    "hdet, in place, bf16": (True, {"compress": "bf16"}),
    "hdet, in place, int8": (True, {"compress": "int8"}),
}
PEERS = ("one AllReduce per tensor", "one flat AllReduce")
COPY, FLAT = "copy of the same bytes", "AllReduce of the same bytes"
METHODS = (*PEERS, COPY, FLAT, *WAYS)


def operations() -> list[Callable[[], object]]:
    """Return all methods on all models, in the same order on both ranks."""
    found: list[Callable[[], object]] = []
    for sizes in MODELS.values():
        tensors = [torch.randn(size) for size in sizes]
        flat = torch.randn(sum(sizes))
        target, zeros = torch.empty_like(flat), torch.zeros_like(flat)
        found.append(lambda tensors=tensors: _one_by_one(tensors))  # type: ignore[misc]
        # Few large tensors are taken to lie in one buffer already, which is the best that a loop can have.
        packed = len(tensors) > 16
        found.append(lambda t=tensors, f=flat, packed=packed: _flat(t if packed else [], f))  # type: ignore[misc]
        found.append(lambda target=target, flat=flat: target.copy_(flat))  # type: ignore[misc]
        found.append(lambda zeros=zeros: dist.all_reduce(zeros))  # type: ignore[misc]
        for in_buckets, options in WAYS.values():
            own = [torch.randn(size) for size in sizes]
            converger = hk.Converger(hk.Buckets(own) if in_buckets else own, hk.ProcessEnsemble(), **options)
            found.append(lambda c=converger: c.converge(Report(step=0)))  # type: ignore[misc]
    return found


def _one_by_one(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(2)


def _flat(tensors: list[Tensor], flat: Tensor) -> None:
    """Average ``flat``; before it is filled from ``tensors``, and after it is copied back to them."""
    if tensors:
        torch.cat(tensors, out=flat)
    dist.all_reduce(flat)
    flat.div_(2)
    if tensors:
        torch._foreach_copy_(tensors, list(flat.split([tensor.numel() for tensor in tensors])))


@pytest.fixture(scope="module")
def lead() -> Iterator[Callable[[int], None]]:
    with two_ranks.lead(operations) as call:
        yield call


@pytest.mark.parametrize("model", MODELS)
def test_average(benchmark: BenchmarkFixture, lead: Callable[[int], None], model: str) -> None:
    benchmark.group = f"average of two replicas, {model}"
    first = list(MODELS).index(model) * len(METHODS)
    times: dict[str, list[float]] = {method: [] for method in METHODS}

    def turn() -> None:
        order = list(METHODS) if len(times[COPY]) % 2 == 0 else list(reversed(METHODS))
        for method in order:
            times[method].append(measure.seconds_each(lambda m=method: lead(first + METHODS.index(m)), "cpu", 1))  # type: ignore[misc]

    turn()  # to warm up
    for found in times.values():
        found.clear()
    benchmark.pedantic(turn, rounds=measure.rounds(20 if len(MODELS[model]) < 1000 else 6))
    best = min(PEERS, key=lambda peer: statistics.median(times[peer]))
    benchmark.extra_info["ways"] = {method: measure.summary(found) for method, found in times.items()}
    benchmark.extra_info["ratios"] = {way: measure.ratio(times[way], times[best]) for way in WAYS}
    over_flat = {method: measure.ratio(times[method], times[FLAT]) for method in METHODS if method != FLAT}
    benchmark.extra_info["over flat"] = over_flat
    for method, found in over_flat.items():
        print(f"\n{model}: {method} / {FLAT} {found['ratio']:.2f} ({found['low']:.2f} to {found['high']:.2f})")
