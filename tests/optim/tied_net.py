"""A model with everything that savers take for something else."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A model with tied weights, a BatchNorm with buffers, a frozen, an empty and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.hidden(self.embed(tokens))) * self.scale + self.nothing.sum())
        return self.head(hidden)  # type: ignore[no-any-return]
