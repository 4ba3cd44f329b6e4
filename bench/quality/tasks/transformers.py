"""Transformers as they are used today: GPT, Llama, BERT, of images, of films in their order and of columns.

Together they have norms before and after the sums, tied and untied embeddings, bfloat16 and float32, clipped gradients
or none, and short and long warm-ups. The transformers of the other files came before them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from bench.quality.data import FOLDER, load
from bench.quality.tasks.images import Images
from bench.quality.tasks.protocol import Batch, Task, in_bfloat16
from bench.quality.tasks.sequences import Language, Words
from bench.quality.tasks.tables import FlightsResidual
from bench.quality.transformers import (
    ColumnTransformer,
    FusedAttentionBlock,
    LanguageModel,
    LlamaBlock,
    MaskedModel,
    PatchModel,
    PostNormBlock,
)


class Llama(Language):
    """A small Llama: RMS norms, rotary positions, SwiGLU, no biases, and no clipping, so that it forgives little."""

    name: ClassVar[str] = "llama"
    title: ClassVar[str] = "documentation of Linux 6.1, Llama of 0.8 M parameters, bfloat16, AdamW with β₂ 0.95"
    optimizer: ClassVar[str] = "adamw, 0.95"
    replicas: ClassVar[int] = 4
    steps: ClassVar[int] = 600
    lr: ClassVar[float] = 6e-3
    shape: ClassVar[dict[str, int]] = {"width": 128, "heads": 4, "layers": 4}
    context = 128
    loss = staticmethod(in_bfloat16(Language.loss))

    def model(self) -> nn.Module:
        return LanguageModel(256, **self.shape, context=self.context, block=LlamaBlock, tied=False)


class LargeLlama(Llama):
    """A Llama of 19 million parameters, with clipped gradients and a short warm-up."""

    name: ClassVar[str] = "large llama"
    title: ClassVar[str] = "documentation of Linux 6.1, Llama of 19 M parameters, bfloat16, clipped, 2 replicas"
    replicas: ClassVar[int] = 2
    steps: ClassVar[int] = 1000
    lr: ClassVar[float] = 4e-4
    shape: ClassVar[dict[str, int]] = {"width": 512, "heads": 8, "layers": 6}
    clip: ClassVar[float | None] = 1.0
    warm_up: ClassVar[float] = 0.05


class GPT(Llama):
    """A GPT-2 of 4.8 million parameters: tied embeddings, clipped gradients and a short warm-up."""

    name: ClassVar[str] = "gpt"
    title: ClassVar[str] = (
        "documentation of Linux 6.1, GPT-2 of 4.8 M parameters, bfloat16, clipped, AdamW with β₂ 0.95"
    )
    steps: ClassVar[int] = 1500
    batch: ClassVar[int] = 4
    lr: ClassVar[float] = 1.5e-3
    shape: ClassVar[dict[str, int]] = {"width": 256, "heads": 8, "layers": 6}
    clip: ClassVar[float | None] = 1.0
    warm_up: ClassVar[float] = 0.05

    def model(self) -> nn.Module:
        return LanguageModel(256, **self.shape, context=self.context, block=FusedAttentionBlock, tied=True)


class PostNormLanguage(Language):
    """Norms after the sums, as in the first transformer, with its Adam and a long warm-up."""

    name: ClassVar[str] = "post-norm language"
    title: ClassVar[str] = "documentation of Linux 6.1, post-norm transformer, Adam"
    optimizer: ClassVar[str] = "adam"
    steps: ClassVar[int] = 1000
    batch: ClassVar[int] = 4
    lr: ClassVar[float] = 3e-3
    shape: ClassVar[dict[str, int]] = {"width": 128, "heads": 4, "layers": 4}
    context = 128

    def model(self) -> nn.Module:
        return LanguageModel(256, **self.shape, context=self.context, block=PostNormBlock, tied=False)


class LlamaWords(Words):
    """A Llama of words with tied embeddings, clipped gradients and a short warm-up."""

    name: ClassVar[str] = "llama words"
    title: ClassVar[str] = "Penn Treebank words, Llama with tied embeddings, bfloat16, clipped, AdamW with β₂ 0.95"
    optimizer: ClassVar[str] = "adamw, 0.95"
    steps: ClassVar[int] = 600
    batch: ClassVar[int] = 8
    lr: ClassVar[float] = 3e-3
    shape: ClassVar[dict[str, int]] = {"width": 128, "heads": 4, "layers": 3}
    clip: ClassVar[float | None] = 1.0
    warm_up: ClassVar[float] = 0.05
    loss = staticmethod(in_bfloat16(Words.loss))

    def model(self) -> nn.Module:
        return LanguageModel(self.words, **self.shape, context=self.context, block=LlamaBlock, tied=True)


class MaskedLanguage(Language):
    """Ten hidden bytes of 64, by a small BERT."""

    name: ClassVar[str] = "masked language"
    title: ClassVar[str] = "documentation of Linux 6.1, hidden bytes, post-norm BERT"
    steps: ClassVar[int] = 1500
    lr: ClassVar[float] = 1e-3
    shape: ClassVar[dict[str, int]] = {"width": 128, "heads": 4, "layers": 4}
    warm_up: ClassVar[float] = 0.1
    hidden = 10

    def model(self) -> nn.Module:
        return MaskedModel(256, **self.shape, context=self.context)

    def draw(self, count: int, generator: Generator) -> Batch:
        return self._hide(super().draw(count, generator)[0], generator)

    def _spread(self, text: Tensor, count: int) -> Batch:
        return self._hide(super()._spread(text, count)[0], Generator(text.device).manual_seed(0))

    def _hide(self, text: Tensor, generator: Generator) -> Batch:
        """Return texts with hidden bytes, their places, and the bytes."""
        places = torch.rand(text.shape, generator=generator, device=text.device).topk(self.hidden).indices
        return text.scatter(1, places, 256), places, text.gather(1, places)

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        text, places, hidden = batch
        return F.cross_entropy(model(text, places).flatten(0, -2), hidden.flatten())


class FilmSequences(Words):
    """The next film that a user of MovieLens-1M rates, users one after the other; a fifth of the users is held out."""

    name: ClassVar[str] = "film sequences"
    data: ClassVar[str] = "ratings"
    title: ClassVar[str] = "MovieLens-1M, the next film of a user, transformer with tied embeddings"
    steps: ClassVar[int] = 1000
    batch: ClassVar[int] = 8
    lr: ClassVar[float] = 2e-3
    shape: ClassVar[dict[str, int]] = {"width": 128, "heads": 2, "layers": 2}
    warm_up: ClassVar[float] = 0.05

    def __init__(self, device: torch.device, folder: Path = FOLDER) -> None:
        found = load(self.data, folder)
        order = np.lexsort((found["time"], found["user"]))
        films = torch.tensor(found["film"][order].astype(np.int16), device=device)
        unseen = torch.tensor(found["user"][order] % 5 == 0, device=device)
        self.train, self.unseen, self.words = films[~unseen], films[unseen], len(found["year"])

    def model(self) -> nn.Module:
        return LanguageModel(self.words, **self.shape, context=self.context, block=FusedAttentionBlock, tied=True)


class VisionTransformer(Images):
    """49 patches of 4×4 pixels and six layers."""

    name: ClassVar[str] = "vision transformer"
    title: ClassVar[str] = "Fashion-MNIST, vision transformer of 1.2 M parameters, bfloat16, clipped"
    architecture: ClassVar[str] = "transformer"
    batch: ClassVar[int] = 8
    lr: ClassVar[float] = 1e-3
    shape: ClassVar[dict[str, int]] = {"width": 128, "heads": 4, "layers": 6}
    clip: ClassVar[float | None] = 1.0
    loss = staticmethod(in_bfloat16(Images.loss))

    def model(self) -> nn.Module:
        return PatchModel(**self.shape, pixels=4)


class FlightColumns(FlightsResidual):
    """Attention over the columns of the flights."""

    name: ClassVar[str] = "flight columns"
    title: ClassVar[str] = "delays of flights from New York, transformer over the columns, squared error"
    architecture: ClassVar[str] = "transformer"
    optimizer: ClassVar[str] = "adamw"
    steps: ClassVar[int] = 1000
    lr: ClassVar[float] = 4e-3
    shape: ClassVar[dict[str, int]] = {"width": 128, "heads": 4, "layers": 3}

    def model(self) -> nn.Module:
        return ColumnTransformer(sum(self.sizes), self.train[1].shape[1], **self.shape)


TRANSFORMER_TASKS: tuple[type[Task], ...] = (
    Llama,
    LargeLlama,
    GPT,
    PostNormLanguage,
    LlamaWords,
    MaskedLanguage,
    FilmSequences,
    VisionTransformer,
    FlightColumns,
)
