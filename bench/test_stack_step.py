"""Time one optimizer step of R stacked replicas.

    python -m pytest bench/test_stack_step.py --benchmark-only -k gpu

With a shared gradient AdamW must read g, the moments and R rows of parameters, and write the moments and the rows:
20 + 8R bytes a parameter. With local gradients every replica has its own moments: 28R. The peer is torch's fused AdamW
on R separate parameters, which moves 28R too. With everything in bf16 it is half of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import hdet_kernels as hk
from bench import copy_bandwidth, implementations, measure, models
from hdet_kernels.stack import StackedParameter

# Parameters of each replica.
ELEMENTS = {"cuda": {"large": 2**28, "small": 2**24}, "cpu": {"large": 2**18, "small": 2**16}}
ROWS = {"shared": (2, 4, 8, 16), "local": (2, 8)}
# Size and dtype: the first with all numbers of replicas, the others with 8.
KINDS = (("large", "fp32"), ("small", "fp32"), ("large", "bf16"))


def _cases() -> Iterator[Any]:
    for device in ELEMENTS:
        for (size, dtype), (gradients, counts) in product(KINDS, ROWS.items()):
            for replicas in counts if (size, dtype) == KINDS[0] else (8,):
                beside = ("torch-fused",) if gradients == "shared" and replicas <= 8 else ()
                for way in (*beside, *(f"hdet-{backend}" for backend in implementations.BACKENDS[device])):
                    values = (size, dtype, gradients, replicas, way)
                    yield implementations.case(
                        device, *values, why_not=implementations.why_not(way, device), on_device=True
                    )


@pytest.mark.parametrize(("device", "size", "dtype", "gradients", "replicas", "way"), list(_cases()))
def test_stack_step(
    benchmark: Any, device: str, size: str, dtype: str, gradients: str, replicas: int, way: str
) -> None:
    copy_bandwidth.measure_once(device)
    count = ELEMENTS[device][size]
    shared = gradients == "shared"
    kind: dict[str, Any] = {"device": device, "dtype": models.DTYPES[dtype]}
    if way == "torch-fused":
        separate = [nn.Parameter(torch.ones(count, **kind)) for _ in range(replicas)]
        optimizer: Any = torch.optim.AdamW(separate, fused=True)
        gradient = torch.ones(count, **kind)
        for param in separate:
            param.grad = gradient
    else:
        stacked = StackedParameter(torch.ones(replicas, count, **kind), shares_gradient=shared)
        options = {} if dtype == "fp32" else {"state_dtype": kind["dtype"], "master_weights": False}
        optimizer = hk.FusedAdamW([stacked], **options, backend=way.removeprefix("hdet-"))
        rates = tuple(1e-3 * (1 + row / replicas) for row in range(replicas))
        optimizer.param_groups[0]["per_replica"] = {"lr": rates}
        stacked.grad = torch.ones(count if shared else (replicas, count), **kind).expand_as(stacked)
    benchmark.pedantic(optimizer.step, warmup_rounds=1, **measure.plan(optimizer.step, device, seconds=0.25))
    bytes_each = 20 + 8 * replicas if shared and way != "torch-fused" else 28 * replicas
    bytes_each = bytes_each * kind["dtype"].itemsize // 4
    benchmark.extra_info |= {"parameters": count, "bytes a parameter": bytes_each}
    copy_bandwidth.report(benchmark, device, moved=count * bytes_each, held=count * bytes_each)
