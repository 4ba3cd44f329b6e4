"""Optimizer state in 8 bits, in plain torch: codes of one byte, and a float32 scale for every block of them.

A *block* is :data:`BLOCK` consecutive elements of a slot, in memory order; the last one may be shorter. Its scale is
its largest magnitude. With x = value/scale, the code stands for a level between 0 and 1, and the levels are denser
towards 0 (companding), because the magnitudes in one block span many orders:

======== ================================ =========== =====================
state    names                            code        decoded
======== ================================ =========== =====================
signed   momentum_buffer, exp_avg         128 ± c     ±(c/127)²·scale
unsigned exp_avg_sq, max_exp_avg_sq, sum  c           (c/255)⁴·scale
======== ================================ =========== =====================

A step rounds to one of the two neighbouring levels with the probabilities that make the expectation exact. A moment
that changes by a thousandth of itself at every step would stand still if it were rounded to nearest. A second moment
above zero never gets code 0: a parameter whose first moment is not zero would be divided by ε alone.

Given a uniform random number u between 0 and 1, the upper one of two levels a and b is taken if x is above their mean
(1 - u)·a + u·b. That of c² and (c + 1)² is (c + u)² + u·(1 - u), so for squares this takes no comparison: the code
counts ⌈√(x - u·(1 - u)) - u⌉ steps, or with 1 - u in place of u, ⌊√(x - u·(1 - u)) + u⌋.

Levels are computed as whole numbers, c² and c⁴, in units of scale/127² and scale/255⁴, up to a millionth: the scale
lies that much below the highest level, so that no rounding of a product or a root leads above it. Those units and their
inverses must be normal numbers, so a scale is at least 2⁻¹¹² or 2⁻⁹⁴. A block with a value that is not finite gets
scale NaN and decodes to NaN everywhere, so that the failure is seen. A block with scale 0, as new state has, decodes to
zeros. ``csrc/companding.h``, ``csrc/companding_cuda.h`` and ``triton_companding.py`` have the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import CHUNK

#: Elements that share a scale.
BLOCK = 256

#: Scales of each chunk of the chunk table. A chunk that is not full leaves some of them unused.
BLOCKS_PER_CHUNK = CHUNK // BLOCK

#: States that can be negative. All others are sums of squares.
SIGNED_STATES = frozenset({"momentum_buffer", "exp_avg"})

#: In place of a uniform random number: rounding to nearest.
NEAREST = 0.5

#: By whether the state is signed, the level of the scale, (1 - 2⁻²⁰)·127² or 255⁴ in float32, and the smallest scale.
TOP = {True: 16128.984375, False: 4228246528.0}
SMALLEST_SCALE = {True: 2.0**-112, False: 2.0**-94}


def block_count(numel: int) -> int:
    """Return the number of blocks of a slot of ``numel`` elements."""
    return -(-numel // BLOCK)


def first_scales(numels: Iterable[int]) -> list[int]:
    """Return for each slot of a chunk table, given their numbers of elements, the index of its first scale.

    The other scales of the slot follow it, because all chunks of a slot but the last are full.
    """
    return list(accumulate((BLOCKS_PER_CHUNK * -(-numel // CHUNK) for numel in numels), initial=0))[:-1]


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return the float32 values of a slot.

    Args:
        codes: uint8 [n], or [replicas, n].
        scales: float32 [blocks of n], or [replicas, blocks of n].
        signed: Whether the state can be negative.
    """
    unit = (scales * (1 / TOP[signed])).repeat_interleave(BLOCK, dim=-1)[..., : codes.shape[-1]]
    if not signed:
        return _level(codes.float(), signed) * unit
    steps = codes.float() - 128
    return steps * steps.abs() * unit


def encode(values: Tensor, signed: bool, noise: Tensor | float = NEAREST) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a slot.

    Args:
        values: float32 [n], or [replicas, n].
        signed: Whether the state can be negative.
        noise: 16 random bits for each element; default: round to nearest.

    Returns:
        uint8 codes of the shape of ``values``, and float32 scales [blocks of n] or [replicas, blocks of n].
    """
    count = values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, -count % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = padded.abs().amax(-1)  # NaN where a value is
    scales = torch.where(largest.isfinite(), largest.clamp(min=SMALLEST_SCALE[signed]), torch.nan)
    inverse = (TOP[signed] / scales).repeat_interleave(BLOCK, dim=-1)[..., :count]
    x = values.abs() * inverse
    x = torch.where(x < TOP[signed], x, TOP[signed])  # also where it is NaN
    uniform = noise if isinstance(noise, float) else (noise.float() + 0.5) * 2.0**-16
    if signed:
        root = (x - uniform * (1 - uniform)).clamp(min=0).sqrt()
        return (128 + (torch.where(values < 0, -root, root) + uniform).floor()).to(torch.uint8), scales
    x = torch.where((x > 0) & (x < 1), 1.0, x)
    below = x.sqrt().sqrt().floor()
    low = _level(below, signed)
    return (below + (uniform * (_level(below + 1, signed) - low) < x - low)).to(torch.uint8), scales


def positions_of_bits(position: Tensor, state: int) -> Tensor:
    """Return the flat positions whose parameters have the 16 random bits of the codes of the ``state``-th state.

    Four neighbours share a hash of 64 bits, of which a parameter and its three states use different parts.
    """
    return (position & ~3) | ((position + 1 + state) & 3)


def encode_again(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a slot, rounding to nearest; values that were decoded decode to the same ones.

    The largest magnitude of a block that was decoded is the highest level, a little above its scale, and rounded. So
    the scales around the one that belongs to that level are tried.
    """
    codes, scales = encode(values, signed)
    wrong = _differ(decode(codes, scales, signed), values)
    highest = 127.0**2 if signed else 255.0**4
    belonging = (scales.double() * (TOP[signed] / highest)).float().view(torch.int32)
    for apart in (0, 1, -1, 2, -2):
        other = (belonging + apart).view(torch.float32)
        better = wrong & ~_differ(decode(codes, other, signed), values)
        scales, wrong = torch.where(better, other, scales), wrong & ~better
    return codes, scales


def _differ(found: Tensor, values: Tensor) -> Tensor:
    """Return for each block whether a number in it differs."""
    apart = (found != values) & ~(found.isnan() & values.isnan())
    return torch.nn.functional.pad(apart, (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).any(-1)


def _level(steps: Tensor, signed: bool) -> Tensor:
    """Return the level of ``steps`` steps above 0, a whole number."""
    square = steps * steps
    return square if signed else square * square
