"""The task of the demo, a byte-level language model of the standard library's source, and one of the examples, digits.

Both use data that comes with Python or scikit-learn, and are small enough for a laptop's CPU.
"""

from __future__ import annotations

import importlib
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

# Inputs, and the class number of every output position.
Batch = tuple[Tensor, Tensor]

SOURCE = Path(sysconfig.get_paths()["stdlib"])


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy in nats."""
    inputs, targets = batch
    logits: Tensor = model(inputs)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class TextTask:
    """Predict the next byte of the Python standard library's top-level modules; every tenth file is held out.

    ``batch`` is for training, a larger one for the controller's ``probe``. ``poor_lr`` is about ten times a good peak
    learning rate for ``steps`` steps. ``missing()`` tells why the task cannot run here and how to fix it.
    """

    title = "next byte of the Python standard library's source, transformer of 137 000 parameters"
    steps = 400
    poor_lr = 0.2
    context = 64
    batch_size = 8
    held_out_windows = 512

    def __init__(self, folder: Path | None = None) -> None:
        files = sorted((folder or SOURCE).glob("*.py"))
        self.train = _bytes_of([file for index, file in enumerate(files) if index % 10])
        self.unseen = _bytes_of(files[::10])

    @staticmethod
    def missing() -> str | None:
        if sum(file.stat().st_size for file in SOURCE.glob("*.py")) > 500_000:
            return None
        return f"the standard library's source is not in {SOURCE}: use a full Python installation"

    def model(self) -> nn.Module:
        return ByteTransformer(width=64, heads=2, layers=2, context=self.context)

    def batch(self, generator: Generator) -> Batch:
        return self._windows(self.train, self.batch_size, generator)

    def probe(self, generator: Generator) -> Batch:
        return self._windows(self.train, 4 * self.batch_size, generator)

    def held_out(self) -> Batch:
        starts = torch.linspace(0, len(self.unseen) - self.context - 1, self.held_out_windows).long()
        return self._cut(self.unseen, starts)

    def _windows(self, text: Tensor, count: int, generator: Generator) -> Batch:
        return self._cut(text, torch.randint(len(text) - self.context, (count,), generator=generator))

    def _cut(self, text: Tensor, starts: Tensor) -> Batch:
        windows = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


class DigitsTask:
    """Classify scikit-learn's 1797 handwritten digits, 8×8 pixels; every fifth is held out."""

    batch_size = 16

    def __init__(self) -> None:
        pixels, labels = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
        inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels).long()
        unseen = torch.arange(len(targets)) % 5 == 0
        self.train, self.unseen = (inputs[~unseen], targets[~unseen]), (inputs[unseen], targets[unseen])

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def batch(self, generator: Generator) -> Batch:
        inputs, targets = self.train
        chosen = torch.randint(len(targets), (self.batch_size,), generator=generator)
        return inputs[chosen], targets[chosen]

    def held_out(self) -> Batch:
        return self.unseen


class ByteTransformer(nn.Module):
    """Language model: bytes [batch, length] → logits of the next byte [batch, length, 256]."""

    def __init__(self, *, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


def _bytes_of(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
