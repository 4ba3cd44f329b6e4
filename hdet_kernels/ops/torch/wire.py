"""The compressed average in plain torch, which runs anywhere and is the reference for other backends.

:mod:`~hdet_kernels.ops.wire` has the equations. Divisors are tensors, because torch on a GPU multiplies by the
reciprocal of a Python number, whose last bit differs from that of the quotient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hdet_kernels.ops.wire import BLOCK, FORMATS, GRAIN, encoded_bytes

# The largest int8 code.
MOST = 127.0


def encode(format: int, x: Tensor, consensus: Tensor, error: Tensor | None, wire: Tensor) -> None:
    difference = x - consensus
    if error is not None:
        difference = difference + error
    numbers = x.new_zeros(len(wire), shard_of(format, wire))
    numbers.view(-1)[: x.numel()] = difference
    lost = _encode_into(format, numbers, wire)
    if error is not None:
        error.copy_(lost.view(-1)[: x.numel()])


def merge(format: int, wires: Tensor, divisor: float, error: Tensor | None, wire: Tensor) -> None:
    first, *others = _decoded(format, wires)
    for other in others:
        first = first + other
    mean = first / first.new_full((), divisor)
    if error is not None:
        mean = mean + error
    lost = _encode_into(format, mean.unsqueeze(0), wire.unsqueeze(0))
    if error is not None:
        error.copy_(lost.squeeze(0))


def decode(format: int, wire: Tensor, consensus: Tensor, target: Tensor | None) -> None:
    consensus.add_(_decoded(format, wire).view(-1)[: consensus.numel()])
    if target is not None:
        target.copy_(consensus)


def shard_of(format: int, wire: Tensor) -> int:
    """Return the elements of a shard, given its bytes as the last dimension of ``wire``."""
    return wire.shape[-1] // encoded_bytes(FORMATS[format], GRAIN) * GRAIN


def _encode_into(format: int, numbers: Tensor, wire: Tensor) -> Tensor:
    """Encode ``numbers`` [shards, shard] into ``wire`` and return what the encoding lost."""
    if FORMATS[format] == "bf16":
        wire.view(torch.bfloat16).copy_(numbers)
    else:
        blocks = numbers.view(len(numbers), -1, BLOCK)
        # Infinite where a number is not finite: the bits of a NaN depend on the processor.
        scale = blocks.abs().amax(2).nan_to_num(nan=math.inf, posinf=math.inf) / blocks.new_full((), MOST)
        usable = ((scale > 0) & scale.isfinite()).unsqueeze(2)
        steps = torch.where(usable, blocks / scale.unsqueeze(2), 0.0).clamp(-MOST, MOST).round()
        codes, scales = _parts(format, wire)
        codes.copy_(steps.view_as(codes))
        scales.copy_(scale)
    return numbers - _decoded(format, wire)


def _decoded(format: int, wire: Tensor) -> Tensor:
    """Decode ``wire`` [shards, shard_bytes] to float32 [shards, shard]."""
    if FORMATS[format] == "bf16":
        return wire.view(torch.bfloat16).float()
    codes, scales = _parts(format, wire)
    return (codes.float().view(len(wire), -1, BLOCK) * scales.unsqueeze(2)).view(len(wire), -1)


def _parts(format: int, wire: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the codes and the scales of an int8 ``wire``."""
    shard = shard_of(format, wire)
    return wire[:, :shard].view(torch.int8), wire[:, shard:].view(torch.float32)
