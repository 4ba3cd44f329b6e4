"""Layers that several models have."""

from __future__ import annotations

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
        mixed = self.attend(query, key, value, temperature)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        mlp: Tensor = self.mlp(self.mlp_norm(x))
        return x + mlp

    def attend(self, query: Tensor, key: Tensor, value: Tensor, temperature: Tensor | float) -> Tensor:
        """Return the attention's output; all are [batch, heads, length, width of a head]."""
        length, width = query.shape[-2:]
        scores = query @ key.transpose(-1, -2) / (temperature * width**0.5)
        if self.causal:
            later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        return scores.softmax(-1) @ value


class FusedAttentionBlock(Block):
    """The same block with torch's fused attention."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, temperature: Tensor | float) -> Tensor:
        return F.scaled_dot_product_attention(query / temperature, key, value, is_causal=self.causal)
