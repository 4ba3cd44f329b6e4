"""Tasks of the quality suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.quality.optimizers import OPTIMIZERS
from bench.quality.tasks import TASKS
from tests.bench.quality.two_steps import check_two_steps


def test_probe_and_validation_share_no_example(digits: Any) -> None:
    probe = {tuple(row) for row in digits.probe()[0].tolist()}
    assert not probe & {tuple(row) for row in digits.validation()[0].tolist()}


def test_every_optimizer_and_number_of_replicas_has_a_task() -> None:
    assert {task.optimizer for task in TASKS.values()} == set(OPTIMIZERS)
    assert {task.replicas for task in TASKS.values()} >= {2, 8, 16}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TASKS)
def test_every_task_runs_on_a_gpu(name: str, little_data: Path) -> None:
    """Ten steps, so that passes in training and in evaluation mode are replayed as CUDA graphs."""
    check_two_steps(name, little_data, torch.device("cuda"), steps=10)
