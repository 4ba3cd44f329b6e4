"""Runs of a few steps by every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn", reason="the digits need scikit-learn: pip install scikit-learn")

from bench.quality.methods import hdet_method
from bench.quality.spec import Spec
from bench.quality.tasks import TASKS
from bench.quality.train import _Stack, train, validation_loss
from tests.ranks import run_ranks

CPU = torch.device("cpu")
STEPS = 40
MORE_METHODS = ["hypergradient", "fan-out", "local SGD", "DiLoCo", "PBT", "warm init", "paper"]


@pytest.mark.parametrize(
    "method", ["plain", "hdet", *(pytest.param(method, marks=pytest.mark.full) for method in MORE_METHODS)]
)
def test_every_method_learns(digits: Any, method: str) -> None:
    untrained = validation_loss(digits, digits.model())
    lr = 4e-4 if method == "DiLoCo" else 4e-3  # its outer momentum multiplies steps by seven
    found = train(digits, Spec("digits", method, lr, 0, steps=STEPS), CPU)
    assert found["val"] < 0.9 * untrained
    assert len(found["curve"]) >= STEPS // found["every"] - 1


def test_probe_leaves_the_statistics_of_batch_norms(little_data: Path) -> None:
    task = TASKS["images, batch norm"](CPU, little_data)  # type: ignore[call-arg]
    replicas = _Stack(task, task.model(), hdet_method(Spec(task.name, "hdet", 0.1, 0), 100))
    replicas.backward(*task.draw(16, torch.Generator().manual_seed(0)))
    before = [buffer.clone() for buffer in replicas.stack.buffers()]
    replicas.probe()
    assert replicas.stack.training
    assert all(torch.equal(*pair) for pair in zip(before, replicas.stack.buffers(), strict=True))


@pytest.mark.full
def test_groups_have_their_own_learning_rates(digits: Any) -> None:
    spec = Spec("digits", "hdet", 4e-3, 0, steps=STEPS, factors={"dense": 0.1, "no-decay": 1.0})
    found = train(digits, spec, CPU)
    assert found["groups"] == ["dense", "no-decay"]
    assert len(found["mu"]) == 2


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_other_schedules(digits: Any, schedule: str) -> None:
    assert train(digits, Spec("digits", "hdet", 4e-3, 0, steps=STEPS, schedule=schedule), CPU)["val"] < 2


@pytest.mark.full
def test_processes_train_as_a_stack_does(digits: Any, tmp_path: Path) -> None:
    """Eight gloo processes under DDP and eight rows of a stack have the same first losses up to fp32 rounding.

    Later steps are not compared, since training amplifies the differences.
    """
    spec = Spec("digits", "hdet", 1e-3, 0, steps=STEPS // 2)
    stack = train(digits, spec, CPU)
    ranks = run_ranks(8, _train_rank, spec.record(), str(tmp_path))
    assert ranks[0]["curve"][:4] == pytest.approx(stack["curve"][:4], rel=1e-3)
    assert ranks[0]["rates"][:4] == [pytest.approx(rates, rel=1e-2) for rates in stack["rates"][:4]]
    assert ranks[0]["groups"] == stack["groups"]
    assert ranks[0]["val"] < 2.3


def _train_rank(rank: int, spec: dict[str, Any], folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train(TASKS["digits"](CPU, Path(folder)), Spec(**spec), CPU)
