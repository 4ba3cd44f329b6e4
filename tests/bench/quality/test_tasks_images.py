"""Tasks on images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.quality.tasks import TASKS
from bench.quality.tasks.images import IMAGE_TASKS
from tests.bench.quality.two_steps import CPU, check_two_steps


@pytest.mark.parametrize("name", [task.name for task in IMAGE_TASKS])
def test_two_steps(name: str, little_data: Path) -> None:
    check_two_steps(name, little_data)


def test_three_labels_in_ten_are_random(little_data: Path) -> None:
    """One in ten of the random ones is right by chance; the held-out labels are all right."""
    right, noisy = (TASKS[name](CPU, little_data) for name in ("images", "noisy labels"))  # type: ignore[call-arg]
    wrong = (right.train[1] != noisy.train[1]).float().mean()  # type: ignore[attr-defined]
    assert wrong == pytest.approx(0.27, abs=0.08)
    assert torch.equal(right.validation()[1], noisy.validation()[1])
