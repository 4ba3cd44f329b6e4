"""Models of images."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.quality.models.blocks import FusedAttentionBlock

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(4, channels),
    "none": lambda channels: nn.Identity(),
}


class ImageModel(nn.Module):
    """Images [batch, 1, 28, 28] → logits of ten classes: three convolutions, norms or none, and a linear layer."""

    def __init__(self, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for channels in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(before, channels, 3, stride=2, padding=1), NORMS[norm](channels), nn.ReLU()]
            before = channels
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(4 * width * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).flatten(1))
        return logits


class PatchModel(nn.Module):
    """Images [batch, 1, 28, 28] → logits of ten classes: a transformer over 16 patches of 7×7 pixels."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, stride=7)
        self.positions = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(FusedAttentionBlock(width, heads, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


class PixelModel(nn.Module):
    """Images [batch, 1, 28, 28] → logits of ten classes: an MLP of the pixels."""

    def __init__(self, *hidden: int, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise((28 * 28, *hidden, 10)):
            layers += [nn.Linear(before, after), activation()]
        self.network = nn.Sequential(*layers[:-1])

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images.flatten(1))
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


class ConvolutionalAutoencoder(nn.Module):
    """Autoencoder of images [batch, 1, 28, 28] by convolutions, with a code of ``code`` numbers."""

    def __init__(self, width: int = 16, code: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GELU(),
            nn.Flatten(),
            nn.Linear(2 * width * 49, code),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(code, 2 * width * 49), nn.GELU(),
            nn.Unflatten(1, (2 * width, 7, 7)),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.GELU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        shown: Tensor = self.decoder(self.encoder(images))
        return shown
