"""Time the average of two replicas over gloo, beside one all-reduce per tensor and a copy of the same bytes.

Measured are buckets of several sizes, parameters in place and packed, compressed, and without a backup.

    python -m pytest bench/test_converge.py --benchmark-only
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

import hdet_kernels as hk
from bench import measure, two_ranks
from hdet_kernels.converge import Report

# Number of tensors and elements of each: many small tensors, and 64 MB in few.
MODELS = {"400 x 1 k": (400, 1000), "16 x 1 M": (16, 1_000_000)}
# Whether the parameters are in buckets, and arguments of the converger. The names are keys in the records.
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "loose": (False, {}),
    "in place": (True, {}),
    "in place, no backup": (True, {"backup": False}),
    **{f"in place, buckets of {mib} MiB": (True, {"bucket_bytes": mib * 2**20}) for mib in (1, 4, 16, 32)},
    **{f"loose, buckets of {mib} MiB": (False, {"bucket_bytes": mib * 2**20}) for mib in (4, 16, 32)},
    "in place, bf16": (True, {"compress": "bf16"}),
    "in place, int8": (True, {"compress": "int8"}),
}
METHODS = ("one AllReduce per tensor", "copy of the same bytes", *WAYS)


def operations() -> list[Callable[[], object]]:
    """Return all methods on all models, in the same order on both ranks."""
    found: list[Callable[[], object]] = []
    for count, size in MODELS.values():
        tensors = [torch.randn(size) for _ in range(count)]
        flat = torch.randn(count * size)
        target = torch.empty_like(flat)
        found.append(lambda tensors=tensors: _one_by_one(tensors))  # type: ignore[misc]
        found.append(lambda target=target, flat=flat: target.copy_(flat))  # type: ignore[misc]
        for homed, options in WAYS.values():
            own = [torch.randn(size) for _ in range(count)]
            converger = hk.Converger(hk.Buckets(own) if homed else own, hk.ProcessEnsemble(), **options)
            found.append(lambda c=converger: c.converge(Report(step=0)))  # type: ignore[misc]
    return found


def _one_by_one(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(2)


@pytest.fixture(scope="module")
def lead() -> Iterator[Callable[[int], None]]:
    with two_ranks.lead(operations) as call:
        yield call


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_average(benchmark: BenchmarkFixture, lead: Callable[[int], None], model: str, method: str) -> None:
    index = list(MODELS).index(model) * len(METHODS) + METHODS.index(method)
    benchmark.group = f"average of two replicas, {model}"
    benchmark.pedantic(lead, args=(index,), rounds=measure.rounds(20), warmup_rounds=3)
