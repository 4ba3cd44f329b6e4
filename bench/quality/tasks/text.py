"""Tasks on text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from bench.quality.data import FOLDER, load, missing
from bench.quality.models.text import ByteModel
from bench.quality.tasks.protocol import Batch, Defaults, Task, no_decay


class Language(Defaults):
    """The next byte of English documentation or, without it, of the standard library's source; whole files are held
    out."""

    name: ClassVar[str] = "language"
    data: ClassVar[str] = "language"
    title: ClassVar[str] = "documentation of Linux 6.1, byte-level transformer"
    architecture: ClassVar[str] = "transformer"
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
        return no_decay(name) or ("transformer" if name.startswith("blocks") else "dense")


TEXT_TASKS: tuple[type[Task], ...] = (Language,)
