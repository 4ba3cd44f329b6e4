"""Models that score items: films for a user, documents for a query."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Towers(nn.Module):
    """Users [batch, fields] and films [batch, list] with genres [batch, list, genres] → scores [batch, list].

    The tower of the users and the tower of the films end in one vector each; the score is their product.
    """

    def __init__(self, users: int, fields: int, films: int, genres: int, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList((nn.Embedding(users, width), nn.Embedding(films, width)))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)  # type: ignore[arg-type]
        self.user = nn.Sequential(nn.Linear(fields * width, 64), nn.ReLU(), nn.Linear(64, width))
        self.film = nn.Sequential(nn.Linear(width + genres, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, users: Tensor, films: Tensor, genres: Tensor) -> Tensor:
        user = self.user(self.tables[0](users).flatten(1))
        film = self.film(torch.cat([self.tables[1](films), genres], 2))
        scores: Tensor = (film * user[:, None]).sum(2)
        return scores


class Factors(nn.Module):
    """Users [batch] and films [batch] → [batch]: the product of two vectors and a bias of each."""

    def __init__(self, users: int, films: int, width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList((nn.Embedding(users, width + 1), nn.Embedding(films, width + 1)))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)  # type: ignore[arg-type]

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        user, film = self.tables[0](users), self.tables[1](films)
        values: Tensor = (user[:, 1:] * film[:, 1:]).sum(1) + user[:, 0] + film[:, 0]
        return values


class DocumentModel(nn.Module):
    """Features [batch, list, features] → scores [batch, list]: an MLP for every document."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(features, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.network(features)
        return scores[:, :, 0]
