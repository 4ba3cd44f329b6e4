"""Time packing tensors into one staging buffer and back, and the mean of stacked replicas.

    python -m pytest bench/test_pack.py --benchmark-only -k gpu

Bytes read and written are counted. ``odd`` is the same model with one more element before all others, so that no tensor
lies at a multiple of 16 bytes in the staging buffer. The peers are torch's ``_flatten_dense_tensors``, which allocates
its result, ``_foreach_copy_`` between the tensors and views of the buffer, and ``torch.mean``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from bench import copy_bandwidth, implementations, measure, models
from hdet_kernels.ops.pack import Pack
from hdet_kernels.tensors import Piece, flat_view

# Number of stacked replicas, and elements of each.
ROWS = 8
ELEMENTS = {"cuda": {"17M": 2**24, "268M": 2**28}, "cpu": {"262k": 2**18, "1M": 2**20}}


def _why_not(device: str, operation: str, dtype: str, way: str) -> str | None:
    if way == "torch-flatten" and operation == "unpack":
        return "unpacking with torch is torch-foreach"
    if way == "torch-flatten" and dtype != "fp32":
        return "torch's flatten keeps the dtype and makes no float32 buffer"
    return implementations.why_not(way, device)


def _cases() -> Iterator[Any]:
    for device, known in models.MODELS.items():
        ours = [f"hdet-{backend}" for backend in implementations.BACKENDS[device]]
        for model in known:
            small = models.is_small(model)
            for dtype in ("fp32",) if small else models.DTYPES:
                for place in ("even", "odd") if dtype == "fp32" and not small else ("even",):
                    for operation in ("pack", "unpack"):
                        for way in ("torch-flatten", "torch-foreach", *ours):
                            why_not = _why_not(device, operation, dtype, way)
                            values = (model, dtype, place, operation, way)
                            yield implementations.case(device, *values, why_not=why_not, on_device=True)


def _means() -> Iterator[Any]:
    for device, sizes in ELEMENTS.items():
        for size, dtype in product(sizes, models.DTYPES):
            for way in ("torch", *(f"hdet-{backend}" for backend in implementations.BACKENDS[device])):
                yield implementations.case(
                    device, size, dtype, way, why_not=implementations.why_not(way, device), on_device=True
                )


def call_of(operation: str, way: str, tensors: list[Tensor], staging: Tensor) -> measure.Call:
    numels = [tensor.numel() for tensor in tensors]
    if way == "torch-flatten":
        return lambda: _flatten_dense_tensors(tensors)
    if way == "torch-foreach":
        views = list(staging.split(numels))
        to, what = (views, tensors) if operation == "pack" else (tensors, views)
        return lambda: torch._foreach_copy_(to, what)
    pieces = [Piece(index, 0, numel) for index, numel in enumerate(numels)]
    pack = Pack(numels, pieces, staging.device, staging.dtype, backend=way.removeprefix("hdet-"))
    run = getattr(pack, operation)
    return lambda: run(tensors, staging)


@pytest.mark.parametrize(("device", "model", "dtype", "place", "operation", "way"), list(_cases()))
def test_pack(benchmark: Any, device: str, model: str, dtype: str, place: str, operation: str, way: str) -> None:
    copy_bandwidth.measure_once(device)
    shapes = [(1,)] * (place == "odd") + models.MODELS[device][model].shapes
    tensors = [flat_view(param) for param in models.parameters(shapes, device, models.DTYPES[dtype])]
    staging = torch.zeros(sum(tensor.numel() for tensor in tensors), device=device)
    call = call_of(operation, way, tensors, staging)
    benchmark.pedantic(call, warmup_rounds=1, **measure.plan(call, device, seconds=0.25))
    moved = staging.nbytes + sum(tensor.nbytes for tensor in tensors)
    copy_bandwidth.report(benchmark, device, moved=moved, held=moved)


@pytest.mark.parametrize(("device", "size", "dtype", "way"), list(_means()))
def test_mean_of_rows(benchmark: Any, device: str, size: str, dtype: str, way: str) -> None:
    copy_bandwidth.measure_once(device)
    count = ELEMENTS[device][size]
    rows = torch.ones((ROWS, count), dtype=models.DTYPES[dtype], device=device)
    staging = torch.zeros(count, device=device)
    if way == "torch":

        def call() -> object:
            return torch.mean(rows, dim=0, dtype=torch.float32, out=staging)
    else:
        backend = way.removeprefix("hdet-")
        pack = Pack([count], [Piece(0, 0, count)], staging.device, staging.dtype, rows=ROWS, backend=backend)

        def call() -> object:
            return pack.pack([rows], staging, divisor=ROWS)

    benchmark.pedantic(call, warmup_rounds=1, **measure.plan(call, device, seconds=0.25))
    assert (staging == 1).all()
    moved = rows.nbytes + staging.nbytes
    copy_bandwidth.report(benchmark, device, moved=moved, held=moved)
