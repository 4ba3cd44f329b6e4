"""Normal noise in plain torch, which runs anywhere and is the reference for other backends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients, flat_gradients
from hdet_kernels.ops.operators import fake_in_place, register
from hdet_kernels.ops.rounding import GOLDEN, WORD, mix
from hdet_kernels.tensors import wide_dtype

#: Elements whose noise is formed at a time. Each takes some 50 bytes of temporary memory.
PIECE = 2**20

# Polynomial coefficients of Cephes, highest power first: of ln(1 + f) = f − f²/2 + f³·(…), and of cosine and sine up to
# π/4.
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)

# 2π/2³².
_TURN = 1.4629180792671596e-9


class Keys(NamedTuple):
    """The keys that hash the two words of a slot's elements: pairs of whole numbers below 2³², or tensors of them."""

    radius: tuple[Any, Any]
    angle: tuple[Any, Any]


def keys_of(key: Tensor) -> Keys:
    """Return the keys of both words, by rounds of a Feistel network on the two halves of ``key``.

    Different keys stay different, and keys that differ in one bit then differ in about half of them. Without it,
    neighbouring keys would give the same numbers in another order.
    """
    low, high = key & WORD, (key >> 32) & WORD
    high = high ^ mix(low + GOLDEN)
    low = low ^ mix(high + 2 * GOLDEN)
    high = high ^ mix(low + 3 * GOLDEN)
    low = low ^ mix(high + 4 * GOLDEN)
    first = low, high
    high = high ^ mix(low + 5 * GOLDEN)
    low = low ^ mix(high + 6 * GOLDEN)
    return Keys(first, (low, high))


def normals(keys: Keys, position: Tensor) -> Tensor:
    """Return standard normal numbers, float32, for each element of ``position`` (int64)."""
    u = (_word(keys.radius, position).to(torch.float32) + 1.0) * 2.0**-32
    return _root(-2.0 * log_of(u)) * cos_of_turn(_word(keys.angle, position))


def _root(x: Tensor) -> Tensor:
    """Return √x of float32, correctly rounded.

    On some CPUs torch uses a library whose last bit is wrong now and then. The root in float64 has more than twice the
    digits, so that rounding it to float32 is correct.
    """
    return x.to(wide_dtype(x.device)).sqrt().to(x.dtype)


def log_of(u: Tensor) -> Tensor:
    """Return ln u for u in [2⁻³², 1], from u = 2ᵏ·(1 + f) with f between √½ − 1 and √2 − 1."""
    bits = u.view(torch.int32)
    k = (bits - 0x3F3504F3) >> 23
    f = (bits - (k << 23)).view(torch.float32) - 1.0
    power, square = k.to(torch.float32), f * f
    p = _polynomial(_LOG, f) * f * square - 2.12194440e-4 * power - 0.5 * square
    return f + p + 0.693359375 * power


def cos_of_turn(word: Tensor) -> Tensor:
    """Return cos(2π·word/2³²).

    Subtracting the nearest quarter turn from the word is exact and leaves an angle of at most π/4.
    """
    quarter = (word + 2**29) >> 30  # 4 is the same as 0
    x = (word - (quarter << 30)).to(torch.float32) * _TURN
    square = x * x
    c = _polynomial(_COS, square) * square * square - 0.5 * square + 1.0
    s = _polynomial(_SIN, square) * square * x + x
    value = torch.where(quarter & 1 != 0, s, c)
    return torch.where((quarter + 1) >> 1 & 1 != 0, -value, value)


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
    radius, angle = keys_of(keys)
    for tensor, slot in zip(tensors, slots, strict=True):
        own = Keys((radius[0][slot], radius[1][slot]), (angle[0][slot], angle[1][slot]))
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        scale = scales[slot].to(wide)
        for start in range(0, tensor.numel(), PIECE):
            part = tensor[start : start + PIECE]
            position = torch.arange(start, start + part.numel(), device=part.device)
            part.copy_(part.to(wide) + scale * normals(own, position).to(wide))


def _word(key: tuple[Any, Any], position: Tensor) -> Tensor:
    low, high = key
    word: Tensor = mix(mix(position & WORD ^ low) + (position >> 32) + high)
    return word


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    highest, second, *others = coefficients
    value = highest * x + second
    for coefficient in others:
        value = value * x + coefficient
    return value
