"""Time ``scheduler.step()`` on the host between two syncs, beside torch's OneCycleLR."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import hdet_kernels as hk

STEPS = 10**9  # so long that neither its end nor a sync is reached


def make(kind: str, groups: int) -> Any:
    optimizer = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.ones(4))]} for _ in range(groups)], lr=1e-3)
    scheduler: Any
    if kind == "torch":
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=STEPS)
    else:
        scheduler = hk.HDETOneCycleLR(optimizer, 1e-3, total_steps=STEPS, sync_every=STEPS // 100)
    optimizer.step()
    return scheduler


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("kind", ["torch", "hdet"])
def test_step(benchmark: BenchmarkFixture, kind: str, groups: int) -> None:
    scheduler = make(kind, groups)
    loss = torch.tensor(1.0)
    benchmark.group = f"scheduler.step(), {groups} groups"
    benchmark(scheduler.step if kind == "torch" else lambda: scheduler.step(loss))
