"""Tasks on tables: ratings, flights, diamonds, credit and the census."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from bench.quality.data import FOLDER, load
from bench.quality.models import (
    FlightsModel,
    RatingsModel,
    ResidualModel,
    TableMLP,
    TinyMLP,
    WideModel,
)
from bench.quality.tasks.protocol import Batch, Examples, Task
from bench.quality.transformers import ColumnTransformer


class Ratings(Examples):
    """MovieLens-1M, about one pass; one rating in ten is held out, half of those for the probe and half to validate."""

    name: ClassVar[str] = "ratings"
    data: ClassVar[str] = "ratings"
    title: ClassVar[str] = "MovieLens-1M, DLRM with three heads"
    architecture: ClassVar[str] = "embeddings"
    steps: ClassVar[int] = 1600
    batch: ClassVar[int] = 64
    lr: ClassVar[float] = 0.023

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data, folder)
        order = np.random.default_rng(0).permutation(len(found["user"]))
        user, film = found["user"][order].astype(np.int64), found["film"][order].astype(np.int64)
        categories = np.stack([user, film, *(found[key][user] for key in ("gender", "age", "occupation", "region"))], 1)
        self.sizes = [len(found["age"]), len(found["year"]), 2, 7, 21, 100]
        unseen = np.arange(len(user)) % 10 == 0
        dense = _dense_features(found, user, film, found["time"][order], ~unseen)
        self.dense = dense.shape[1]
        stars = torch.tensor(found["stars"][order]).long()
        self.divide(torch.tensor(unseen), device, torch.tensor(categories.astype(np.int64)), torch.tensor(dense), stars)

    def model(self) -> nn.Module:
        return RatingsModel(self.sizes, self.dense)

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        """Return the mean cross-entropy of three heads: 4 stars or more, 5 stars, and which of the five."""
        categories, dense, stars = batch
        logits = model(categories, dense)
        liked = F.binary_cross_entropy_with_logits(logits[:, 0], (stars >= 4).float())
        loved = F.binary_cross_entropy_with_logits(logits[:, 1], (stars == 5).float())
        return (liked + loved + F.cross_entropy(logits[:, 2:], stars - 1)) / 3


class Flights(Examples):
    """Arrival delays of flights from New York, from the departure delay, the plan and the day; about one pass.

    One flight in ten is held out, half of those for the probe.
    """

    name: ClassVar[str] = "flights"
    data: ClassVar[str] = "flights"
    title: ClassVar[str] = "delays of flights from New York, MLP, squared error"
    architecture: ClassVar[str] = "embeddings"
    steps: ClassVar[int] = 1200
    batch: ClassVar[int] = 32
    lr: ClassVar[float] = 0.026

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data, folder)
        order = np.random.default_rng(0).permutation(len(found["day"]))
        found = {key: array[order] for key, array in found.items()}
        fields = ("day", "hour", "origin", "carrier", "dest")
        self.sizes = [int(found[key].max()) + 1 for key in fields]
        categories = np.stack([found[key] for key in fields], 1).astype(np.int64)
        numbers = standard(np.stack([found[key] for key in ("dep_delay", "distance", "minute")], 1))
        parts = (categories, numbers, standard(found["arr_delay"]))
        self.divide(torch.arange(len(order)) % 10 == 0, device, *(torch.tensor(part) for part in parts))

    def model(self) -> nn.Module:
        return FlightsModel(self.sizes, self.train[1].shape[1])

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        categories, numbers, late = batch
        return F.mse_loss(model(categories, numbers), late)


class FlightsResidual(Flights):
    """The same delays with residual layers, larger batches and SGD with momentum."""

    name: ClassVar[str] = "flights residual"
    title: ClassVar[str] = "delays of flights from New York, residual MLP with layer norms, SGD"
    architecture: ClassVar[str] = "residual"
    optimizer: ClassVar[str] = "sgd"
    replicas: ClassVar[int] = 4
    steps: ClassVar[int] = 800
    batch: ClassVar[int] = 64
    lr: ClassVar[float] = 0.14

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        super().__init__(device, folder)
        first = torch.tensor([sum(self.sizes[:i]) for i in range(len(self.sizes))], device=device)
        self.train = (self.train[0] + first, *self.train[1:])
        self.unseen = (self.unseen[0] + first, *self.unseen[1:])

    def model(self) -> nn.Module:
        return ResidualModel(sum(self.sizes), len(self.sizes), self.train[1].shape[1])


class Diamonds(Examples):
    """Prices of 53 940 diamonds, about six passes; one in five is held out, half of those for the probe."""

    name: ClassVar[str] = "diamonds"
    data: ClassVar[str] = "diamonds"
    title: ClassVar[str] = "prices of diamonds, embeddings and MLP, squared error"
    architecture: ClassVar[str] = "mlp"
    steps: ClassVar[int] = 1000
    batch: ClassVar[int] = 32
    lr: ClassVar[float] = 0.012

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data, folder)
        order = np.random.default_rng(0).permutation(len(found["price"]))
        categories, self.count = joint(found["categories"][order])
        numbers = standard(found["numbers"][order]).clip(-5, 5)
        unseen = torch.arange(len(order)) % 5 == 0
        price = standard(self._price(found["price"][order]))
        self.divide(unseen, device, *(torch.tensor(part) for part in (categories, numbers, price)))

    @staticmethod
    def _price(dollars: NDArray[Any]) -> NDArray[Any]:
        return dollars

    def model(self) -> nn.Module:
        return TableMLP(self.count, self.train[0].shape[1], self.train[1].shape[1], width=4, hidden=(128, 128))

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        categories, numbers, price = batch
        return F.mse_loss(model(categories, numbers), price)


class TinyDiamonds(Diamonds):
    """The logarithm of the price, from the numbers and qualities as numbers, by a tiny network in very many steps."""

    name: ClassVar[str] = "tiny diamonds"
    title: ClassVar[str] = "logarithm of the prices of diamonds, tiny MLP, 20 000 steps of Adam on 16 diamonds"
    optimizer: ClassVar[str] = "adam"
    replicas: ClassVar[int] = 4
    steps: ClassVar[int] = 20_000
    batch: ClassVar[int] = 4
    lr: ClassVar[float] = 0.01

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        super().__init__(device, folder)
        mean, scale = self.train[0].float().mean(0), self.train[0].float().std(0)
        self.train, self.unseen = (
            (torch.cat([(categories - mean) / scale, numbers], 1), price)
            for categories, numbers, price in (self.train, self.unseen)
        )

    @staticmethod
    def _price(dollars: NDArray[Any]) -> NDArray[Any]:
        logarithm: NDArray[np.float64] = np.log(dollars)
        return logarithm

    def model(self) -> nn.Module:
        return TinyMLP(self.train[0].shape[1])

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        numbers, price = batch
        return F.mse_loss(model(numbers), price)


class Credit(Examples):
    """Bad risks among German credits: 400 applicants, all in every batch, so that a long run overfits.

    600 applicants are held out, half of them for the probe.
    """

    name: ClassVar[str] = "credit"
    data: ClassVar[str] = "credit"
    title: ClassVar[str] = "German credit, 400 rows in every batch, MLP, SGD"
    architecture: ClassVar[str] = "mlp"
    optimizer: ClassVar[str] = "sgd"
    replicas: ClassVar[int] = 2
    steps: ClassVar[int] = 300
    batch: ClassVar[int] = 400
    lr: ClassVar[float] = 0.036
    overfits: ClassVar[bool] = True

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data, folder)
        categories, self.count = joint(found["categories"])
        parts = (categories, standard(found["numbers"]), found["bad"].astype(np.float32))
        unseen = torch.arange(len(categories)) % 5 < 3
        self.divide(unseen, device, *(torch.tensor(part) for part in parts))

    def model(self) -> nn.Module:
        return TableMLP(self.count, self.train[0].shape[1], self.train[1].shape[1], hidden=(128, 128))

    def draw(self, count: int, generator: Generator) -> Batch:
        rows = torch.arange(count, device=self.train[0].device) % len(self.train[0])
        return tuple(part[rows] for part in self.train)

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        categories, numbers, bad = batch
        return F.binary_cross_entropy_with_logits(model(categories, numbers), bad)


def _dense_features(
    found: dict[str, NDArray[Any]], user: NDArray[Any], film: NDArray[Any], time: NDArray[Any], seen: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return the number of training ratings of user and film, the film's year and genres, and the rating's time."""
    often = [np.log1p(np.bincount(who[seen], minlength=who.max() + 1))[who] for who in (user, film)]
    day = time / 86400
    columns = [*often, found["year"][film] / 10, day / 100, np.sin(2 * np.pi * day), np.cos(2 * np.pi * day)]
    return np.concatenate([standard(np.stack(columns, 1)), found["genres"][film]], 1).astype(np.float32)


def standard(columns: NDArray[Any]) -> NDArray[np.float32]:
    """Scale columns to mean 0 and standard deviation 1."""
    standard: NDArray[np.float32] = ((columns - columns.mean(0)) / columns.std(0)).astype(np.float32)
    return standard


def joint(categories: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    """Number categories [rows, fields] through all fields, and count them, so that one embedding serves all fields."""
    sizes = categories.max(0).astype(np.int64) + 1
    return categories + np.cumsum(sizes) - sizes, int(sizes.sum())


TABLE_TASKS: tuple[type[Task], ...] = (Ratings, Flights, FlightsResidual, Diamonds, TinyDiamonds, Credit)


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
    overfits: ClassVar[bool] = True

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        super().__init__(device, folder)
        categories, numbers, rich = (part[:8000] for part in self.train)
        wrong = torch.tensor(np.random.default_rng(0).random(len(rich)) < 0.2, device=device)
        self.train = (categories, numbers, torch.where(wrong, 1 - rich, rich))


CENSUS_TASKS: tuple[type[Task], ...] = (Census, WideCensus, CensusColumns, NoisyCensus)
