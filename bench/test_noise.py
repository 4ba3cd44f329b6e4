"""Time the addition of normal noise to all tensors of a model in one launch.

    python -m pytest bench/test_noise.py --benchmark-only -k gpu

Every element is read and written once. The peer is plain torch: for every tensor it writes the noise, reads it again
and adds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import copy_bandwidth, implementations, measure, models
from hdet_kernels.buckets import Slot, wide_dtype
from hdet_kernels.ops.chunks import ChunkTable
from hdet_kernels.ops.noise import add_noise_

# So small that repeated addition stays within the range of fp16.
SCALE = 1e-6
MODELS = {"cuda": ("gpt2-124M", "llama-1.2B"), "cpu": ("transformer-5M", "many-small-1k")}


def _cases() -> Iterator[Any]:
    for device, names in MODELS.items():
        for model in names:
            for dtype in models.DTYPES if not models.is_small(model) else ("fp32",):
                for way in ("torch", *(f"hdet-{backend}" for backend in implementations.BACKENDS[device])):
                    yield implementations.case(
                        device, model, dtype, way, why_not=implementations.why_not(way, device), on_device=True
                    )


def call_of(way: str, tensors: list[Tensor]) -> measure.Call:
    if way == "torch":

        def add() -> None:
            for tensor in tensors:
                tensor.add_(torch.randn_like(tensor), alpha=SCALE)

        return add
    sizes = [tensor.numel() for tensor in tensors]
    starts = accumulate(sizes, initial=0)
    slots = [Slot(0, start, size, (size,), (1,)) for start, size in zip(starts, sizes, strict=False)]
    device, backend = tensors[0].device, way.removeprefix("hdet-")
    table = ChunkTable(slots, [0] * len(slots), device, torch.float32)
    matched = table.match(tensors)
    keys = torch.arange(len(slots), device=device)
    scales = torch.full((len(slots),), SCALE, dtype=wide_dtype(device), device=device)
    return lambda: add_noise_(table, matched, keys, scales, backend=backend)


@pytest.mark.parametrize(("device", "model", "dtype", "way"), list(_cases()))
def test_noise(benchmark: Any, device: str, model: str, dtype: str, way: str) -> None:
    copy_bandwidth.measure_once(device)
    params = models.parameters(models.MODELS[device][model].shapes, device, models.DTYPES[dtype])
    tensors = [param.detach().view(-1) for param in params]
    call = call_of(way, tensors)
    benchmark.pedantic(call, warmup_rounds=1, **measure.plan(call, device, seconds=0.25))
    moved = 2 * sum(tensor.nbytes for tensor in tensors)
    copy_bandwidth.report(benchmark, device, moved=moved, held=moved // 2)
