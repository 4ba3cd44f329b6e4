"""The outcome of an average: what was agreed on, planned and paid, and how far apart the replicas were."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hdet_kernels as hk
from hdet_kernels.converge import Converger, Report
from hdet_kernels.converge.outcome import Outcome, relative_distance
from hdet_kernels.converge.transport import Cost
from hdet_kernels.ensemble import ProcessEnsemble
from tests.converge.agreements import agreement
from tests.ranks import run_ranks
from tests.schedule.scout_runs import StackRun
from tests.training import Trainer


def test_probes_are_compared_where_there_are_any_and_bad_replicas_have_no_loss() -> None:
    for probes, expected in (([3.0, 4.0], [3.0, math.nan]), ([math.nan, math.nan], [1.0, math.nan])):
        seen = agreement(healthy=[True, False], losses=[1.0, 2.0], probes=probes, shared=None)
        np.testing.assert_array_equal(Outcome.of(seen, None, Cost(), 0.0).compared, expected)


def by_hand(replicas: list[Tensor]) -> float:
    """Return the root mean square of the distances from the mean, over its norm."""
    rows = torch.stack(replicas).double()
    mean = rows.mean(dim=0)
    return float((rows - mean).norm(dim=1).square().mean().sqrt() / mean.norm())


@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e150])
def test_norms_are_enough(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = scale * (1 + 0.01 * torch.randn(5, 1000, generator=generator, dtype=torch.float64))
    norms = torch.linalg.vector_norm(rows / scale, dim=1).numpy() * scale
    mean = float((rows.mean(dim=0) / scale).norm()) * scale
    assert relative_distance(norms, mean) == pytest.approx(by_hand(list(rows / scale)), rel=1e-6)


def test_where_there_is_none() -> None:
    assert relative_distance(np.array([1.0, 1.0]), 0.0) is None
    assert relative_distance(np.array([1.0, math.nan]), 1.0) is None
    assert relative_distance(np.array([1.0, 1.0]), 1.0 + 1e-12) == 0.0, "rounding is no distance"


def _on_ranks(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {
        "local": {"ddp": False, "auto_lr": False},
        "shared, fused": {"make_optimizer": hk.FusedAdamW, "auto_lr": False},
        "outer": {"ddp": False, "auto_lr": False, "outer": hk.Outer()},
        "int8": {"ddp": False, "auto_lr": False, "compress": "int8"},
        "overlap": {"ddp": False, "auto_lr": False, "overlap_steps": 2},
        "best": {"ddp": False, "auto_lr": False, "merge": "best"},
        "equal": {"spread": 0.0},
    }.items():
        trainer = Trainer(rank, **options)
        before: list[Tensor] = []

        def keep(trainer: Trainer, before: list[Tensor] = before) -> None:
            if trainer.step % 4 == 3:
                before.append(trainer.parameters())

        trainer.train(12, keep)
        found[name] = before, [record.distance for record in trainer.scheduler.history]
    params = [nn.Parameter(torch.full((3,), 1.0 + rank)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    mixed = Converger(params, ProcessEnsemble()).converge(Report(1))
    broken = nn.Parameter(torch.tensor([1.0, math.nan if rank == 2 else 1.0 + rank]))
    left_out = Converger([broken], ProcessEnsemble()).converge(Report(1))
    return {"runs": found, "mixed": mixed.distance, "left out": left_out.distance}


def test_it_is_that_of_the_parameters_of_all_ranks_before_the_average() -> None:
    results = run_ranks(3, _on_ranks)
    for name, (_, distances) in results[0]["runs"].items():
        assert all(result["runs"][name][1] == distances for result in results), "all processes tell the same"
        replicas = [result["runs"][name][0] for result in results]
        if name == "best":
            assert distances == [None] * 3
        elif name == "equal":
            assert distances == [0.0] * 3
        else:
            expected = [by_hand([own[sync] for own in replicas]) for sync in range(3)]
            assert expected[0] > 1e-3
            # The mean of fp32 parameters is rounded, and that of int8 differences, of so few parameters, far more.
            assert distances == pytest.approx(expected, rel=0.5 if name == "int8" else 1e-3), name
    assert results[0]["mixed"] is None, "norms of two kinds of parameters are not added up"
    assert [result["left out"] for result in results] == [
        pytest.approx(by_hand([torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0])]))
    ] * 3


def test_the_rows_of_a_stack_are_compared_too() -> None:
    run = StackRun(0.05, 40, sync_every=4, auto_lr=False, gradients="local")
    for _ in range(2):
        run.train(3)
        own: list[Tensor] = []
        step = run.optimizer.step

        def stepped(step: Any = step, own: list[Tensor] = own) -> None:
            step()
            own.extend(torch.cat([p.detach()[row].reshape(-1) for p in run.stack.parameters()]) for row in range(4))

        run.optimizer.step = stepped
        run.train(1)
        run.optimizer.step = step
        assert run.scheduler.history[-1].distance == pytest.approx(by_hand(own), rel=1e-3)


def test_a_single_replica_has_none() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 4, sync_every=2, auto_lr=False, cycle_momentum=False)
    for _ in range(4):
        optimizer.step()
        scheduler.step(1.0)
    assert [record.distance for record in scheduler.history] == [None, None]


def _sharded(rank: int) -> tuple[Tensor, float | None]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    own = nn.Parameter(torch.linspace(1, 2, 50) + rank)
    before = own.detach().clone()
    return before, Converger([own], ProcessEnsemble(mesh)).converge(Report(1)).distance


@pytest.mark.full
def test_of_sharded_replicas_it_is_that_of_the_own_shard() -> None:
    results = run_ranks(4, _sharded)  # ranks 0 and 2 hold the first shard of two replicas, 1 and 3 the second
    for part in (0, 1):
        shards = [results[part], results[part + 2]]
        assert [distance for _, distance in shards] == [
            pytest.approx(by_hand([own for own, _ in shards]), rel=1e-4)
        ] * 2
