"""Tasks on images."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from bench.quality.data import FOLDER, load
from bench.quality.models import (
    Autoencoder,
    ConvolutionalAutoencoder,
    DigitsModel,
    ImageModel,
    PixelModel,
)
from bench.quality.tasks.protocol import Batch, Classes, Task
from bench.quality.transformers import PatchModel


@cache
def fashion(device: torch.device, folder: Path) -> tuple[Batch, Batch]:
    """Return images and classes of Fashion-MNIST, to train and held out; its tasks share the tensors."""
    found = load("images", folder)
    return (
        _images(found["train_images"], found["train_classes"], device),
        _images(found["held_out_images"], found["held_out_classes"], device),
    )


def _images(pixels: NDArray[Any], classes: NDArray[Any], device: torch.device) -> Batch:
    images = (torch.tensor(pixels, device=device).float() / 255 - 0.286) / 0.353
    return images[:, None], torch.tensor(classes, device=device).long()


class Images(Classes):
    """Fashion-MNIST, five passes; the test images are held out."""

    name: ClassVar[str] = "images"
    data: ClassVar[str] = "images"
    title: ClassVar[str] = "Fashion-MNIST, convolutional network"
    architecture: ClassVar[str] = "convolution"
    steps: ClassVar[int] = 1200
    batch: ClassVar[int] = 32
    lr: ClassVar[float] = 0.025

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        self.train, self.unseen = fashion(device, folder)

    def model(self) -> nn.Module:
        return ImageModel()


class BatchNormImages(Images):
    """Batch norms and SGD with momentum, as image models are mostly trained."""

    name: ClassVar[str] = "images, batch norm"
    title: ClassVar[str] = "Fashion-MNIST, convolutions with batch norms, SGD"
    optimizer: ClassVar[str] = "sgd"
    steps: ClassVar[int] = 1000
    lr: ClassVar[float] = 0.12

    def model(self) -> nn.Module:
        return ImageModel(norm="batch")


class NoNormImages(Images):
    """Convolutions without norms: too large a learning rate is not forgiven."""

    name: ClassVar[str] = "images, no norm"
    title: ClassVar[str] = "Fashion-MNIST, convolutions without norms, Adam, 16 replicas"
    optimizer: ClassVar[str] = "adam"
    replicas: ClassVar[int] = 16
    steps: ClassVar[int] = 1500
    batch: ClassVar[int] = 8
    lr: ClassVar[float] = 0.01

    def model(self) -> nn.Module:
        return ImageModel(norm="none")


class Patches(Images):
    """A transformer over patches."""

    name: ClassVar[str] = "patches"
    title: ClassVar[str] = "Fashion-MNIST, transformer over patches"
    architecture: ClassVar[str] = "transformer"
    steps: ClassVar[int] = 1500
    batch: ClassVar[int] = 16
    lr: ClassVar[float] = 4e-3

    def model(self) -> nn.Module:
        return PatchModel()


class NoisyLabels(Images):
    """Three training labels in ten are drawn at random; the held-out ones are right."""

    name: ClassVar[str] = "noisy labels"
    title: ClassVar[str] = "Fashion-MNIST with 30 % random labels, convolutional network"
    noise = 0.3

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        super().__init__(device, folder)
        images, classes = self.train
        generator = Generator().manual_seed(0)
        wrong = torch.rand(len(classes), generator=generator) < self.noise
        other = torch.randint(10, (len(classes),), generator=generator)
        self.train = (images, torch.where(wrong.to(device), other.to(device), classes))


class FewImages(Images):
    """A thousand images, 192 passes: the held-out loss rises again long before the end."""

    name: ClassVar[str] = "few images"
    title: ClassVar[str] = "1000 images of Fashion-MNIST, MLP"
    architecture: ClassVar[str] = "mlp"
    steps: ClassVar[int] = 1500
    batch: ClassVar[int] = 16
    lr: ClassVar[float] = 4.8e-5
    overfits: ClassVar[bool] = True
    kept = 1000

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        super().__init__(device, folder)
        self.train = tuple(part[: self.kept] for part in self.train)

    def model(self) -> nn.Module:
        return PixelModel(256, 256)


class LargeBatches(Images):
    """1024 images a step and few steps."""

    name: ClassVar[str] = "large batches"
    title: ClassVar[str] = "Fashion-MNIST, convolutional network, 300 steps of 1024 images"
    steps: ClassVar[int] = 300
    batch: ClassVar[int] = 128
    lr: ClassVar[float] = 0.057


class SmallBatches(Images):
    """Four images for each of 16 replicas, SGD with momentum."""

    name: ClassVar[str] = "small batches"
    title: ClassVar[str] = "Fashion-MNIST, MLP, SGD, 16 replicas"
    architecture: ClassVar[str] = "mlp"
    optimizer: ClassVar[str] = "sgd"
    replicas: ClassVar[int] = 16
    steps: ClassVar[int] = 2000
    batch: ClassVar[int] = 4
    lr: ClassVar[float] = 0.036

    def model(self) -> nn.Module:
        return PixelModel(128)


class ManySteps(Images):
    """20 000 steps of 32 images, about eleven passes, of a very small model."""

    name: ClassVar[str] = "many steps"
    title: ClassVar[str] = "Fashion-MNIST, small MLP, SGD, 20 000 steps"
    architecture: ClassVar[str] = "mlp"
    optimizer: ClassVar[str] = "sgd"
    steps: ClassVar[int] = 20_000
    batch: ClassVar[int] = 4
    lr: ClassVar[float] = 7.4e-3

    def model(self) -> nn.Module:
        return PixelModel(32)


class Plateau(Images):
    """Three hidden layers of sigmoids: for the first sixth of the run the loss stays at that of guessing."""

    name: ClassVar[str] = "plateau"
    title: ClassVar[str] = "Fashion-MNIST, MLP with sigmoids, SGD"
    architecture: ClassVar[str] = "mlp"
    optimizer: ClassVar[str] = "sgd"
    steps: ClassVar[int] = 1000
    batch: ClassVar[int] = 16
    lr: ClassVar[float] = 0.4

    def model(self) -> nn.Module:
        return PixelModel(64, 64, 64, activation=nn.Sigmoid)


class Digits(Classes):
    """scikit-learn's 1797 digits of 8×8 pixels; two in five are held out, half of those for the probe."""

    name: ClassVar[str] = "digits"
    data: ClassVar[str] = "digits"
    title: ClassVar[str] = "scikit-learn's digits, MLP"
    architecture: ClassVar[str] = "mlp"
    steps: ClassVar[int] = 300
    batch: ClassVar[int] = 16
    lr: ClassVar[float] = 0.03

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
    lr: ClassVar[float] = 9.5e-3

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        super().__init__(device, folder)
        self.train, self.unseen = self.train[:1], self.unseen[:1]

    def model(self) -> nn.Module:
        return Autoencoder()

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        (images,) = batch
        return F.mse_loss(model(images), images)


class ConvolutionalReconstruction(Reconstruction):
    """An autoencoder by convolutions with a code of 32 numbers."""

    name: ClassVar[str] = "convolutional reconstruction"
    title: ClassVar[str] = "Fashion-MNIST, convolutional autoencoder, Adam, squared error"
    optimizer: ClassVar[str] = "adam"
    steps: ClassVar[int] = 800
    lr: ClassVar[float] = 0.026

    def model(self) -> nn.Module:
        return ConvolutionalAutoencoder()


IMAGE_TASKS: tuple[type[Task], ...] = (
    Images,
    Digits,
    FewDigits,
    Reconstruction,
    BatchNormImages,
    NoNormImages,
    Patches,
    NoisyLabels,
    FewImages,
    LargeBatches,
    SmallBatches,
    ManySteps,
    Plateau,
    ConvolutionalReconstruction,
)
