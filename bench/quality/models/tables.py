"""Models of tables: categories with embeddings, and numbers.

The models of one joint table expect categories that are numbered through all fields, so that one lookup serves all.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from bench.quality.models.blocks import Block


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


class TableMLP(nn.Module):
    """Categories [batch, fields] of one joint table and numbers [batch, numbers] → [batch]: embeddings and an MLP."""

    def __init__(
        self, count: int, fields: int, numbers: int, width: int = 8, hidden: tuple[int, ...] = (128, 64)
    ) -> None:
        super().__init__()
        self.tables = nn.Embedding(count, width)
        nn.init.normal_(self.tables.weight, std=0.1)
        layers: list[nn.Module] = []
        for before, after in pairwise((fields * width + numbers, *hidden)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(hidden[-1], 1))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        values: Tensor = self.network(torch.cat([self.tables(categories).flatten(1), numbers], 1))
        return values[:, 0]


class WideModel(nn.Module):
    """Categories [batch, fields] of one joint table and numbers [batch, numbers] → [batch]: one weight for each."""

    def __init__(self, count: int, numbers: int) -> None:
        super().__init__()
        self.tables = nn.Embedding(count, 1)
        nn.init.zeros_(self.tables.weight)
        self.linear = nn.Linear(numbers, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        values: Tensor = self.tables(categories).sum(1) + self.linear(numbers)
        return values[:, 0]


class ResidualModel(nn.Module):
    """Categories [batch, fields] and numbers [batch, numbers] → [batch]: embeddings and pre-norm residual layers."""

    def __init__(self, count: int, fields: int, numbers: int, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.tables = nn.Embedding(count, 8)
        self.into = nn.Linear(8 * fields + numbers, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        x = self.into(torch.cat([self.tables(categories).flatten(1), numbers], 1))
        for layer in self.layers:
            x = x + layer(x)
        values: Tensor = self.head(self.norm(x))
        return values[:, 0]


class ColumnTransformer(nn.Module):
    """Categories [batch, fields] and numbers [batch, numbers] → [batch]: attention over the columns of a table.

    Every column is a token, as in FT-Transformer: the embedding of a category, or a vector that is scaled by a number.
    The tokens' mean goes into the head.
    """

    def __init__(self, count: int, numbers: int, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.tables = nn.Embedding(count, width)
        self.scales = nn.Parameter(torch.randn(numbers, width) / width**0.5)
        self.shifts = nn.Parameter(torch.randn(numbers, width) / width**0.5)
        self.blocks = nn.ModuleList(Block(width, 4, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        x = torch.cat([self.tables(categories), numbers[:, :, None] * self.scales + self.shifts], 1)
        for block in self.blocks:
            x = block(x)
        values: Tensor = self.head(self.norm(x).mean(1))
        return values[:, 0]


class TinyMLP(nn.Module):
    """Numbers [batch, numbers] → [batch]: two layers of sixteen."""

    def __init__(self, numbers: int, width: int = 16) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(numbers, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, numbers: Tensor) -> Tensor:
        values: Tensor = self.network(numbers)
        return values[:, 0]
