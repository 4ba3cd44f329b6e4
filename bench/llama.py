"""A small implementation of Llama for whole training steps, with the shapes of ``models.gated_transformer``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Query heads that share one key and one value head.
SHARED = 4


def rotate(x: Tensor) -> Tensor:
    """Apply rotary position embeddings; ``x`` is [batch, heads, time, width]."""
    half = x.shape[-1] // 2
    speeds = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * speeds
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width // SHARED, bias=False)
        self.value = nn.Linear(width, width // SHARED, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.before_mlp = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        read = self.before_attention(x)
        query = rotate(self._split(self.query(read), self.heads))
        key = rotate(self._split(self.key(read), self.heads // SHARED))
        value = self._split(self.value(read), self.heads // SHARED)
        key, value = (shared.repeat_interleave(SHARED, dim=1) for shared in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(-2))
        read = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(read)) * self.up(read))

    @staticmethod
    def _split(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # [batch, heads, time, width]


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads, hidden) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy of the next token; ``tokens`` is [batch, time + 1]."""
        logits = self.head(self.norm(self.blocks(self.tokens(tokens[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
