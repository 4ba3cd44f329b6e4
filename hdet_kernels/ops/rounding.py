"""Stochastic rounding in plain torch; ``csrc/rounding.h`` and ``triton_rounding.py`` have the same, to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def _mix(x: Any) -> Any:
    """The finaliser of MurmurHash3, on the low 32 bits of an int64 tensor or of an int."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)


def rounding_key(seed: Tensor, t: Tensor) -> Tensor:
    return _mix(seed.long() + _GOLDEN * t.long())


def random_bits(key: Any, stream: int, offset: int, like: Tensor) -> Tensor:
    """16 random bits for each element of a slot, a function of key, stream and flat position alone: one 32-bit hash
    serves two neighbours. ``stream`` is 0 for parameters, 2 and on for their states."""
    position = torch.arange(offset, offset + like.numel(), device=like.device)
    pair = position >> 1
    word = _mix(_mix((pair & _WORD) ^ key) + (pair >> 32) + stream * _GOLDEN)
    return (word >> (16 * (position & 1))) & 0xFFFF


def round_stochastically(value: Tensor, noise: Tensor) -> Tensor:
    """float32 to bf16: up with the probability of the part that is cut off, given 16 uniform random bits."""
    bits = value.float().view(torch.int32).long() & _WORD
    rounded = ((bits + noise) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(value.isfinite(), rounded, value.to(torch.bfloat16))
