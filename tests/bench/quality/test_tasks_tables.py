"""Tasks on tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Generator

from bench.quality.tasks.tables import TABLE_TASKS, Credit, FlightsResidual, TinyDiamonds, joint
from tests.bench.quality.two_steps import CPU, check_two_steps


@pytest.mark.parametrize("name", [task.name for task in TABLE_TASKS])
def test_two_steps(name: str, little_data: Path) -> None:
    check_two_steps(name, little_data)


def test_categories_are_numbered_through_all_fields() -> None:
    numbered, count = joint(np.array([[0, 3], [2, 0]], dtype=np.uint8))
    assert numbered.tolist() == [[0, 6], [2, 3]]
    assert count == 7


def test_residual_flights_have_the_fields_of_flights(little_data: Path) -> None:
    task = FlightsResidual(CPU, little_data)
    first = [sum(task.sizes[:i]) for i in range(len(task.sizes))]
    smallest, largest = (tensor.tolist() for tensor in (task.train[0].amin(0), task.train[0].amax(0)))
    assert all(low >= start for low, start in zip(smallest, first, strict=True))
    assert all(high < after for high, after in zip(largest, [*first[1:], sum(task.sizes)], strict=True))


def test_tiny_diamonds_have_standard_numbers_only(little_data: Path) -> None:
    task = TinyDiamonds(CPU, little_data)
    numbers, price = task.train
    assert numbers.shape == (240, 9)
    assert numbers[:, :3].mean(0).tolist() == pytest.approx([0, 0, 0], abs=1e-5)
    assert float(price.std()) == pytest.approx(1, abs=0.2)


def test_credit_draws_every_row_for_every_replica(little_data: Path) -> None:
    task = Credit(CPU, little_data)
    rows = len(task.train[0])
    first, second = (task.draw(2 * rows, Generator())[0].chunk(2) for _ in range(2))
    assert torch.equal(first[0], task.train[0])
    assert torch.equal(first[1], second[0])
    assert len(task.probe()[0]) == len(task.validation()[0]) == 30
