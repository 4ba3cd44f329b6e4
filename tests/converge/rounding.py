"""Bounds of what rounding does to averages."""

from __future__ import annotations

import torch
from torch import Tensor

#: The most that one rounding to fp32 changes a number, relative to it.
EPS = 2.0**-24
#: The most that rounding to a format takes, as a share of the largest number in a block. bf16 has 8 binary digits, and
#: rounding takes half a unit of the last. int8 has 127 steps on either side, and rounding takes half a step.
SHARE = {"bf16": 2.0**-8, "int8": 1 / 254}


def most_owed(format: str, largest: float) -> float:
    """Return the bound of |mean(e)| + |e′| where no replica is further than ``largest`` from the consensus."""
    share = SHARE[format]
    own = share * largest / (1 - share)  # e ≤ share·(largest + e)
    merged = share * (largest + own) * (1 + share) / (1 - share)  # e′ ≤ share·((largest + e)·(1 + share) + e′)
    return own + merged


def all_equal(tensors: list[Tensor]) -> bool:
    return all(torch.equal(tensors[0], other) for other in tensors[1:])


def mean(tensors: list[Tensor]) -> Tensor:
    """Return the mean in fp64."""
    return torch.stack([tensor.double() for tensor in tensors]).mean(dim=0)
