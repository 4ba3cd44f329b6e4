"""Noise in plain torch: the text that every other backend is compared with, and that runs anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet_kernels.ops import operators
from hdet_kernels.ops.chunks import ChunkTable, MatchedGradients, flat_gradients
from hdet_kernels.ops.rounding import _GOLDEN, _WORD, _mix
from hdet_kernels.tensors import wide_dtype

#: Elements whose noise is formed at a time: it takes some 50 bytes for each.
PIECE = 2**20

#: Of ln(1 + f) = f − f²/2 + f³·(…), from the highest power on; of cosine and sine up to π/4, likewise. Cephes'.
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

#: 2π/2³².
_TURN = 1.4629180792671596e-9


class Keys(NamedTuple):
    """What the two words of a slot's elements are hashed with: whole numbers below 2³², or tensors of them."""

    radius: tuple[Any, Any]
    angle: tuple[Any, Any]


def keys_of(key: Tensor) -> Keys:
    """Rounds of a Feistel network: no two keys become one, and keys that differ in a bit differ in about half of them.
    Without it the numbers of neighbouring keys would be each other's in another order."""
    low, high = key & _WORD, (key >> 32) & _WORD
    high = high ^ _mix(low + _GOLDEN)
    low = low ^ _mix(high + 2 * _GOLDEN)
    high = high ^ _mix(low + 3 * _GOLDEN)
    low = low ^ _mix(high + 4 * _GOLDEN)
    first = low, high
    high = high ^ _mix(low + 5 * _GOLDEN)
    low = low ^ _mix(high + 6 * _GOLDEN)
    return Keys(first, (low, high))


def normals(keys: Keys, position: Tensor) -> Tensor:
    """float32, of the shape of ``position`` (int64)."""
    u = (_word(keys.radius, position).to(torch.float32) + 1.0) * 2.0**-32
    return _root(-2.0 * log_of(u)) * cos_of_turn(_word(keys.angle, position))


def _root(x: Tensor) -> Tensor:
    """√x of float32, rounded as IEEE says. torch takes it from a library on some CPUs, which is off by a bit now and
    then; from float64, with more than twice the digits, it comes out right all the same."""
    return x.to(wide_dtype(x.device)).sqrt().to(x.dtype)


def log_of(u: Tensor) -> Tensor:
    """ln u, for u in [2⁻³², 1]: with u = 2ᵏ·(1 + f), f from √½ − 1 to √2 − 1."""
    bits = u.view(torch.int32)
    k = (bits - 0x3F3504F3) >> 23
    f = (bits - (k << 23)).view(torch.float32) - 1.0
    power, square = k.to(torch.float32), f * f
    p = _polynomial(_LOG, f) * f * square - 2.12194440e-4 * power - 0.5 * square
    return f + p + 0.693359375 * power


def cos_of_turn(word: Tensor) -> Tensor:
    """cos(2π·word/2³²): the nearest quarter turn is taken off the word, exactly, and what is left is at most π/4."""
    quarter = (word + 2**29) >> 30  # 4 is 0
    x = (word - (quarter << 30)).to(torch.float32) * _TURN
    square = x * x
    c = _polynomial(_COS, square) * square * square - 0.5 * square + 1.0
    s = _polynomial(_SIN, square) * square * x + x
    value = torch.where(quarter & 1 != 0, s, c)
    return torch.where((quarter + 1) >> 1 & 1 != 0, -value, value)


def add_noise_(table: ChunkTable, tensors: MatchedGradients, keys: Tensor, scales: Tensor) -> None:
    flats = flat_gradients(tensors)
    slots = [slot for slot, flat in enumerate(flats) if flat is not None]
    _operator()([flats[slot] for slot in slots], slots, keys, scales)


@cache
def _operator() -> Any:
    """The tensors are arguments, each of them flat, and ``slots`` says whose key and scale is theirs."""
    return operators.register(
        "torch_add_noise_",
        "Tensor(a!)[] tensors, int[] slots, Tensor keys, Tensor scales",
        "()",
        _add_noise,
        operators.fake_noise,
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
    word: Tensor = _mix(_mix(position & _WORD ^ low) + (position >> 32) + high)
    return word


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    highest, second, *others = coefficients
    value = highest * x + second
    for coefficient in others:
        value = value * x + coefficient
    return value
