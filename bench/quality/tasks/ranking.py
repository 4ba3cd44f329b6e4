"""Tasks that score items: films for users, documents for queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from bench.quality.data import FOLDER, load
from bench.quality.models import DocumentModel, Factors, Towers
from bench.quality.tasks.protocol import Batch, Examples, Task
from bench.quality.tasks.tables import joint, standard


class RankedRatings(Examples):
    """Which of sixteen films a user liked: MovieLens-1M's ratings of four stars and more, two towers.

    The other fifteen are films of other liked ratings, so that popular films are as frequent among them. One rating in
    ten is held out.
    """

    name: ClassVar[str] = "ranked ratings"
    data: ClassVar[str] = "ratings"
    title: ClassVar[str] = "MovieLens-1M, two towers, softmax over 16 films, Adagrad"
    architecture: ClassVar[str] = "embeddings"
    optimizer: ClassVar[str] = "adagrad"
    steps: ClassVar[int] = 1200
    batch: ClassVar[int] = 64
    lr: ClassVar[float] = 0.15
    others, validations = 15, 8192

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data, folder)
        liked = np.random.default_rng(0).permutation(np.flatnonzero(found["stars"] >= 4))
        user = found["user"][liked].astype(np.int64)
        fields, self.users = joint(np.stack([user, *(found[key][user] for key in ("gender", "age", "occupation"))], 1))
        self.genres = torch.tensor(found["genres"], device=device).float()
        film = torch.tensor(found["film"][liked].astype(np.int64))
        self.divide(torch.arange(len(liked)) % 10 == 0, device, torch.tensor(fields), film)
        generator = Generator(device).manual_seed(0)
        self.unseen = self._with_others(*(part[: 2 * self.validations] for part in self.unseen), generator=generator)

    def model(self) -> nn.Module:
        return Towers(self.users, self.train[0].shape[1], *self.genres.shape)

    def draw(self, count: int, generator: Generator) -> Batch:
        user, film = super().draw(count, generator)
        return self._with_others(user, film, generator=generator)

    def _with_others(self, user: Tensor, film: Tensor, *, generator: Generator) -> Batch:
        """Add other films to the liked one, which is the first, and the genres of all."""
        shape = (len(film), self.others)
        others = torch.randint(len(self.train[1]), shape, generator=generator, device=film.device)
        films = torch.cat([film[:, None], self.train[1][others]], 1)
        return user, films, self.genres[films]

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        scores: Tensor = model(*batch)
        return -scores.log_softmax(1)[:, 0].mean()


class FactorisedRatings(Examples):
    """Stars of MovieLens-1M by a product of two factors and biases; a third of a pass in small batches."""

    name: ClassVar[str] = "factorised ratings"
    data: ClassVar[str] = "ratings"
    title: ClassVar[str] = "MovieLens-1M, matrix factorisation, squared error, 5000 steps of Adam on 64 ratings"
    architecture: ClassVar[str] = "factorisation"
    optimizer: ClassVar[str] = "adam"
    steps: ClassVar[int] = 5000
    batch: ClassVar[int] = 8
    lr: ClassVar[float] = 4.9e-3

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data, folder)
        order = np.random.default_rng(0).permutation(len(found["user"]))
        self.sizes = len(found["age"]), len(found["year"])
        parts = (found["user"][order].astype(np.int64), found["film"][order].astype(np.int64))
        stars = standard(found["stars"][order])
        self.divide(torch.arange(len(order)) % 20 == 0, device, *(torch.tensor(part) for part in (*parts, stars)))

    def model(self) -> nn.Module:
        return Factors(*self.sizes)

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        users, films, stars = batch
        return F.mse_loss(model(users, films), stars)


class Queries(Examples):
    """Lists of ten documents of a web search, in the order of their relevance: a softmax over every list.

    A query's documents are cut into lists in several random orders. One query in five is for the probe and another one
    to validate.
    """

    name: ClassVar[str] = "queries"
    data: ClassVar[str] = "queries"
    title: ClassVar[str] = "MSLR-WEB, MLP, softmax over lists of 10 documents"
    architecture: ClassVar[str] = "mlp"
    replicas: ClassVar[int] = 16
    steps: ClassVar[int] = 300
    batch: ClassVar[int] = 4
    lr: ClassVar[float] = 1e-3
    overfits: ClassVar[bool] = True
    length, orders = 10, 10

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data, folder)
        self.features = torch.tensor(standard(found["features"].astype(np.float32)).clip(-5, 5), device=device)
        self.gains = 2.0 ** torch.tensor(found["relevance"], device=device).float() - 1
        lists = self._lists(found["query"], found["relevance"])
        part = torch.tensor(found["query"][lists[:, 0]] % 5)
        chosen = torch.tensor(lists)
        self.lists = [chosen[rows].to(device) for rows in (part > 1, part == 0, part == 1)]

    def _lists(self, query: NDArray[Any], relevance: NDArray[Any]) -> NDArray[np.int64]:
        """Return document numbers [lists, length]; every list is of one query and has a relevant document."""
        random = np.random.default_rng(0)
        found = []
        for _ in range(self.orders):
            for number in np.unique(query):
                documents = random.permutation(np.flatnonzero(query == number))
                whole = len(documents) // self.length * self.length
                found.append(documents[:whole].reshape(-1, self.length))
        lists: NDArray[np.int64] = np.concatenate(found)
        relevant: NDArray[np.bool_] = relevance[lists].max(1) > 0
        return lists[relevant]

    def model(self) -> nn.Module:
        return DocumentModel(self.features.shape[1])

    def draw(self, count: int, generator: Generator) -> Batch:
        train = self.lists[0]
        return self._read(train[torch.randint(len(train), (count,), generator=generator, device=train.device)])

    def probe(self) -> Batch:
        return self._read(self.lists[1][: self.probes])

    def validation(self) -> Batch:
        return self._read(self.lists[2])

    def _read(self, documents: Tensor) -> Batch:
        gains = self.gains[documents]
        return self.features[documents], gains / gains.sum(1, keepdim=True)

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        """Return the mean cross-entropy between the shares of the gains 2**relevance - 1 and of the scores."""
        features, shares = batch
        scores: Tensor = model(features)
        return -(shares * scores.log_softmax(1)).sum(1).mean()


RANKING_TASKS: tuple[type[Task], ...] = (RankedRatings, FactorisedRatings, Queries)
