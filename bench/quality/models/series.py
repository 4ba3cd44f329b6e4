"""Models of time series."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Recurrence(nn.Module):
    """Series [batch, length, measurements] → [batch, outputs]: a recurrent cell without gates, written out.

    Two hours x make one step from the state h to tanh(W·x + U·h), so that 24 hours are twelve steps.
    U starts orthogonal.
    """

    def __init__(self, measurements: int, outputs: int, width: int = 64) -> None:
        super().__init__()
        self.into = nn.Linear(2 * measurements, width)
        self.again = nn.Linear(width, width, bias=False)
        nn.init.orthogonal_(self.again.weight)
        self.head = nn.Linear(width, outputs)

    def forward(self, series: Tensor) -> Tensor:
        batch, length, measurements = series.shape
        inputs = self.into(series.reshape(batch, length // 2, 2 * measurements))
        state = torch.zeros_like(inputs[:, 0])
        for x in inputs.unbind(1):
            state = torch.tanh(x + self.again(state))
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
