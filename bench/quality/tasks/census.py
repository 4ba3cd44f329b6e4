"""Tasks on the census income data: who earns more than 50 000 dollars a year.

Half of the held-out rows are for the probe, half to validate.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bench.quality.data import FOLDER, load
from bench.quality.models.tables import ColumnTransformer, TableMLP, WideModel
from bench.quality.tasks.protocol import Examples, Task
from bench.quality.tasks.tables import joint, standard


class Census(Examples):
    """Four passes over 100 000 rows: 33 categories with embeddings, and 7 numbers."""

    name: ClassVar[str] = "census"
    data: ClassVar[str] = "census"
    title: ClassVar[str] = "census income, embeddings and MLP"
    architecture: ClassVar[str] = "embeddings"
    steps: ClassVar[int] = 1600
    batch: ClassVar[int] = 32
    lr: ClassVar[float] = 2.4e-3

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data, folder)
        categories, self.count = joint(self._fields(found["categories"]))
        parts = (categories, standard(np.log1p(found["numbers"])), found["rich"].astype(np.float32))
        self.divide(torch.tensor(found["unseen"]).bool(), device, *(torch.tensor(part) for part in parts))

    @staticmethod
    def _fields(categories: NDArray[Any]) -> NDArray[Any]:
        return categories

    def model(self) -> nn.Module:
        return TableMLP(self.count, self.train[0].shape[1], self.train[1].shape[1])

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        categories, numbers, rich = batch
        return F.binary_cross_entropy_with_logits(model(categories, numbers), rich)


class WideCensus(Census):
    """A linear model of all categories and of pairs of the telling ones, in large batches: a convex loss."""

    name: ClassVar[str] = "wide census"
    title: ClassVar[str] = "census income, linear model with crossed categories, Adagrad"
    architecture: ClassVar[str] = "linear"
    optimizer: ClassVar[str] = "adagrad"
    steps: ClassVar[int] = 800
    batch: ClassVar[int] = 128
    lr: ClassVar[float] = 0.28

    # Class of worker, education, marital status, occupation, sex and household.
    crossed = (0, 3, 5, 7, 10, 18)

    @classmethod
    def _fields(cls, categories: NDArray[Any]) -> NDArray[Any]:
        wide = categories.astype(np.int64)
        sizes = wide.max(0) + 1
        pairs = [wide[:, one] * sizes[other] + wide[:, other] for one, other in combinations(cls.crossed, 2)]
        return np.concatenate([wide, np.stack(pairs, 1)], 1)

    def model(self) -> nn.Module:
        return WideModel(self.count, self.train[1].shape[1])


class CensusColumns(Census):
    """Attention over the columns of the table."""

    name: ClassVar[str] = "census columns"
    title: ClassVar[str] = "census income, transformer over the columns"
    architecture: ClassVar[str] = "transformer"
    steps: ClassVar[int] = 800
    batch: ClassVar[int] = 16
    lr: ClassVar[float] = 0.011
    probes = 512

    def model(self) -> nn.Module:
        return ColumnTransformer(self.count, self.train[1].shape[1])


class NoisyCensus(Census):
    """8000 rows in ten passes; one in five of their labels is wrong, and those of the held-out rows are right."""

    name: ClassVar[str] = "noisy census"
    title: ClassVar[str] = "census income, 8000 rows with a fifth of the labels flipped, embeddings and MLP, Lion"
    optimizer: ClassVar[str] = "lion"
    replicas: ClassVar[int] = 2
    steps: ClassVar[int] = 600
    batch: ClassVar[int] = 64
    lr: ClassVar[float] = 2.7e-3

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        super().__init__(device, folder)
        categories, numbers, rich = (part[:8000] for part in self.train)
        wrong = torch.tensor(np.random.default_rng(0).random(len(rich)) < 0.2, device=device)
        self.train = (categories, numbers, torch.where(wrong, 1 - rich, rich))


CENSUS_TASKS: tuple[type[Task], ...] = (Census, WideCensus, CensusColumns, NoisyCensus)
