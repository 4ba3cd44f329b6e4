"""Optimizer state in 8 bits, in plain torch: codes of one byte, and a float32 scale for every block of them.

A *block* is :data:`BLOCK` consecutive elements of a slot, in memory order; the last one may be shorter. Its scale is
its largest magnitude. With x = value/scale, the code stands for a level between 0 and 1, and the levels are denser
towards 0 (companding), because the magnitudes in one block span many orders:

======== ================================ =========== =====================
state    names                            code        decoded
======== ================================ =========== =====================
signed   momentum_buffer, exp_avg         128 ± c     ±(c/127)²·scale
unsigned exp_avg_sq, sum                  c           ((2c + 1)/511)⁴·scale
======== ================================ =========== =====================

``max_exp_avg_sq`` of amsgrad has no codes: an average in 8 bits wanders by a tenth of itself, because every step rounds
it at random, and the largest of all its values would grow for that reason alone.

The levels of sums of squares are fourth powers of odd numbers, so none of them is 0: a parameter whose first moment is
not zero would be divided by ε alone. The smallest one is 1.5e-11 of the largest.

A step rounds to one of the two neighbouring levels with the probabilities that make the expectation exact. A moment
that changes by a thousandth of itself at every step would stand still if it were rounded to nearest. Given a uniform
random number z between -½ and ½, the upper one of two levels a and b is taken if x is above (½ - z)·a + (½ + z)·b:

- Of c² and (c + 1)² that is (c + ½ + z)² + ¼ - z². So for squares this takes no comparison: the code counts
  √(x - ¼ + z²) - z steps, rounded to the nearest whole number.
- Of (e - 1)⁴ and (e + 1)⁴ with an even e it is (e² + 1)·(e² + 5 + 8·z·e) - 4. With y = x + 4 the comparison is with a
  product, and e is the even number nearest to the fourth root of y, which is 2 or more because y is at least 4. An x
  that lies less than 4 units below a level is rounded up to it always: y is already beyond that level.

All states of an element have the same z, and a large one rounds each of their magnitudes down. So where the first
moment gets too small, the second one gets too small too, and the step, which is a quotient of the two, errs less than
with numbers of their own.

Levels are computed as whole numbers, c² and (2c + 1)⁴, in units of scale/127² and scale/511⁴, up to a millionth: the
scale lies that much below the highest level, so that no rounding of a product or a root leads above it. (The fourth
root of the scale's level is 511 - 1.2e-4, and a sum and two roots in float32 err by 6e-5 at most: e is at most 510.)
Those units and their inverses must be normal numbers, so a scale is at least 2⁻¹¹² or 2⁻⁹⁰. A block with a value that
is not finite gets scale NaN and decodes to NaN everywhere, so that the failure is seen. A block with scale 0, as new
state has, decodes to zeros. ``csrc/companding.h``, ``csrc/companding_cuda.h`` and ``triton/companding.py`` have the
same functions.
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

#: By whether the state is signed, the level of the scale, (1 - 2⁻²⁰)·127² or 511⁴ in float32, and the smallest scale.
TOP = {True: 16128.984375, False: 68184113152.0}
SMALLEST_SCALE = {True: 2.0**-112, False: 2.0**-90}


def block_count(numel: int) -> int:
    """Return the number of blocks of a slot of ``numel`` elements."""
    return -(-numel // BLOCK)


def first_scales(numels: Iterable[int]) -> list[int]:
    """Return for each slot of a chunk table, given their numbers of elements, the index of its first scale.

    The other scales of the slot follow it, because all chunks of a slot but the last are full.
    """
    return list(accumulate((BLOCKS_PER_CHUNK * -(-numel // CHUNK) for numel in numels), initial=0))[:-1]


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return the float32 values of codes [n] with scales [blocks of n], or [replicas, …] both."""
    unit = _spread(scales * (1 / TOP[signed]), codes)
    if signed:
        steps = codes.float() - 128
        return steps * steps.abs() * unit
    square = (2 * codes.float() + 1).square()
    return square * square * unit


def encode(values: Tensor, signed: bool, noise: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of float32 values [n], or [replicas, n].

    ``noise`` has 16 random bits for each element; the default rounds to nearest.
    """
    largest = _in_blocks(values).abs().amax(-1)  # NaN where a value is
    scales = torch.where(largest.isfinite(), largest.clamp(min=SMALLEST_SCALE[signed]), torch.nan)
    x = values.abs() * _spread(TOP[signed] / scales, values)
    x = torch.where(x < TOP[signed], x, TOP[signed])  # also where it is NaN
    # The random number between -½ and ½ of each 16 random bits.
    z = noise if isinstance(noise, float) else (noise.float() - 32767.5) * 2.0**-16
    if signed:
        root = ((x - 0.25) + z * z).clamp(min=0).sqrt()
        steps = root - z
        return (128 + torch.where(values < 0, -steps, steps).round()).to(torch.uint8), scales
    y = x + 4
    upper = (0.5 * y.sqrt().sqrt()).round()
    between = 2 * upper
    square = between * between
    taken = (square + 1) * ((square + 5) + 8 * z * between) < y
    return torch.where(taken, upper, upper - 1).to(torch.uint8), scales


def positions_of_bits(position: Tensor) -> Tensor:
    """Return the flat positions whose parameters have the 16 random bits of the codes.

    Four neighbours share a hash of 64 bits, of which a parameter and its states use different parts.
    """
    return (position & ~3) | ((position + 1) & 3)


def encode_again(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a slot, rounding to nearest; values that were decoded decode to the same ones.

    The largest magnitude of a block that was decoded is the highest level, a little above its scale, and rounded. So
    the scales around the one that belongs to that level are tried, and 0, with which all codes decode to 0.
    """
    codes, scales = encode(values, signed)
    wrong = _differ(decode(codes, scales, signed), values)
    highest = 127.0**2 if signed else 511.0**4
    belonging = (scales.double() * (TOP[signed] / highest)).float().view(torch.int32)
    for other in (*((belonging + apart).view(torch.float32) for apart in (0, 1, -1, 2, -2)), torch.zeros_like(scales)):
        better = wrong & ~_differ(decode(codes, other, signed), values)
        scales, wrong = torch.where(better, other, scales), wrong & ~better
    return codes, scales


def _differ(found: Tensor, values: Tensor) -> Tensor:
    """Return for each block whether a number in it differs."""
    apart = (found != values) & ~(found.isnan() & values.isnan())
    return _in_blocks(apart).any(-1)


def _in_blocks(values: Tensor) -> Tensor:
    """Return the values [..., blocks, BLOCK], the last block filled with zeros."""
    missing = -values.shape[-1] % BLOCK
    return torch.nn.functional.pad(values, (0, missing)).unflatten(-1, (-1, BLOCK))


def _spread(of_blocks: Tensor, like: Tensor) -> Tensor:
    """Return each block's number for each of its elements, as many as ``like`` has."""
    return of_blocks.repeat_interleave(BLOCK, dim=-1)[..., : like.shape[-1]]
