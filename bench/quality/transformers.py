"""Transformers of the tasks: blocks of several kinds, and models for text, images and tables made of them."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block on [batch, length, width]; ``temperature`` divides the attention scores.

    Blocks of other kinds have other norms, no biases, another feed-forward network, or positions of their own: where
    ``rotary`` holds, a model adds none to its embeddings.
    """

    norm: ClassVar[type[nn.Module]] = nn.LayerNorm
    first_norm: ClassVar[type[nn.Module]] = nn.Identity  # of the embeddings
    last_norm: ClassVar[type[nn.Module]] = nn.LayerNorm  # after the last block
    bias: ClassVar[bool] = True
    rotary: ClassVar[bool] = False

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm = self.norm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=self.bias)
        self.out = nn.Linear(width, width, bias=self.bias)
        self.mlp_norm = self.norm(width)
        self.mlp = self.feed_forward(width)

    @staticmethod
    def feed_forward(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        x = x + self.attention(self.attention_norm(x), temperature)
        mlp: Tensor = self.mlp(self.mlp_norm(x))
        return x + mlp

    def attention(self, x: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = self.attend(query, key, value, temperature)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out

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


class PostNormBlock(FusedAttentionBlock):
    """A block as in the first transformer and in BERT: the norms follow the sums."""

    first_norm: ClassVar[type[nn.Module]] = nn.LayerNorm
    last_norm: ClassVar[type[nn.Module]] = nn.Identity

    def forward(self, x: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        x = self.attention_norm(x + self.attention(x, temperature))
        after: Tensor = self.mlp_norm(x + self.mlp(x))
        return after


class GatedFeedForward(nn.Module):
    """SwiGLU: silu(W·x) · (V·x), then a third matrix; together as large as two of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 8 * width // 24 * 8
        self.gate_and_value = nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate_and_value(x).chunk(2, -1)
        out: Tensor = self.out(F.silu(gate) * value)
        return out


class LlamaBlock(FusedAttentionBlock):
    """A block as in Llama: RMS norms, rotary positions, a gated feed-forward network and no biases."""

    norm: ClassVar[type[nn.Module]] = nn.RMSNorm
    last_norm: ClassVar[type[nn.Module]] = nn.RMSNorm
    bias: ClassVar[bool] = False
    rotary: ClassVar[bool] = True

    @staticmethod
    def feed_forward(width: int) -> nn.Module:
        return GatedFeedForward(width)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, temperature: Tensor | float) -> Tensor:
        return super().attend(rotated(query), rotated(key), value, temperature)


def rotated(x: Tensor) -> Tensor:
    """Turn each pair of the last dimension of [..., length, width] by an angle that grows with the position."""
    length, width = x.shape[-2:]
    speeds = 10_000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.arange(length, device=x.device)[:, None] * speeds
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class PatchModel(nn.Module):
    """Images [batch, 1, 28, 28] → logits of ten classes: a transformer over square patches."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 3, pixels: int = 7) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, pixels, stride=pixels)
        self.positions = nn.Embedding((28 // pixels) ** 2, width)
        self.blocks = nn.ModuleList(FusedAttentionBlock(width, heads, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


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


class LanguageModel(nn.Module):
    """Symbols [batch, length] → logits of the next symbol [batch, length, symbols].

    Weights are initialised with the deviation of GPT-2, 0.02 at its width of 768, over the root of the width.

    Args:
        symbols: Number of different symbols.
        width, heads, layers: Size of the transformer.
        context: The most symbols of a text.
        block: Kind of its blocks.
        tied: Whether the head's weights are those of the embedding.
        causal: Whether a symbol attends to those before it only.
    """

    def __init__(
        self,
        symbols: int,
        *,
        width: int,
        heads: int,
        layers: int,
        context: int,
        block: type[Block],
        tied: bool,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(symbols, width)
        self.positions = None if block.rotary else nn.Embedding(context, width)
        self.first_norm = block.first_norm(width)
        self.blocks = nn.ModuleList(block(width, heads, causal=causal) for _ in range(layers))
        self.norm = block.last_norm(width)
        self.head = None if tied else nn.Linear(width, symbols, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02 * (768 / width) ** 0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, text: Tensor) -> Tensor:
        return self.logits(self.hidden(text))

    def hidden(self, text: Tensor) -> Tensor:
        """Return what the blocks make of a text: [batch, length, width]."""
        x: Tensor = self.words(text)
        if self.positions is not None:
            x = x + self.positions.weight[: text.shape[1]]
        x = self.first_norm(x)
        for block in self.blocks:
            x = block(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        weight = self.words.weight if self.head is None else self.head.weight
        return F.linear(self.norm(x), weight)


class MaskedModel(LanguageModel):
    """Symbols [batch, length] and places [batch, count] → logits of the symbols there [batch, count, symbols + 1].

    A BERT of post-norm blocks with tied embeddings. One more symbol stands for a hidden one.
    """

    def __init__(self, symbols: int, *, width: int, heads: int, layers: int, context: int) -> None:
        shape = {"width": width, "heads": heads, "layers": layers, "context": context}
        super().__init__(symbols + 1, **shape, block=PostNormBlock, tied=True, causal=False)

    def forward(self, text: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
        x = self.hidden(text)
        return self.logits(x.gather(1, places[..., None].expand(-1, -1, x.shape[-1])))


class ColumnTransformer(nn.Module):
    """Categories [batch, fields] and numbers [batch, numbers] → [batch]: attention over the columns of a table.

    Every column is a token, as in FT-Transformer: the embedding of a category, or a vector that is scaled by a number.
    The tokens' mean goes into the head.
    """

    def __init__(self, count: int, numbers: int, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tables = nn.Embedding(count, width)
        self.scales = nn.Parameter(torch.randn(numbers, width) / width**0.5)
        self.shifts = nn.Parameter(torch.randn(numbers, width) / width**0.5)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        x = torch.cat([self.tables(categories), numbers[:, :, None] * self.scales + self.shifts], 1)
        for block in self.blocks:
            x = block(x)
        values: Tensor = self.head(self.norm(x).mean(1))
        return values[:, 0]
