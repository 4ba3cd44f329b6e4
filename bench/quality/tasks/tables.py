"""Tasks on tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bench.quality.data import FOLDER, load
from bench.quality.models.tables import FlightsModel, RatingsModel
from bench.quality.tasks.protocol import Examples, Task


class Ratings(Examples):
    """MovieLens-1M, about one pass; one rating in ten is held out, half of those for the probe and half to validate."""

    name: ClassVar[str] = "ratings"
    data: ClassVar[str] = "ratings"
    title: ClassVar[str] = "MovieLens-1M, DLRM with three heads"
    architecture: ClassVar[str] = "embeddings"
    steps: ClassVar[int] = 1600
    batch: ClassVar[int] = 64
    lr: ClassVar[float] = 4e-3

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
    lr: ClassVar[float] = 1.6e-2

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


TABLE_TASKS: tuple[type[Task], ...] = (Ratings, Flights)
