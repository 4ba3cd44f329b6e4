"""Runs of a few steps by every method and on every task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn", reason="the digits need scikit-learn: pip install scikit-learn")

from bench.quality.spec import Spec
from bench.quality.tasks import TASKS
from bench.quality.train import train, validation_loss
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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "digits" else pytest.mark.full) for name in TASKS]
)
def test_every_task_runs_plain_and_as_a_stack(name: str, little_data: Path) -> None:
    task = TASKS[name](CPU, little_data)
    spec = Spec(name, "plain", task.lr / 10, 0, steps=4)
    plain, stack = (train(task, replace(spec, method=method), CPU) for method in ("plain", "hdet"))
    assert stack["val"] == pytest.approx(plain["val"], rel=0.1)
    assert {task.group(key) for key, _ in task.model().named_parameters()} >= {"dense", "no-decay"}


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
