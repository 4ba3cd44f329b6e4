"""The two sums of squares of amsgrad in 8 bits, in plain torch: the largest one so far, and the current one as a share.

An average in 8 bits wanders by a tenth of itself and more, because every step rounds it at random, and the largest of
all its values would grow for that reason alone: by half in 100 000 steps. So with amsgrad the two are coded together.

**The largest** (``max_exp_avg_sq``) is a floating-point number with 3 bits behind the point and 5 bits of exponent,
rounded to nearest: code 8·e + f stands for (1 + f/8)·2ᵉ⁻³¹·scale. The scale is a power of two, so that a new one moves
codes by a multiple of 8 and changes no value. Rounding to nearest is right here: nothing slow adds up in this state,
each of its values is one of the current average. The smallest one, where e and f are 0, stands for smaller ones too.

**The current one** (``exp_avg_sq``) is a share of it. The largest may have been rounded down, from less than 17/16 of
itself, so with k = 255 - code the share is 17/16·(1 - k²/255²). The steps are the smaller the closer it is to the
largest, which is where they matter. Rounding is that of the squares in :mod:`.companding`, given -z, so that a large z
makes the value smaller here too. The state has no scale of its own; that of its block is minus the other one's. A scale
that is not negative says that the codes are those of :mod:`.companding`, as they are without amsgrad and in new state.

``csrc/amsgrad_codes.h``, ``csrc/amsgrad_codes_cuda.h`` and ``triton_amsgrad_codes.py`` have the same functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hdet_kernels.ops.companding import (
    NEAREST,
    SIGNED_STATES,
    centred,
    decode,
    encode,
    encode_again,
    in_blocks,
    spread,
)

#: The names of the two states.
CURRENT, LARGEST = "exp_avg_sq", "max_exp_avg_sq"

#: The bits of a float32 that belong to the code of a largest sum, and those of the value of code 0 without its scale.
DROPPED_BITS = 20
LOWEST_BITS = (127 - 31) << 23

#: The exponent of the smallest scale, 2⁻⁶⁰, the highest code and its exponent, and infinity: the bits of float32.
SMALLEST_EXPONENT = 127 - 60
HIGHEST = 0x7F7
INFINITY_BITS = 0x7F800000

#: The highest square, the share that is one of them, and what is missing from a value of 0: a little more than the
#: highest square, so that no random number and no rounding of a root leads below it.
SQUARES = 255.0**2
PER_SQUARE = 1.0625 / SQUARES
ALL_MISSING = SQUARES + 3 / 128


def decode_largest(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values of a slot's codes of ``max_exp_avg_sq``."""
    values = ((codes.int() << DROPPED_BITS) + LOWEST_BITS).view(torch.float32)
    return values * spread(scales, codes)


def encode_largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a slot's values of ``max_exp_avg_sq``."""
    bits = values.abs().view(torch.int32).clamp(max=INFINITY_BITS)
    rounded = ((bits + (1 << (DROPPED_BITS - 1))) >> DROPPED_BITS).clamp(max=HIGHEST)
    exponent = (in_blocks(rounded).amax(-1) >> 3).clamp(min=SMALLEST_EXPONENT)
    finite = in_blocks(bits).amax(-1) < INFINITY_BITS
    scales = torch.where(finite, (exponent << 23).view(torch.float32), torch.nan)
    lowest = spread((exponent - 31) << 3, values)
    return (rounded - lowest).clamp(min=0).to(torch.uint8), scales


def decode_share(codes: Tensor, largest: Tensor) -> Tensor:
    """Return the values of ``exp_avg_sq`` given those of ``max_exp_avg_sq``."""
    steps = 255 - codes.float()
    return (SQUARES - steps * steps) * (largest * PER_SQUARE)


def encode_share(values: Tensor, largest: Tensor, noise: Tensor | float = NEAREST) -> Tensor:
    """Return the codes of ``exp_avg_sq`` given the decoded values of ``max_exp_avg_sq``.

    Args:
        values: float32, of any shape.
        largest: float32, of the same shape.
        noise: 16 random bits for each element; default: round to nearest.
    """
    missing = ALL_MISSING - values / (largest * PER_SQUARE)
    missing = torch.where(missing > 0, missing, 0.0)  # also where it is NaN
    z = centred(noise)
    root = ((missing - 0.25) + z * z).clamp(min=0).sqrt()
    return (255 - (root + z).round().clamp(max=255)).to(torch.uint8)


def decode_state(name: str, codes: Tensor, scales: Tensor, largest: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return the float32 values of a slot of any state.

    Args:
        name: The name of the state.
        codes: uint8 [n], or [replicas, n].
        scales: float32 [blocks of n], or [replicas, blocks of n].
        largest: Of ``exp_avg_sq``, codes and scales of ``max_exp_avg_sq``, where there is that state.
    """
    if name == LARGEST:
        return decode_largest(codes, scales)
    values = decode(codes, scales, name in SIGNED_STATES)
    if name != CURRENT or largest is None:
        return values
    return torch.where(spread(scales, codes) < 0, decode_share(codes, decode_largest(*largest)), values)


def encode_state(
    name: str, values: Tensor, largest: tuple[Tensor, Tensor] | None = None, *, decoded_before: bool
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a slot of any state, rounding to nearest.

    Args:
        name: The name of the state.
        values: float32 [n], or [replicas, n].
        largest: Of ``exp_avg_sq``, codes and scales of ``max_exp_avg_sq``, where there is that state.
        decoded_before: Whether the values may have been decoded from codes, and must decode to the same again.
    """
    if name == LARGEST:
        codes, scales = encode_largest(values)
        return codes, torch.where(in_blocks(values == 0, padding=True).all(-1), 0.0, scales)
    codes, scales = (encode_again if decoded_before else encode)(values, name in SIGNED_STATES)
    if name != CURRENT or largest is None:
        return codes, scales
    peak = decode_largest(*largest)
    fits = (largest[1] > 0) & in_blocks(values <= peak * 1.0625, padding=True).all(-1)
    shares = encode_share(values, peak)
    return torch.where(spread(fits, codes), shares, codes), torch.where(fits, -largest[1], scales)
