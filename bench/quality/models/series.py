"""Models of time series."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GatedRecurrence(nn.Module):
    """Series [batch, length, measurements] → [batch, outputs]: a gated recurrent unit, written out.

    Two hours make one step, so that 24 hours are twelve steps.
    """

    def __init__(self, measurements: int, outputs: int, width: int = 48) -> None:
        super().__init__()
        self.width = width
        self.into = nn.Linear(2 * measurements, 3 * width)
        self.again = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, outputs)

    def forward(self, series: Tensor) -> Tensor:
        batch, length, measurements = series.shape
        inputs = self.into(series.reshape(batch, length // 2, 2 * measurements))
        state = torch.zeros_like(inputs[:, 0, : self.width])
        for step in range(length // 2):
            update, reset, new = inputs[:, step].chunk(3, 1)
            update_again, reset_again, new_again = self.again(state).chunk(3, 1)
            keep = torch.sigmoid(update + update_again)
            candidate = torch.tanh(new + torch.sigmoid(reset + reset_again) * new_again)
            state = keep * state + (1 - keep) * candidate
        values: Tensor = self.head(state)
        return values


class TemporalConvolution(nn.Module):
    """Series [batch, length, measurements] → [batch, outputs]: three convolutions over time with growing dilation.

    The features of the last four hours go into the head.
    """

    def __init__(self, measurements: int, outputs: int, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = measurements
        for dilation in (1, 2, 4):
            layers += [nn.Conv1d(before, width, 3, padding=dilation, dilation=dilation), nn.ReLU()]
            before = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(4 * width, outputs)

    def forward(self, series: Tensor) -> Tensor:
        values: Tensor = self.head(self.features(series.transpose(1, 2))[:, :, -4:].flatten(1))
        return values
