"""Normal noise in plain torch, which runs anywhere and is the reference for other backends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients, flat_gradients
from hdet_kernels.ops.operators import fake_in_place, register
from hdet_kernels.ops.rounding import GOLDEN, WORD
from hdet_kernels.tensors import wide_dtype

#: Elements whose noise is formed at a time. Each takes some 50 bytes of temporary memory.
PIECE = 2**20

# Coefficients of minimax polynomials, highest power first: of −2 ln(1 − f)/f for f between 1 − √2 and 1 − √½ (relative
# error 1.1e-6), of the cosine (absolute error 5e-8) and of sin(x)/x (relative error 1e-6), both of the square of an
# angle between −π/2 and π/2 in a unit in which the cosine's highest coefficient is 1.
_LOG = (
    0.23792216181755066,
    0.3733570873737335,
    0.40992656350135803,
    0.4981948733329773,
    0.6662901639938354,
    1.000022292137146,
    2.000001907348633,
)
_COS = (1.0, -4.150471210479736, 8.658533096313477, -7.207971096038818, 0.9999999403953552)
_SIN = (-2.1030359268188477, 6.558581352233887, -9.121904373168945, 3.796833038330078)

# 2⁻³¹·π/2 in that unit.
_ANGLE = 1.9264959072451404e-10

# The largest float32 below 2⁻³².
_BELOW = 2.0**-32 - 2.0**-56

_ROUNDS = 7


class Keys(NamedTuple):
    """The two words of a slot's key: whole numbers below 2³², or tensors of them."""

    low: Any
    high: Any


def keys_of(key: Tensor) -> Keys:
    """Return both words of ``key``."""
    return Keys(key & WORD, key >> 32 & WORD)


def normals(keys: Keys, start: int, count: int, device: torch.device | None = None) -> Tensor:
    """Return the standard normal numbers, float32, of ``count`` positions from ``start`` on."""
    pair = torch.arange(start >> 1, (start + count + 1) >> 1, device=device)
    first, second = words(keys, pair)
    radius = _root(square_of_radius(first.to(torch.float32) * _BELOW + 2.0**-33))
    radius = torch.where(second >> 31 != 0, -radius, radius)
    both = torch.stack([radius * part for part in cos_and_sin(second)], dim=1)
    return both.view(-1)[start & 1 :][:count]


def words(keys: Keys, pair: Tensor) -> tuple[Tensor, Tensor]:
    """Return two random words of 32 bits for each element of ``pair`` (int64).

    Rounds of Philox 2×32, with the words of the key in turn. Keys that differ in one bit give unrelated words.
    """
    first, second = pair & WORD, pair >> 32
    for turn in range(_ROUNDS):
        product = first * 0xD256D193
        key = keys[turn % 2] + turn * GOLDEN & WORD
        first, second = product >> 32 & WORD ^ second ^ key, product & WORD
    return first, second


def square_of_radius(u: Tensor) -> Tensor:
    """Return −2 ln u for u in [2⁻³³, 1), from u = 2ᵏ·(1 − f) with f between 1 − √2 and 1 − √½."""
    bits = u.view(torch.int32)
    power = bits - 0x3F3504F3 & ~0x7FFFFF  # k·2²³
    f = 1.0 - (bits - power).view(torch.float32)
    return _polynomial(_LOG, f) * f - power.to(torch.float32) * (2 * math.log(2) * 2.0**-23)


def cos_and_sin(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angle between −π/2 and π/2 that the lower 31 bits of ``word`` are."""
    whole = (word << 1 & WORD) - ((word & 2**30) << 2)  # as a signed number of 32 bits
    x = whole.to(torch.float32) * _ANGLE
    square = x * x
    return _polynomial(_COS, square), _polynomial(_SIN, square) * x


def _root(x: Tensor) -> Tensor:
    """Return √x of float32, correctly rounded.

    On some CPUs torch uses a library whose last bit is wrong now and then. The root in float64 has more than twice the
    digits, so that rounding it to float32 is correct.
    """
    return x.to(wide_dtype(x.device)).sqrt().to(x.dtype)


def add_noise_(table: ChunkTable, tensors: MatchedGradients, keys: Tensor, scales: Tensor) -> None:
    """Add normal noise to every tensor."""
    flats = flat_gradients(tensors)
    slots = [slot for slot, flat in enumerate(flats) if flat is not None]
    _operator()([flats[slot] for slot in slots], slots, keys, scales)


@cache
def _operator() -> Any:
    """Register the operator, once, and return it. ``slots`` are the indices of the tensors' keys and scales."""
    return register(
        "torch_add_noise_",
        "Tensor(a!)[] tensors, int[] slots, Tensor keys, Tensor scales",
        "()",
        _add_noise,
        fake_in_place,
    )


def _add_noise(tensors: Sequence[Tensor], slots: Sequence[int], keys: Tensor, scales: Tensor) -> None:
    low, high = keys_of(keys)
    for tensor, slot in zip(tensors, slots, strict=True):
        own = Keys(low[slot], high[slot])
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        scale = scales[slot].to(wide)
        for start in range(0, tensor.numel(), PIECE):
            part = tensor[start : start + PIECE]
            z = normals(own, start, part.numel(), part.device)
            part.copy_(part.to(wide) + scale * z.to(wide))


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    highest, second, *others = coefficients
    value = highest * x + second
    for coefficient in others:
        value = value * x + coefficient
    return value
