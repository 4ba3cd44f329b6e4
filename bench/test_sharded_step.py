"""Time AdamW on parameters of ``fully_shard`` on the CPU, beside torch's, with and without clipping, in turns.

    python -m pytest bench/test_sharded_step.py --benchmark-only

One process holds all shards, so that no time is that of a network: what is compared is the step itself, and what it
takes to call it for DTensors. Clipping is ``torch.nn.utils.clip_grad_norm_`` before torch's step, and ``max_grad_norm``
in ours. The time that pytest-benchmark shows is that of a turn of all implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet_kernels as hk
from bench import copy_bandwidth, implementations, measure

#: Width and number of the layers, each a matrix and a bias: as many tensors as gpt2 has, and few large ones.
MODELS = {"148-small": (16, 74), "10M-in-20": (1000, 10)}
WAYS = ("torch-foreach", "torch-fused", "hdet-cpp")
BYTES = 28
NORM = 1.0
REASON = implementations.why_not("hdet-cpp", "cpu")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def step_of(way: str, mesh: DeviceMesh, width: int, layers: int, clip: bool) -> Callable[[], Any]:
    """Return a step of one implementation, on a model of its own with the gradients of one backward pass."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    if way == "hdet-cpp":
        return hk.FusedAdamW(params, lr=1e-6, max_grad_norm=NORM if clip else None, backend="cpp").step
    option = way.removeprefix("torch-")
    optimizer = torch.optim.AdamW(params, lr=1e-6, **{option: True})
    if not clip:
        return optimizer.step

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(params, NORM)
        optimizer.step()

    return clip_and_step


@pytest.mark.skipif(REASON is not None, reason=f"hdet-cpp: {REASON}")
@pytest.mark.parametrize("clip", [False, True], ids=["step", "clip-and-step"])
@pytest.mark.parametrize("model", MODELS)
def test_sharded_step(benchmark: Any, mesh: DeviceMesh, model: str, clip: bool) -> None:
    copy_bandwidth.measure_once("cpu")
    width, layers = MODELS[model]
    calls = {way: step_of(way, mesh, width, layers, clip) for way in WAYS}
    measure.take_turns(benchmark, calls, "cpu", turns=20, iterations=1)
    moved = BYTES * (width + 1) * width * layers
    for found in benchmark.extra_info["ways"].values():
        found |= copy_bandwidth.share(moved, found["ms"] / 1e3, "cpu", held=0)
