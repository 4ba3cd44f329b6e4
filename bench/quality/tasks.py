"""Tasks: data, model, loss and length of a run.

Batches are drawn for all replicas at once from one generator, so that a stack, processes and a plain run of the same
seed see the same examples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from .data import FOLDER, load, missing
from .models import Autoencoder, ByteModel, DigitsModel, FlightsModel, ImageModel, RatingsModel

Batch = tuple[Tensor, ...]


class Task(Protocol):
    """Interface of a task.

    A run has ``steps`` optimizer steps on ``batch`` examples for each replica. The best learning rate of plain training
    is within a few powers of two of ``lr``. ``data`` is the name of its data set.
    """

    name: ClassVar[str]
    data: ClassVar[str]
    title: ClassVar[str]
    steps: ClassVar[int]
    batch: ClassVar[int]
    lr: ClassVar[float]

    def model(self) -> nn.Module: ...

    def draw(self, count: int, generator: Generator) -> Batch:
        """Draw ``count`` training examples."""

    def probe(self) -> Batch:
        """Return held-out examples for the controller, disjoint from :meth:`validation`."""

    def validation(self) -> Batch: ...

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor: ...

    @staticmethod
    def group(name: str) -> str:
        """Return the group of a parameter: embedding, no-decay, transformer or dense."""


class _Arrays:
    """Examples as tensors on the device; the first dimension counts examples."""

    train: Batch
    unseen: Batch

    def _divide(self, unseen: Tensor, device: torch.device, *tensors: Tensor) -> None:
        """Split the tensors into training and held-out examples."""
        self.train = tuple(tensor[~unseen].to(device) for tensor in tensors)
        self.unseen = tuple(tensor[unseen].to(device) for tensor in tensors)

    def draw(self, count: int, generator: Generator) -> Batch:
        rows = torch.randint(len(self.train[0]), (count,), generator=generator, device=self.train[0].device)
        return tuple(part[rows] for part in self.train)

    def probe(self) -> Batch:
        return tuple(part[0::2][: self.probes] for part in self.unseen)

    def validation(self) -> Batch:
        return tuple(part[1::2] for part in self.unseen)

    probes = 2048

    @staticmethod
    def group(name: str) -> str:
        if name.startswith("tables"):
            return "embedding"
        return _no_decay(name) or ("transformer" if name.startswith("block") else "dense")


class _Classes(_Arrays):
    """Inputs with a class number each."""

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        inputs, classes = batch
        return F.cross_entropy(model(inputs), classes)


class Ratings(_Arrays):
    """MovieLens-1M, about one pass; one rating in ten is held out, half of those for the probe and half to validate."""

    name: ClassVar[str] = "ratings"
    data: ClassVar[str] = "ratings"
    title: ClassVar[str] = "MovieLens-1M, DLRM with three heads"
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
        self._divide(
            torch.tensor(unseen), device, torch.tensor(categories.astype(np.int64)), torch.tensor(dense), stars
        )

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


class Language:
    """The next byte of English documentation or, without it, of the standard library's source; whole files are held
    out."""

    name: ClassVar[str] = "language"
    data: ClassVar[str] = "language"
    title: ClassVar[str] = "documentation of Linux 6.1, byte-level transformer"
    steps: ClassVar[int] = 1600
    batch: ClassVar[int] = 8
    lr: ClassVar[float] = 4e-3
    context, width, layers = 64, 128, 3
    probes, validations = 64, 512

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data if missing(self.data, folder) is None else "source", folder)
        self.train = torch.tensor(found["train"], device=device)
        self.unseen = torch.tensor(found["held_out"], device=device)

    def model(self) -> nn.Module:
        return ByteModel(width=self.width, heads=4, layers=self.layers, context=self.context)

    def draw(self, count: int, generator: Generator) -> Batch:
        last = len(self.train) - self.context
        return self._cut(self.train, torch.randint(last, (count,), generator=generator, device=self.train.device))

    def probe(self) -> Batch:
        half = len(self.unseen) // 2
        return self._spread(self.unseen[:half], self.probes)

    def validation(self) -> Batch:
        half = len(self.unseen) // 2
        return self._spread(self.unseen[half:], self.validations)

    def _spread(self, text: Tensor, count: int) -> Batch:
        return self._cut(text, torch.linspace(0, len(text) - self.context - 1, count, device=text.device).long())

    def _cut(self, text: Tensor, starts: Tensor) -> Batch:
        windows = text[starts[:, None] + torch.arange(self.context + 1, device=text.device)].long()
        return windows[:, :-1], windows[:, 1:]

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        text, following = batch
        return F.cross_entropy(model(text).flatten(0, -2), following.flatten())

    @staticmethod
    def group(name: str) -> str:
        if name.startswith(("bytes", "positions")):
            return "embedding"
        return _no_decay(name) or ("transformer" if name.startswith("blocks") else "dense")


class Images(_Classes):
    """Fashion-MNIST, five passes; the test images are held out."""

    name: ClassVar[str] = "images"
    data: ClassVar[str] = "images"
    title: ClassVar[str] = "Fashion-MNIST, convolutional network"
    steps: ClassVar[int] = 1200
    batch: ClassVar[int] = 32
    lr: ClassVar[float] = 4e-3

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data, folder)
        self.train = _images(found["train_images"], found["train_classes"], device)
        self.unseen = _images(found["held_out_images"], found["held_out_classes"], device)

    def model(self) -> nn.Module:
        return ImageModel()


class Digits(_Classes):
    """scikit-learn's 1797 digits of 8×8 pixels; two in five are held out, half of those for the probe."""

    name: ClassVar[str] = "digits"
    data: ClassVar[str] = "digits"
    title: ClassVar[str] = "scikit-learn's digits, MLP"
    steps: ClassVar[int] = 300
    batch: ClassVar[int] = 16
    lr: ClassVar[float] = 4e-3

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data, folder)
        pixels, classes = torch.tensor(found["pixels"] / 16), torch.tensor(found["classes"])
        self._divide(torch.arange(len(classes)) % 5 < 2, device, pixels, classes)

    def model(self) -> nn.Module:
        return DigitsModel()


