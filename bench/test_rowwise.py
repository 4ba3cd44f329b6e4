"""Time a training step of embedding tables with row-wise Adagrad, beside torch's Adagrad and FBGEMM, in turns.

    python -m pytest bench/test_rowwise.py --benchmark-only -k cpu

A step is the lookup of a batch, its backward pass and the update of the rows in it: FBGEMM updates within its backward
pass, so that the update alone cannot be timed. torch's sparse Adagrad keeps a sum for each element. The time that
pytest-benchmark shows is that of a turn of all implementations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import hdet_kernels as hk
from bench import copy_bandwidth, implementations, measure


@dataclass(frozen=True)
class Tables:
    """``count`` tables of ``rows`` × ``width``, of each of which a batch names ``looked_up`` rows, in bags of 4."""

    count: int
    rows: int
    width: int
    looked_up: int


BAG = 4
TABLES = {
    "cuda": {"26-of-1M": Tables(26, 1_000_000, 64, 32_768), "4-of-10M": Tables(4, 10_000_000, 64, 131_072)},
    "cpu": {"4-of-100k": Tables(4, 100_000, 32, 8_192)},
}


def _rows(tables: Tables, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(tables.rows, (tables.count, tables.looked_up), generator=generator).to(device)


def modules_step(way: str, tables: Tables, device: str) -> measure.Call:
    """Return a step of ``nn.EmbeddingBag`` with sparse gradients."""
    with torch.device(device):
        bags = [nn.EmbeddingBag(tables.rows, tables.width, mode="sum", sparse=True) for _ in range(tables.count)]
    params = [bag.weight for bag in bags]
    if way == "torch":
        optimizer: torch.optim.Optimizer = torch.optim.Adagrad(params, lr=0.01)
    else:
        optimizer = hk.FusedRowWiseAdagrad(params, lr=0.01, backend=way.removeprefix("hdet-"))
    batches = [rows.view(-1, BAG) for rows in _rows(tables, device)]

    def step() -> None:
        optimizer.zero_grad()
        torch.stack([bag(rows) for bag, rows in zip(bags, batches, strict=True)]).sum().backward()
        optimizer.step()

    return step


def fbgemm_step(tables: Tables, device: str) -> measure.Call:
    """Return a step of FBGEMM's batched tables."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm

    on_gpu = device == "cuda"
    place = fbgemm.EmbeddingLocation.DEVICE if on_gpu else fbgemm.EmbeddingLocation.HOST
    compute = fbgemm.ComputeDevice.CUDA if on_gpu else fbgemm.ComputeDevice.CPU
    bags = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(tables.rows, tables.width, place, compute)] * tables.count,
        optimizer=fbgemm.OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
    )
    rows = _rows(tables, device).view(-1)
    ends = torch.arange(0, rows.numel() + 1, BAG, device=device)
    return lambda: bags(rows, ends).sum().backward()


def _cases() -> Iterator[Any]:
    for device, known in TABLES.items():
        main = f"hdet-{implementations.BACKENDS[device][0]}"
        for name in known:
            yield implementations.case(device, name, why_not=implementations.why_not(main, device))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of FBGEMM, about parts of it that need a GPU
@pytest.mark.parametrize(("device", "tables"), list(_cases()))
def test_rowwise(benchmark: Any, device: str, tables: str) -> None:
    copy_bandwidth.measure_once(device)
    known = TABLES[device][tables]
    calls, absent = {"torch": modules_step("torch", known, device)}, {}
    try:
        calls["fbgemm"] = fbgemm_step(known, device)
        calls["fbgemm"]()
    except (ImportError, OSError, RuntimeError) as error:
        calls.pop("fbgemm", None)
        absent["FBGEMM"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    for backend in reversed(implementations.BACKENDS[device]):  # the fastest comes last: its ratio is recorded
        if hk.backends()[backend] == "ok":
            calls[f"hdet-{backend}"] = modules_step(f"hdet-{backend}", known, device)
    many = device == "cuda"
    measure.take_turns(benchmark, calls, device, turns=15 if many else 9, iterations=5 if many else 2, against="torch")
    benchmark.extra_info |= {"rows": known.count * known.rows, "absent": absent}
