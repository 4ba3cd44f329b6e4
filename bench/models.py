"""Parameter shapes of the models whose optimizer step is measured, and tensors of these shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
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
