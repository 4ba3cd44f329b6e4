"""Tasks on text."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.quality.tasks import TASKS
from bench.quality.tasks.text import TEXT_TASKS, LargeLanguage
from tests.bench.quality.two_steps import CPU, check_two_steps

QUICK = [task.name for task in TEXT_TASKS if task is not LargeLanguage]


@pytest.mark.parametrize("name", [*QUICK, pytest.param(LargeLanguage.name, marks=pytest.mark.full)])
def test_two_steps(name: str, little_data: Path) -> None:
    check_two_steps(name, little_data)


def test_large_language_has_ten_million_parameters(little_data: Path) -> None:
    model = LargeLanguage(CPU, little_data).model()
    assert sum(param.numel() for param in model.parameters()) > 10_000_000


def test_targets_follow_their_inputs(little_data: Path) -> None:
    text, following = TASKS["words"](CPU, little_data).probe()  # type: ignore[call-arg]
    assert text[:, 1:].tolist() == following[:, :-1].tolist()
