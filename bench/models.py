"""The models whose optimizer step is measured: the shapes of their parameters, and tensors of these shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import measure
import torch
from torch import Tensor, nn

Shapes = list[tuple[int, ...]]

#: By the name that a case has for it.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Gradients of about this size: neither zero nor so large that a long run of steps leaves the range of fp16 or bf16.
GRADIENT = 1e-3


def transformer(layers: int, width: int, hidden: int, vocabulary: int, context: int) -> Shapes:
    """GPT-2: biases everywhere, learned positions, the head tied to the embedding."""
    block: Shapes = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(hidden, width), (hidden,), (width, hidden), (width,)]
    return [(vocabulary, width), (context, width), *(block * layers), (width,), (width,)]


def gated_transformer(layers: int, width: int, hidden: int, vocabulary: int) -> Shapes:
    """Llama: no biases, a quarter as many heads for keys and values, a head of its own."""
    block: Shapes = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    block += [(hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    return [(vocabulary, width), *(block * layers), (width,), (vocabulary, width)]


def tables() -> Shapes:
    """A recommender: one large and forty middling embedding tables, and two hundred small dense layers."""
    return [(2_000_000, 64), *[(50_000, 32)] * 40, *[(512, 512), (512,)] * 200]


def many_small(count: int) -> Shapes:
    return [(32, 32) if index % 2 == 0 else (128 + index % 97,) for index in range(count)]


@dataclass(frozen=True)
class Model:
    """Shapes, and what they must amount to: tensors, and millions of parameters."""

    shapes: Shapes
    tensors: int
    millions: float

    def __post_init__(self) -> None:
        millions = sum(map(prod, self.shapes)) / 1e6
        if len(self.shapes) != self.tensors or round(millions, 1) != self.millions:
            raise ValueError(
                f"a model of {len(self.shapes)} tensors and {millions:.1f} M parameters; it must have {self.tensors} "
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
    """Whether the time of a step is that of the host: the tensors are many and their elements few."""
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
    """Gradients at other addresses than last time, by turns in one of two sets of tensors that Python knows already."""

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
    """What a backward pass leaves, once it is done: gradients in new tensors, which Python has not seen, at other
    addresses than last time.

    The gradient of a parameter with respect to itself is what is handed in, so this is autograd's accumulation alone.
    """

    def __init__(self, params: Sequence[Tensor], device: str) -> None:
        self.params = params
        self.device = device
        self._values = gradients(params)
        self._previous: list[Tensor | None] = []

    def __call__(self) -> None:
        # Alive until the next call: otherwise the allocator hands their memory out again, at the same addresses.
        self._previous = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        torch.autograd.backward(self.params, self._values)
        measure.synchronize(self.device)
