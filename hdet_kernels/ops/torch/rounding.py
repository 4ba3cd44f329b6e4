"""Stochastic rounding in plain torch. ``csrc/rounding.h`` and ``triton/rounding.py`` give the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def mix(x: Any) -> Any:
    """Return MurmurHash3's finaliser of the low 32 bits of an int64 tensor or an int."""
    x = x & WORD
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & WORD
    return x ^ (x >> 16)


def rounding_key(seed: Tensor, t: Tensor) -> Tensor:
    """Return the key of a slot's random bits at step ``t``."""
    return mix(seed.long() + GOLDEN * t.long())


def random_bits(key: Any, stream: int, offset: int, like: Tensor) -> Tensor:
    """Return 16 random bits for each element of ``like``, which begins at flat position ``offset``."""
    return random_bits_at(key, stream, torch.arange(offset, offset + like.numel(), device=like.device))


def random_bits_at(key: Any, stream: int, position: Tensor) -> Tensor:
    """Return 16 random bits for each flat position.

    The bits are a function of key, stream and flat position alone. One 64-bit hash serves four neighbours. ``stream``
    is 0 for parameters, and 2 and up for their states.
    """
    quad = position >> 2
    once = ((mix((quad & WORD) ^ key) + (quad >> 32) + stream * GOLDEN) & WORD) * 0xD2511F53
    high = (once >> 32) & WORD
    twice = (high ^ (once & WORD)) * 0xCD9E8D57
    low = twice & WORD
    first, second = low ^ high, ((twice >> 32) & WORD) ^ (low >> 16 | low << 16)
    word = torch.where((position & 2) != 0, second, first)
    return (word >> (16 * (position & 1))) & 0xFFFF


def round_stochastically(value: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bf16, up with a probability equal to the fraction that is cut off.

    ``noise`` has 16 uniform random bits for each element.
    """
    bits = value.float().view(torch.int32).long() & WORD
    rounded = ((bits + noise) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(value.isfinite(), rounded, value.to(torch.bfloat16))
