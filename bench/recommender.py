"""A recommender for whole training steps: embedding tables and dense layers, with the shapes of ``models.tables``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Recommender(nn.Module):
    """Embedding ``tables`` (entries and width of each), followed by ``layers`` dense layers of ``width``.

    Gradients are dense, as ``torch.optim.AdamW`` requires.
    """

    def __init__(self, tables: Sequence[tuple[int, int]], layers: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(entries, columns) for entries, columns in tables)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.width = width

    def forward(self, features: Tensor, clicked: Tensor) -> Tensor:
        """Return the mean logistic loss; ``features`` is [batch, tables], ``clicked`` [batch]."""
        seen = torch.cat([table(column) for table, column in zip(self.tables, features.unbind(1), strict=True)], dim=1)
        # Embeddings are summed in pieces of the layers' width: a mixing layer would be one more parameter.
        padded = F.pad(seen, (0, -seen.shape[1] % self.width))
        x = padded.unflatten(1, (-1, self.width)).sum(1) / self.width**0.5
        for layer in self.layers:
            x = x + F.relu(layer(x)) / len(self.layers)
        return F.binary_cross_entropy_with_logits(x.float().mean(1), clicked)


def clicks(tables: Sequence[tuple[int, int]], batch: int) -> tuple[Tensor, Tensor]:
    """Return random features and clicks."""
    features = torch.stack([torch.randint(entries, (batch,)) for entries, _ in tables], dim=1)
    return features, torch.randint(2, (batch,)).float()
