"""Models of images."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ImageModel(nn.Module):
    """Images [batch, 1, 28, 28] → logits of ten classes: three convolutions with group norms, and a linear layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for channels in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(before, channels, 3, stride=2, padding=1), nn.GroupNorm(4, channels), nn.ReLU()]
            before = channels
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(4 * width * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).flatten(1))
        return logits


class DigitsModel(nn.Module):
    """Pixels [batch, 64] → logits of ten classes; ``dropout`` is a probability, a tensor where it is explored."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, pixels: Tensor, dropout: Tensor | float = 0.0) -> Tensor:
        hidden = F.relu(self.first(pixels))
        if not isinstance(dropout, float) or dropout > 0:
            keep = (torch.rand_like(hidden) >= dropout) / (1 - dropout)
            hidden = hidden * keep
        logits: Tensor = self.head(F.relu(self.second(hidden)))
        return logits


class Autoencoder(nn.Module):
    """Autoencoder of images [batch, 1, 28, 28] with a code of sixteen numbers."""

    def __init__(self, widths: tuple[int, ...] = (784, 256, 64, 16, 64, 256, 784)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.SiLU()]
        self.network = nn.Sequential(*layers[:-1])

    def forward(self, images: Tensor) -> Tensor:
        shown: Tensor = self.network(images.flatten(1))
        return shown.view_as(images)
