"""Tasks on time series."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bench.quality.data import FOLDER, load
from bench.quality.models.series import Recurrence, TemporalConvolution
from bench.quality.tasks.protocol import Batch, Examples, Task
from bench.quality.tasks.tables import standard


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

    def model(self) -> nn.Module:
        return TemporalConvolution(self.train[0].shape[2], len(self.ahead))


SERIES_TASKS: tuple[type[Task], ...] = (Weather, ConvolvedWeather)
