"""Tasks on images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from bench.quality.data import FOLDER, load
from bench.quality.models.images import Autoencoder, DigitsModel, ImageModel
from bench.quality.tasks.protocol import Batch, Classes, Task


class Images(Classes):
    """Fashion-MNIST, five passes; the test images are held out."""

    name: ClassVar[str] = "images"
    data: ClassVar[str] = "images"
    title: ClassVar[str] = "Fashion-MNIST, convolutional network"
    architecture: ClassVar[str] = "convolution"
    steps: ClassVar[int] = 1200
    batch: ClassVar[int] = 32
    lr: ClassVar[float] = 4e-3

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data, folder)
        self.train = _images(found["train_images"], found["train_classes"], device)
        self.unseen = _images(found["held_out_images"], found["held_out_classes"], device)

    def model(self) -> nn.Module:
        return ImageModel()


class Digits(Classes):
    """scikit-learn's 1797 digits of 8×8 pixels; two in five are held out, half of those for the probe."""

    name: ClassVar[str] = "digits"
    data: ClassVar[str] = "digits"
    title: ClassVar[str] = "scikit-learn's digits, MLP"
    architecture: ClassVar[str] = "mlp"
    steps: ClassVar[int] = 300
    batch: ClassVar[int] = 16
    lr: ClassVar[float] = 4e-3

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data, folder)
        pixels, classes = torch.tensor(found["pixels"] / 16), torch.tensor(found["classes"])
        self.divide(torch.arange(len(classes)) % 5 < 2, device, pixels, classes)

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


class Reconstruction(Images):
    """Autoencoder of Fashion-MNIST with a code of sixteen numbers."""

    name: ClassVar[str] = "reconstruction"
    title: ClassVar[str] = "Fashion-MNIST, autoencoder, squared error"
    architecture: ClassVar[str] = "autoencoder"

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        super().__init__(device, folder)
        self.train, self.unseen = self.train[:1], self.unseen[:1]

    def model(self) -> nn.Module:
        return Autoencoder()

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        (images,) = batch
        return F.mse_loss(model(images), images)


def _images(pixels: NDArray[Any], classes: NDArray[Any], device: torch.device) -> Batch:
    images = (torch.tensor(pixels, device=device).float() / 255 - 0.286) / 0.353
    return images[:, None], torch.tensor(classes, device=device).long()


IMAGE_TASKS: tuple[type[Task], ...] = (Images, Digits, FewDigits, Reconstruction)
