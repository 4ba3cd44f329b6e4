"""A few steps of a task, by plain training and by two replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.quality.spec import Spec
from bench.quality.tasks import TASKS
from bench.quality.train import train

CPU = torch.device("cpu")
GROUPS = {"embedding", "no-decay", "transformer", "dense"}


def check_two_steps(name: str, folder: Path, device: torch.device = CPU, steps: int = 2) -> None:
    """Train by both and compare their losses; the batches are small, so that a test is quick."""
    task: Any = TASKS[name](device, folder)  # type: ignore[call-arg]
    task.replicas, task.batch = 2, min(task.batch, 4)
    task.probes = task.validations = 16
    spec = Spec(name, "plain", task.lr / 10, 0, steps=steps)
    plain, stack = (train(task, replace(spec, method=method), device) for method in ("plain", "hdet"))
    assert stack["val"] == pytest.approx(plain["val"], rel=0.1)
    assert {task.group(key) for key, _ in task.model().named_parameters()} <= GROUPS
