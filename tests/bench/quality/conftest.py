"""Data of the quality tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.quality.tasks import TASKS
from tests.bench.quality.little_tables import little_tables


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the digits task on the CPU."""
    pytest.importorskip("sklearn", reason="the digits need scikit-learn: pip install scikit-learn")
    return TASKS["digits"](torch.device("cpu"), tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def little_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data of all tasks: a few hundred random examples."""
    folder = tmp_path_factory.mktemp("little")
    random = np.random.default_rng(0)

    def numbers(below: int, *shape: int) -> Any:
        return random.integers(below, size=shape)

    arrays = {
        "ratings": {
            "user": numbers(20, 400), "film": numbers(30, 400), "stars": numbers(5, 400) + 1,
            "time": numbers(10**6, 400), "gender": numbers(2, 20), "age": numbers(7, 20), "occupation": numbers(21, 20),
            "region": numbers(100, 20), "year": 1950 + numbers(50, 30), "genres": numbers(2, 30, 18),
        },
        "language": {"train": numbers(256, 4000), "held_out": numbers(256, 1000)},
        "images": {
            "train_images": numbers(256, 300, 28, 28), "train_classes": numbers(10, 300),
            "held_out_images": numbers(256, 100, 28, 28), "held_out_classes": numbers(10, 100),
        },
        "flights": {
            "day": numbers(365, 400), "hour": numbers(24, 400), "origin": numbers(3, 400), "carrier": numbers(16, 400),
            "dest": numbers(104, 400), "dep_delay": numbers(90, 400), "distance": numbers(2000, 400),
            "minute": numbers(60, 400), "arr_delay": numbers(90, 400),
        },
        "words": {"train": numbers(50, 2000), "held_out": numbers(50, 400)},
    }  # fmt: skip
    for name, found in {**arrays, **little_tables()}.items():
        np.savez(folder / f"{name}.npz", **found)
    return folder
