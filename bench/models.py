"""Models of the benchmarks: shapes of parameters for optimizer steps, and modules for whole training steps.

``transformer`` and ``GPT2`` have the same shapes, as have ``gated_transformer`` and ``Llama``, and ``tables`` and
``Recommender``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import measure

Shapes = list[tuple[int, ...]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Standard deviation of the gradients: many steps with it stay within the range of fp16.
GRADIENT = 1e-3


def transformer(layers: int, width: int, hidden: int, vocabulary: int, context: int) -> Shapes:
    """Return the shapes of a GPT-2: biases, learned positions, the head tied to the embedding."""
    block: Shapes = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(hidden, width), (hidden,), (width, hidden), (width,)]
    return [(vocabulary, width), (context, width), *(block * layers), (width,), (width,)]


def gated_transformer(layers: int, width: int, hidden: int, vocabulary: int) -> Shapes:
    """Return the shapes of a Llama: no biases, a quarter of the heads for keys and values, an untied head."""
    block: Shapes = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    block += [(hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    return [(vocabulary, width), *(block * layers), (width,), (vocabulary, width)]


def tables() -> Shapes:
    """Return the shapes of a recommender: one large and forty medium embedding tables, 200 small dense layers."""
    return [(2_000_000, 64), *[(50_000, 32)] * 40, *[(512, 512), (512,)] * 200]


def many_small(count: int) -> Shapes:
    """Return ``count`` small shapes, matrices and vectors by turns."""
    return [(32, 32) if index % 2 == 0 else (128 + index % 97,) for index in range(count)]


@dataclass(frozen=True)
class Model:
    """Shapes, with the number of tensors and of parameters in millions that they must have."""

    shapes: Shapes
    tensors: int
    millions: float

    def __post_init__(self) -> None:
        millions = sum(map(prod, self.shapes)) / 1e6
        if len(self.shapes) != self.tensors or round(millions, 1) != self.millions:
            raise ValueError(
                f"the shapes have {len(self.shapes)} tensors and {millions:.1f} M parameters, expected {self.tensors} "
                f"and {self.millions} M"
            )


MODELS: dict[str, dict[str, Model]] = {
    "cuda": {
        "gpt2-124M": Model(transformer(12, 768, 3072, 50304, 1024), 148, 124.5),
        "llama-1.2B": Model(gated_transformer(16, 2048, 8192, 128256), 147, 1498.5),
        "recsys-mix": Model(tables(), 441, 244.5),
        "many-small-10k": Model(many_small(10_000), 10_000, 6.0),
    },
    "cpu": {
        "transformer-5M": Model(transformer(4, 256, 1024, 8192, 256), 52, 5.3),
        "many-small-1k": Model(many_small(1_000), 1_000, 0.6),
    },
}


def is_small(model: str) -> bool:
    """Return whether the model has many tiny tensors, so that host time dominates a step."""
    return model.startswith("many-small")


def parameters(shapes: Shapes, device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    source = torch.Generator(device).manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=source, device=device, dtype=dtype)) for shape in shapes]


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.randn_like(param).mul_(GRADIENT) for param in params]


def set_gradients(params: Sequence[Tensor]) -> None:
    for param, grad in zip(params, gradients(params), strict=True):
        param.grad = grad


class Swap:
    """Callable that moves the gradients to other addresses: one of two sets of tensors, by turns."""

    def __init__(self, params: Sequence[Tensor], device: str) -> None:
        self.params = params
        self.device = device
        self._sets = [gradients(params) for _ in range(2)]

    def __call__(self) -> None:
        self._sets.reverse()
        for param, grad in zip(self.params, self._sets[0], strict=True):
            param.grad = grad
        measure.synchronize(self.device)


class Backward:
    """Callable that runs a backward pass, which puts gradients into new tensors at new addresses.

    The loss is the parameter itself, so that the pass consists of autograd's accumulation alone.
    """

    def __init__(self, params: Sequence[Tensor], device: str) -> None:
        self.params = params
        self.device = device
        self._values = gradients(params)
        self._previous: list[Tensor | None] = []

    def __call__(self) -> None:
        # Kept until the next call: the allocator would reuse their addresses otherwise.
        self._previous = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        torch.autograd.backward(self.params, self._values)
        measure.synchronize(self.device)


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))  # [batch, time, 3, heads, width]
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, hidden: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GPT2Block(width, heads, hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy of the next token; ``tokens`` is [batch, time + 1]."""
        read, wanted = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(read.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(read) + self.positions(places)))
        logits = F.linear(x, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


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


class LlamaBlock(nn.Module):
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
        self.blocks = nn.Sequential(*(LlamaBlock(width, heads, hidden) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy of the next token; ``tokens`` is [batch, time + 1]."""
        logits = self.head(self.norm(self.blocks(self.tokens(tokens[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# Output channels of a bottleneck over its inner channels.
EXPANSION = 4


def convolution(given: int, made: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(given, made, size, stride, size // 2, bias=False), nn.BatchNorm2d(made))


class Bottleneck(nn.Module):
    def __init__(self, given: int, middle: int, stride: int) -> None:
        super().__init__()
        self.reduce = convolution(given, middle, 1)
        self.look = convolution(middle, middle, 3, stride)
        self.expand = convolution(middle, EXPANSION * middle, 1)
        same = stride == 1 and given == EXPANSION * middle
        self.past = nn.Identity() if same else convolution(given, EXPANSION * middle, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        seen = F.relu(self.look(F.relu(self.reduce(x), inplace=True)), inplace=True)
        return F.relu(self.expand(seen) + self.past(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self, blocks: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = convolution(3, width, 7, 2)
        layers: list[nn.Module] = []
        given = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                layers.append(Bottleneck(given, width << stage, stride))
                given = EXPANSION * (width << stage)
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(given, classes)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy; ``images`` is [batch, 3, height, width]."""
        x = F.max_pool2d(F.relu(self.stem(images), inplace=True), 3, 2, 1)
        return F.cross_entropy(self.head(self.blocks(x).mean((2, 3))), labels)


def pictures(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return random images and labels."""
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    return images, torch.randint(classes, (batch,))


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
