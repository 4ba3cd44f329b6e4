"""The average of two replicas over gloo: buckets against one AllReduce per tensor, in the same run.

Rank 0 is the process that measures; rank 1 follows its commands.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

import hdet_kernels as hk
from hdet_kernels.converge import Report

#: Number of tensors and elements of each: a small model of many tensors, and 64 MB in few.
MODELS = {"400 x 1 k": (400, 1000), "16 x 1 M": (16, 1_000_000)}
METHODS = ("one AllReduce per tensor", "loose parameters", "homed parameters", "copy of the same bytes")


def operations() -> list[Callable[[], object]]:
    """All methods on all models, in one order on both ranks."""
    found: list[Callable[[], object]] = []
    for count, size in MODELS.values():
        loose = [torch.randn(size) for _ in range(count)]
        homed = hk.Buckets([torch.randn(size) for _ in range(count)])
        flat = torch.randn(count * size)
        target = torch.empty_like(flat)
        ensemble = hk.ProcessEnsemble()
        by_pack, in_place = hk.Converger(loose, ensemble), hk.Converger(homed, ensemble)
        found += [
            lambda loose=loose: _one_by_one(loose),  # type: ignore[misc]
            lambda c=by_pack: c.converge(Report(step=0)),  # type: ignore[misc]
            lambda c=in_place: c.converge(Report(step=0)),  # type: ignore[misc]
            lambda target=target, flat=flat: target.copy_(flat),  # type: ignore[misc]
        ]
    return found


def _one_by_one(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(2)


def _start(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def _follow(store: str) -> None:
    _start(1, store)
    known = operations()
    command = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.broadcast(command, src=0)
        if command.item() < 0:
            return
        known[int(command)]()


@pytest.fixture(scope="module")
def lead() -> Iterator[Callable[[int], None]]:
    with tempfile.TemporaryDirectory() as folder:
        follower = multiprocessing.get_context("spawn").Process(target=_follow, args=(f"{folder}/store",))
        follower.start()
        _start(0, f"{folder}/store")
        known = operations()

        def call(index: int) -> None:
            dist.broadcast(torch.tensor([index]), src=0)
            if index >= 0:
                known[index]()

        yield call
        call(-1)
        follower.join()
        dist.destroy_process_group()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_average(benchmark: BenchmarkFixture, lead: Callable[[int], None], model: str, method: str) -> None:
    index = list(MODELS).index(model) * len(METHODS) + METHODS.index(method)
    benchmark.group = f"average of two replicas, {model}"
    benchmark.pedantic(lead, args=(index,), rounds=20, warmup_rounds=3)
