"""Models of text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.quality.models.blocks import Block, FusedAttentionBlock


class ByteModel(nn.Module):
    """Bytes [batch, length] → logits of the next byte [batch, length, 256]."""

    def __init__(self, *, width: int, heads: int, layers: int, context: int, block: type[Block] = Block) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(block(width, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x, temperature)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ByteConvolutions(nn.Module):
    """Bytes [batch, length] → logits of the next byte [batch, length, 256]: causal, ever more dilated convolutions."""

    def __init__(self, width: int = 96, layers: int = 5) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**layer) for layer in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text).transpose(1, 2)
        for layer, convolution in enumerate(self.convolutions):
            x = x + F.relu(convolution(F.pad(x, (2**layer, 0))))
        logits: Tensor = self.head(x.transpose(1, 2))
        return logits


class ByteWindow(nn.Module):
    """The last bytes [batch, length] → logits of the next byte [batch, 256]: embeddings and an MLP."""

    def __init__(self, context: int, width: int = 32, hidden: int = 256) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.network = nn.Sequential(
            nn.Linear(context * width, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 256),
        )  # fmt: skip

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.network(self.bytes(text).flatten(1))
        return logits


class WordModel(nn.Module):
    """Words [batch, length] → logits of the next word [batch, length, words]: a transformer with tied embeddings."""

    def __init__(self, words: int, *, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=0.05)
        self.positions = nn.Embedding(context, width)
        nn.init.normal_(self.positions.weight, std=0.05)
        self.blocks = nn.ModuleList(FusedAttentionBlock(width, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


class WordWindow(nn.Module):
    """The last words [batch, length] → logits of the next word [batch, words]: embeddings and one hidden layer."""

    def __init__(self, words: int, context: int, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=0.5)
        self.hidden = nn.Linear(context * width, hidden)
        self.head = nn.Linear(hidden, words)

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.hidden(self.words(text).flatten(1))))
        return logits
