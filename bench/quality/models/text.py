"""Models of text."""

from __future__ import annotations

from torch import Tensor, nn

from bench.quality.models.blocks import Block


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
