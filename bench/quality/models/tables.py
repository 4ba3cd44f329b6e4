"""Models of tables: categories with embeddings, and numbers."""

from __future__ import annotations

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