class FewDigits(Digits):
    """300 digits, all of them in every batch: regularisation matters, and replicas see the same examples."""

    name: ClassVar[str] = "few digits"
    title: ClassVar[str] = "300 of scikit-learn's digits, MLP"
    batch: ClassVar[int] = 300
    lr: ClassVar[float] = 2e-3

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        super().__init__(device, folder)
        self.train = tuple(part[: self.batch] for part in self.train)

    def draw(self, count: int, generator: Generator) -> Batch:
        rows = torch.arange(count, device=self.train[0].device) % self.batch
        return tuple(part[rows] for part in self.train)


class Flights(_Arrays):
    """Arrival delays of flights from New York, from the departure delay, the plan and the day; about one pass.

    One flight in ten is held out, half of those for the probe.
    """

    name: ClassVar[str] = "flights"
    data: ClassVar[str] = "flights"
    title: ClassVar[str] = "delays of flights from New York, MLP, squared error"
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
        numbers = _standard(np.stack([found[key] for key in ("dep_delay", "distance", "minute")], 1))
        parts = (categories, numbers, _standard(found["arr_delay"]))
        self._divide(torch.arange(len(order)) % 10 == 0, device, *(torch.tensor(part) for part in parts))

    def model(self) -> nn.Module:
        return FlightsModel(self.sizes, self.train[1].shape[1])

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        categories, numbers, late = batch
        return F.mse_loss(model(categories, numbers), late)


class Reconstruction(Images):
    """Autoencoder of Fashion-MNIST with a code of sixteen numbers."""

    name: ClassVar[str] = "reconstruction"
    title: ClassVar[str] = "Fashion-MNIST, autoencoder, squared error"

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        super().__init__(device, folder)
        self.train, self.unseen = self.train[:1], self.unseen[:1]

    def model(self) -> nn.Module:
        return Autoencoder()

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        (images,) = batch
        return F.mse_loss(model(images), images)


TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Ratings, Language, Images, Digits, FewDigits, Flights, Reconstruction)
}


def _no_decay(name: str) -> str | None:
    return "no-decay" if name.endswith("bias") or "norm" in name else None


def _images(pixels: NDArray[Any], classes: NDArray[Any], device: torch.device) -> Batch:
    images = (torch.tensor(pixels, device=device).float() / 255 - 0.286) / 0.353
    return images[:, None], torch.tensor(classes, device=device).long()


def _dense_features(
    found: dict[str, NDArray[Any]], user: NDArray[Any], film: NDArray[Any], time: NDArray[Any], seen: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return the number of training ratings of user and film, the film's year and genres, and the rating's time."""
    often = [np.log1p(np.bincount(who[seen], minlength=who.max() + 1))[who] for who in (user, film)]
    day = time / 86400
    columns = [*often, found["year"][film] / 10, day / 100, np.sin(2 * np.pi * day), np.cos(2 * np.pi * day)]
    return np.concatenate([_standard(np.stack(columns, 1)), found["genres"][film]], 1).astype(np.float32)


def _standard(columns: NDArray[Any]) -> NDArray[np.float32]:
    """Scale columns to mean 0 and standard deviation 1."""
    standard: NDArray[np.float32] = ((columns - columns.mean(0)) / columns.std(0)).astype(np.float32)
    return standard
