"""Models of the tasks, small enough that a run takes seconds on a GPU."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block on [batch, length, width]; ``temperature`` divides the attention scores."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / (temperature * (width // self.heads) ** 0.5)
        if self.causal:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        mixed = scores.softmax(-1) @ value
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        mlp: Tensor = self.mlp(self.mlp_norm(x))
        return x + mlp


class ByteModel(nn.Module):
    """Bytes [batch, length] → logits of the next byte [batch, length, 256]."""

    def __init__(self, *, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x, temperature)
        logits: Tensor = self.head(self.norm(x))
        return logits


class RatingsModel(nn.Module):
    """A DLRM with one attention block over its fields: categories [batch, fields] and dense features [batch, dense] →
    logits [batch, 7]: liked, loved, and five classes of stars.

    Every category has an embedding, the dense features a small network; the products of all pairs of the resulting
    vectors go, with the dense vector, into the network of the heads.
    """

    def __init__(self, sizes: list[int], dense: int, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.05)  # type: ignore[arg-type]
        self.bottom = nn.Sequential(nn.Linear(dense, 64), nn.ReLU(), nn.Linear(64, width))
        self.block = Block(width, 2, causal=False)
        fields = len(sizes) + 1
        self.register_buffer("pairs", torch.triu_indices(fields, fields, 1), persistent=False)
        self.top = nn.Sequential(
            nn.Linear(width + fields * (fields - 1) // 2, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()
        )
        self.heads = nn.ModuleList((nn.Linear(64, 1), nn.Linear(64, 1), nn.Linear(64, 5)))

    def forward(self, categories: Tensor, dense: Tensor) -> Tensor:
        from_dense = self.bottom(dense)
        vectors = torch.stack([*(table(categories[:, i]) for i, table in enumerate(self.tables)), from_dense], 1)
        vectors = self.block(vectors)
        first, second = self.pairs  # type: ignore[misc]
        products = (vectors[:, first] * vectors[:, second]).sum(-1)
        hidden = self.top(torch.cat([from_dense, products], 1))
        return torch.cat([head(hidden) for head in self.heads], 1)


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


class FlightsModel(nn.Module):
    """Categories [batch, fields] and numbers [batch, numbers] → [batch]: embeddings and a tanh network."""

    def __init__(self, sizes: list[int], numbers: int, width: int = 16, hidden: int = 128) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.network = nn.Sequential(
            nn.Linear(width * len(sizes) + numbers, hidden), nn.Tanh(),
            nn.Linear(hidden, hidden), nn.Tanh(),
            nn.Linear(hidden, 1),
        )  # fmt: skip

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        embedded = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        values: Tensor = self.network(torch.cat([*embedded, numbers], 1))
        return values[:, 0]


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
