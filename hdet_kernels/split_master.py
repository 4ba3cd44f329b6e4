"""A float32 master of a bf16 parameter, split: the parameter, and the lower half of the master's bits as int16.

The parameter is the master rounded to nearest, ties away from zero. So the master's bits are those of the parameter, in
the upper half, plus the lower half as a signed number. Nothing is lost. Whatever other code writes to the parameter,
the master is within half a step of it. ``csrc/rounding.h`` and ``ops/triton/rounding.py`` have the same functions.

A copy of the master in float32 has its parameter rounded with ties to even instead. Where the two differ, which is
where the master lies exactly between two bf16 numbers, going from one form to the other changes the master's last bit,
and keeps the parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INFINITY = 0x7F800000


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 parameter and the int16 lower half of a float32 master. Every NaN becomes one NaN."""
    bits = master.view(torch.int32).masked_fill(master.isnan(), 0x7FC00000)
    low = bits.to(torch.int16)
    upper = (bits >> 16).to(torch.int16)
    upper += low < 0
    return upper.view(torch.bfloat16), low


def joined(param: Tensor, low: Tensor) -> Tensor:
    """Return the float32 master of a bf16 parameter and an int16 lower half.

    The lower half may belong to a parameter that other code has replaced by zero or infinity: a sum below zero or
    above infinity, which would be a NaN, ends there.
    """
    bits = param.view(torch.int16).to(torch.int32) << 16
    rounded = bits & 0x7FFFFFFF
    magnitude = torch.minimum((rounded + low).clamp_(min=0), rounded.clamp(min=_INFINITY))
    return magnitude.bitwise_or_(bits & -0x80000000).view(torch.float32)


def low_of_copy(master: Tensor) -> Tensor:
    """Return the lower half for a parameter that is the rounding of a float32 copy, with ties to even."""
    param, low = split(master)
    # Such a parameter is one step below the one that split() rounds a tie to.
    return low.masked_fill_(param.view(torch.int16) != master.to(torch.bfloat16).view(torch.int16), 0x7FFF)


def copy_of(param: Tensor, low: Tensor) -> Tensor:
    """Return the float32 copy of a split master, such that the parameter is its rounding with ties to even."""
    return joined(param, low.clamp(min=-0x7FFF))
