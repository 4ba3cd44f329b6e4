"""A check that every task has to pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.quality.spec import Spec
from bench.quality.tasks import Task
from bench.quality.train import train


def assert_task_trains(task: Task) -> None:
    """Train for two steps, plain and as a stack, and compare the validation losses."""
    spec = Spec(task.name, "plain", task.lr / 10, 0, steps=2)
    plain, stack = (train(task, replace(spec, method=method), torch.device("cpu")) for method in ("plain", "hdet"))
    assert stack["val"] == pytest.approx(plain["val"], rel=0.1)
