"""The norm of all gradients, one read of them, as a share of the copy bandwidth.

    python -m pytest bench/test_reduce.py --benchmark-only -k gpu

A read alone can be faster than a copy, so a share may exceed 100 %. torch's ``get_total_norm`` is measured beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench import copy_bandwidth, implementations, measure, models
from hdet_kernels import Buckets, ops
from hdet_kernels.ops.chunks import ChunkTable

OPERATIONS = ("grad_norm",)


def _cases() -> Iterator[Any]:
    for device, known in models.MODELS.items():
        for model in known:
            for dtype in models.DTYPES if not models.is_small(model) else ("fp32",):
                for way in ("torch", *(f"hdet-{backend}" for backend in implementations.BACKENDS[device])):
                    yield implementations.case(
                        device, model, dtype, way, why_not=implementations.why_not(way, device), on_device=True
                    )


def call_of(operation: str, way: str, params: list[torch.nn.Parameter]) -> measure.Call:
    grads = models.gradients(params)
    if way == "torch":
        return lambda: torch.nn.utils.get_total_norm(grads)
    buckets = Buckets(params)
    chunks = ChunkTable(buckets.slots, [0] * len(params), buckets.flats[0].device, params[0].dtype)
    matched = chunks.match(grads)
    run, backend = getattr(ops, operation), way.removeprefix("hdet-")
    return lambda: run(chunks, matched, backend=backend)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("device", "model", "dtype", "way"), list(_cases()))
def test_reduce(benchmark: Any, device: str, model: str, dtype: str, way: str, operation: str) -> None:
    copy_bandwidth.measure_once(device)
    params = models.parameters(models.MODELS[device][model].shapes, device, models.DTYPES[dtype])
    call = call_of(operation, way, params)
    benchmark.pedantic(call, warmup_rounds=1, **measure.plan(call, device, seconds=0.25))
    moved = sum(param.nbytes for param in params)
    copy_bandwidth.report(benchmark, device, moved=moved, held=moved)
