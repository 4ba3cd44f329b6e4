"""Time an AdamW step in fp32 against the number of parameters, and against the number of tensors.

    python -m pytest bench/test_scaling.py --benchmark-only -k gpu
    python -m pytest bench/test_scaling.py --benchmark-only -k 'gpu and tensors'

Parameters grow in a fixed number of tensors, and tensors at a fixed number of parameters. ``ms`` is the time of a step
in a series of steps, the longer of device and host time. ``device ms`` is the time that a GPU is busy (by torch's
profiler), ``host us`` the time until the call returns on an idle device. ``fixed`` is ``gradients="fixed"``, which
reads no gradient's address; with ``same`` gradients keep their addresses, and ours reads each of them, as torch does.
``scaling_section.py`` fits the slopes.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bench import copy_bandwidth, implementations, measure, models

# Tensors of the cases with growing parameters, and parameters of the cases with growing tensors.
TENSORS = 16
PARAMETERS = {"cuda": 10**8, "cpu": 10**6}
SIZES: dict[str, dict[str, list[int]]] = {
    "parameters": {
        # Two sizes between the decades, where the slope is fitted.
        "cuda": [10**4, 10**5, 10**6, 10**7, 3 * 10**7, 10**8, 3 * 10**8, 10**9, 4 * 10**9],
        "cpu": [10**4, 10**5, 10**6, 10**7],
    },
    "tensors": {"cuda": [10**n for n in range(6)], "cpu": [10**n for n in range(5)]},
}
# Bytes a parameter that a step must move, and that it works on.
MOVED, HELD = 28, 16
# Implementations, and the addresses of their gradients.
WAYS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "parameters": {
        "cuda": [("torch-fused", "same"), ("hdet-cuda", "same"), ("hdet-triton", "same")],
        "cpu": [("torch-fused", "same"), ("hdet-cpp", "same")],
    },
    "tensors": {
        "cuda": [("torch-fused", "same"), ("hdet-cuda", "fixed"), ("hdet-triton", "fixed"), ("hdet-cuda", "same")],
        "cpu": [("torch-fused", "same"), ("hdet-cpp", "fixed"), ("hdet-cpp", "same")],
    },
}


def split(parameters: int, tensors: int) -> models.Shapes:
    """Return shapes of vectors of almost equal length."""
    least, more = divmod(parameters, tensors)
    return [(least + 1,)] * more + [(least,)] * (tensors - more)


def too_large(parameters: int, device: str) -> str | None:
    """Return why so many parameters do not fit into memory, or None if they do."""
    needed = int(1.1 * HELD * parameters)  # a tenth more for tables and temporaries
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= free:
        return None
    return f"{parameters:.0e} parameters need {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"


def _cases() -> Iterator[Any]:
    for axis, sizes in SIZES.items():
        for device, counts in sizes.items():
            for count in counts[:3] if measure.QUICK else counts:
                for way, addresses in WAYS[axis][device]:
                    reason = implementations.why_not(way, device)
                    if reason is None and axis == "parameters":
                        reason = too_large(count, device)
                    yield implementations.case(device, axis, count, way, addresses, why_not=reason, on_device=True)


def step_of(way: str, addresses: str, params: list[nn.Parameter]) -> measure.Call:
    """Return the step of an optimizer whose gradients exist."""
    if addresses == "same":
        models.set_gradients(params)
        return implementations.optimizer(way, "adamw", params).step
    optimizer = implementations.optimizer(way, "adamw", params, gradients="fixed")
    for param in params:
        assert param.grad is not None
        param.grad.fill_(models.GRADIENT)
    return optimizer.step


@pytest.mark.parametrize(("device", "axis", "count", "way", "addresses"), list(_cases()))
def test_scaling(benchmark: Any, device: str, axis: str, count: int, way: str, addresses: str) -> None:
    copy_bandwidth.measure_once(device)
    parameters, tensors = (count, TENSORS) if axis == "parameters" else (PARAMETERS[device], count)
    params = models.parameters(split(parameters, tensors), device)
    step = step_of(way, addresses, params)
    benchmark.pedantic(step, warmup_rounds=1, **measure.plan(step, device, 0.25))
    benchmark.extra_info |= {
        "parameters": parameters,
        "tensors": tensors,
        "bytes a parameter": MOVED,
        "host us": statistics.median(measure.host_times(step, device, 5)) * 1e6,
    }
    if device == "cuda":
        benchmark.extra_info["device ms"] = measure.device_seconds(step, device) * 1e3
    copy_bandwidth.report(benchmark, device, moved=MOVED * parameters, held=HELD * parameters)
