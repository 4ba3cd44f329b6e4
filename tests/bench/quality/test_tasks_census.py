"""Tasks on the census."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.quality.tasks.census import CENSUS_TASKS, Census, NoisyCensus, WideCensus
from tests.bench.quality.two_steps import CPU, check_two_steps


@pytest.mark.parametrize("name", [task.name for task in CENSUS_TASKS])
def test_two_steps(name: str, little_data: Path) -> None:
    check_two_steps(name, little_data)


def test_only_training_labels_are_noisy(little_data: Path) -> None:
    right, noisy = Census(CPU, little_data), NoisyCensus(CPU, little_data)
    assert 0.1 < float((right.train[2] != noisy.train[2]).float().mean()) < 0.3
    assert torch.equal(right.unseen[2], noisy.unseen[2])
    assert set(noisy.train[2].tolist()) == {0.0, 1.0}


def test_wide_census_crosses_pairs_of_categories(little_data: Path) -> None:
    """Rows have the same crossed category exactly if both of its categories are the same."""
    plain, wide = Census(CPU, little_data).train[0], WideCensus(CPU, little_data).train[0]
    fields = plain.shape[1]
    assert wide.shape[1] == fields + 15
    one, other = WideCensus.crossed[:2]
    pairs = set(map(tuple, plain[:, [one, other]].tolist()))
    assert len(set(wide[:, fields].tolist())) == len(pairs)
    assert int(wide.max()) < WideCensus(CPU, little_data).count
