"""Tasks on items to rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Generator

from bench.quality.data import load
from bench.quality.tasks.ranking import RANKING_TASKS, Queries, RankedRatings
from tests.bench.quality.two_steps import CPU, check_two_steps


@pytest.mark.parametrize("name", [task.name for task in RANKING_TASKS])
def test_two_steps(name: str, little_data: Path) -> None:
    check_two_steps(name, little_data)


def test_the_liked_film_is_the_first_of_the_list(little_data: Path) -> None:
    task = RankedRatings(CPU, little_data)
    users, films, genres = task.draw(50, Generator().manual_seed(0))
    liked = {(user, film) for user, film in zip(task.train[0][:, 0].tolist(), task.train[1].tolist(), strict=True)}
    assert all(pair in liked for pair in zip(users[:, 0].tolist(), films[:, 0].tolist(), strict=True))
    assert films.shape == (50, 16)
    assert torch.equal(genres[3, 5], task.genres[films[3, 5]])


def test_lists_are_of_one_query_and_parts_share_none(little_data: Path) -> None:
    task = Queries(CPU, little_data)
    query = torch.tensor(load("queries", little_data)["query"])
    parts = [query[lists] for lists in task.lists]
    assert all(bool((part == part[:, :1]).all()) for part in parts)
    seen, probe, validation = (set(part.flatten().tolist()) for part in parts)
    assert seen.isdisjoint(probe | validation)
    assert probe.isdisjoint(validation)
    shares = task.validation()[1].sum(1)
    assert np.asarray(shares) == pytest.approx(1, abs=1e-5)
