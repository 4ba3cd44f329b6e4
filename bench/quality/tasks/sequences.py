"""Tasks on text and on time series."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from bench.quality.data import FOLDER, load, missing
from bench.quality.models import (
    ByteConvolutions,
    ByteWindow,
    GatedBytes,
    MemoryWords,
    Recurrence,
    TemporalConvolution,
    WordWindow,
)
from bench.quality.tasks.protocol import Batch, Defaults, Examples, Task
from bench.quality.tasks.tables import standard
from bench.quality.transformers import ByteModel, FusedAttentionBlock, WordModel


@cache
def text(name: str, device: torch.device, folder: Path) -> tuple[Tensor, Tensor]:
    """Return the numbers of all bytes or words, to train and held out; tasks on one text share the tensors."""
    found = load(name, folder)
    return torch.tensor(found["train"], device=device), torch.tensor(found["held_out"], device=device)


class _Text(Defaults):
    """Windows of ``context`` numbers with those that follow; the two halves of the held-out text are apart."""

    context: int
    probes, validations = 64, 512
    train: Tensor
    unseen: Tensor

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


class _Last(_Text):
    """Only the number after a window is predicted."""

    probes, validations = 2048, 16_384

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        text, following = batch
        return F.cross_entropy(model(text), following[:, -1])


class Language(_Text):
    """The next byte of English documentation or, without it, of the standard library's source; whole files are held
    out."""

    name: ClassVar[str] = "language"
    data: ClassVar[str] = "language"
    title: ClassVar[str] = "documentation of Linux 6.1, byte-level transformer"
    architecture: ClassVar[str] = "transformer"
    steps: ClassVar[int] = 1600
    batch: ClassVar[int] = 8
    lr: ClassVar[float] = 0.018
    context = 64

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        name = self.data if missing(self.data, folder) is None else "source"
        self.train, self.unseen = text(name, device, folder)

    def model(self) -> nn.Module:
        return ByteModel(width=128, heads=4, layers=3, context=self.context)


class LargeLanguage(Language):
    """A transformer of 10.9 million parameters."""

    name: ClassVar[str] = "large language"
    title: ClassVar[str] = "documentation of Linux 6.1, transformer of 10.9 M parameters, 2 replicas, 5000 steps"
    replicas: ClassVar[int] = 2
    steps: ClassVar[int] = 5000
    lr: ClassVar[float] = 1.2e-3

    def model(self) -> nn.Module:
        return ByteModel(width=384, heads=6, layers=6, context=self.context, block=FusedAttentionBlock)


class RecurrentLanguage(Language):
    """A gated recurrent unit over 32 bytes."""

    name: ClassVar[str] = "recurrent language"
    title: ClassVar[str] = "documentation of Linux 6.1, gated recurrent unit, Adam"
    architecture: ClassVar[str] = "recurrent"
    optimizer: ClassVar[str] = "adam"
    steps: ClassVar[int] = 1000
    lr: ClassVar[float] = 0.012
    context = 32
    validations = 1024

    def model(self) -> nn.Module:
        return GatedBytes()


class ConvolutionalLanguage(Language):
    """Causal convolutions over bytes, without norms."""

    name: ClassVar[str] = "convolutional language"
    title: ClassVar[str] = "documentation of Linux 6.1, causal convolutions, 2 replicas"
    architecture: ClassVar[str] = "convolution"
    replicas: ClassVar[int] = 2
    steps: ClassVar[int] = 2000
    lr: ClassVar[float] = 0.011

    def model(self) -> nn.Module:
        return ByteConvolutions()


class ByteWindows(_Last, Language):
    """The next byte from an MLP of the last eight, by Lion."""

    name: ClassVar[str] = "byte windows"
    title: ClassVar[str] = "documentation of Linux 6.1, MLP of eight bytes, Lion"
    architecture: ClassVar[str] = "mlp"
    optimizer: ClassVar[str] = "lion"
    steps: ClassVar[int] = 2000
    batch: ClassVar[int] = 64
    lr: ClassVar[float] = 9.5e-4
    context = 8

    def model(self) -> nn.Module:
        return ByteWindow(self.context)


class Words(_Text):
    """The next of 10 000 words of the Penn Treebank; its validation and test parts are held out."""

    name: ClassVar[str] = "words"
    data: ClassVar[str] = "words"
    title: ClassVar[str] = "Penn Treebank words, transformer with tied embeddings"
    architecture: ClassVar[str] = "transformer"
    steps: ClassVar[int] = 1500
    batch: ClassVar[int] = 4
    lr: ClassVar[float] = 7.8e-3
    context = 32
    probes = 32

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        self.train, self.unseen = text(self.data, device, folder)
        self.words = int(self.train.max()) + 1

    def model(self) -> nn.Module:
        return WordModel(self.words, width=64, heads=4, layers=2, context=self.context)


class RecurrentWords(Words):
    """A long short-term memory with an embedding and a head of their own, by Adagrad."""

    name: ClassVar[str] = "recurrent words"
    title: ClassVar[str] = "Penn Treebank words, long short-term memory, Adagrad"
    architecture: ClassVar[str] = "recurrent"
    optimizer: ClassVar[str] = "adagrad"
    batch: ClassVar[int] = 8
    lr: ClassVar[float] = 0.6
    context = 16
    probes, validations = 64, 1024

    def model(self) -> nn.Module:
        return MemoryWords(self.words)


class WordWindows(_Last, Words):
    """The next word from embeddings of the last four and one hidden layer, by SGD with momentum."""

    name: ClassVar[str] = "word windows"
    title: ClassVar[str] = "Penn Treebank words, embeddings of four words, SGD"
    architecture: ClassVar[str] = "embeddings"
    optimizer: ClassVar[str] = "sgd"
    steps: ClassVar[int] = 2000
    batch: ClassVar[int] = 64
    lr: ClassVar[float] = 1.6
    context = 4
    probes = 1024

    def model(self) -> nn.Module:
        return WordWindow(self.words, self.context)


TEXT_TASKS: tuple[type[Task], ...] = (
    Language,
    LargeLanguage,
    RecurrentLanguage,
    ConvolutionalLanguage,
    ByteWindows,
    Words,
    RecurrentWords,
    WordWindows,
)


class Weather(Examples):
    """How the temperature at New York's airports changes in the next 3, 6 and 12 hours, from the last 24 hours.

    Of fifteen days three in a row are for the probe and three others to validate.
    """

    name: ClassVar[str] = "weather"
    data: ClassVar[str] = "weather"
    title: ClassVar[str] = "change of the temperature in New York, recurrent cell, Lion"
    architecture: ClassVar[str] = "recurrent"
    optimizer: ClassVar[str] = "lion"
    steps: ClassVar[int] = 600
    batch: ClassVar[int] = 16
    lr: ClassVar[float] = 6e-4
    overfits: ClassVar[bool] = True
    window, ahead = 24, (3, 6, 12)
    block = 3 * 24

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        weather = load(self.data, folder)["weather"]
        hours = np.arange(weather.shape[1])
        now = hours[self.window - 1 : -max(self.ahead)]  # the last hour of every window
        inputs = self._inputs(weather, hours)
        windows = inputs[:, now[:, None] + np.arange(1 - self.window, 1)]  # [airport, window, hour, measurement]
        changes = np.stack([weather[:, now + ahead, 0] - weather[:, now, 0] for ahead in self.ahead], 2)
        part = np.tile(now // self.block % 5, len(weather))
        series = torch.tensor(windows.reshape(-1, *windows.shape[2:]))
        targets = torch.tensor(standard(changes.reshape(-1, len(self.ahead))))
        self.train, self._probe, self._validation = (
            tuple(tensor[torch.tensor(rows)].to(device) for tensor in (series, targets))
            for rows in (~np.isin(part, (0, 2)), part == 0, part == 2)
        )

    @staticmethod
    def _inputs(weather: NDArray[Any], hours: NDArray[Any]) -> NDArray[np.float32]:
        """Return the standardised measurements, with the wind's direction and the time of day on circles."""
        wind = weather[..., 3] * (2 * np.pi / 360)
        day = np.broadcast_to(hours * (2 * np.pi / 24), wind.shape)
        circles = [np.sin(wind), np.cos(wind), np.sin(day), np.cos(day)]
        columns = [*np.moveaxis(np.delete(weather, 3, 2), 2, 0), *circles]
        flat = standard(np.stack(columns, 2).reshape(-1, len(columns))).clip(-5, 5)
        return flat.reshape(*wind.shape, len(columns))

    def model(self) -> nn.Module:
        return Recurrence(self.train[0].shape[2], len(self.ahead))

    def probe(self) -> Batch:
        return tuple(part[:: max(len(part) // self.probes, 1)][: self.probes] for part in self._probe)

    def validation(self) -> Batch:
        return self._validation

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        series, changes = batch
        return F.mse_loss(model(series), changes)


class ConvolvedWeather(Weather):
    """The same changes by convolutions over time."""

    name: ClassVar[str] = "convolved weather"
    title: ClassVar[str] = "change of the temperature in New York, convolutions over time, SGD"
    architecture: ClassVar[str] = "convolution"
    optimizer: ClassVar[str] = "sgd"
    steps: ClassVar[int] = 1000
    batch: ClassVar[int] = 4
    lr: ClassVar[float] = 0.02
    overfits: ClassVar[bool] = False

    def model(self) -> nn.Module:
        return TemporalConvolution(self.train[0].shape[2], len(self.ahead))


SERIES_TASKS: tuple[type[Task], ...] = (Weather, ConvolvedWeather)
