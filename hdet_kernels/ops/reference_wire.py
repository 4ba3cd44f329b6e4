"""The compressed average in plain torch: the text that every other backend is compared with, and that runs anywhere.

:mod:`~hdet_kernels.ops.wire` has the equations. Divisors are tensors: torch on a GPU multiplies by the reciprocal of a
Python number, which is another number in the last bit.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.ops import operators
from hdet_kernels.ops.wire import BLOCK, FORMATS, GRAIN, row_bytes

MOST = 127.0


@cache
def wire_operators() -> tuple[Any, Any, Any]:
    return (
        operators.register("torch_encode", operators.ENCODE, "()", _encode, operators.fake_step),
        operators.register("torch_merge", operators.MERGE, "()", _merge, operators.fake_step),
        operators.register("torch_decode", operators.DECODE, "()", _decode, operators.fake_step),
    )


def _encode(format: int, x: Tensor, consensus: Tensor, error: Tensor | None, wire: Tensor) -> None:
    if wire.numel() == 0:
        return
    difference = x - consensus
    if error is not None:
        difference = difference + error
    numbers = x.new_zeros(len(wire), shard_of(format, wire))
    numbers.view(-1)[: x.numel()] = difference
    lost = _keep(format, numbers, wire)
    if error is not None:
        error.copy_(lost.view(-1)[: x.numel()])


def _merge(format: int, wires: Tensor, divisor: float, error: Tensor | None, wire: Tensor) -> None:
    if wire.numel() == 0:
        return
    first, *others = _values(format, wires)
    for other in others:
        first = first + other
    mean = first / first.new_full((), divisor)
    if error is not None:
        mean = mean + error
    lost = _keep(format, mean.unsqueeze(0), wire.unsqueeze(0))
    if error is not None:
        error.copy_(lost.squeeze(0))


def _decode(format: int, wire: Tensor, consensus: Tensor, target: Tensor | None) -> None:
    if wire.numel() == 0:
        return
    consensus.add_(_values(format, wire).view(-1)[: consensus.numel()])
    if target is not None:
        target.copy_(consensus)


def shard_of(format: int, wire: Tensor) -> int:
    """The elements of a shard, which its bytes are in the last dimension of ``wire``."""
    return wire.shape[-1] // row_bytes(FORMATS[format], GRAIN) * GRAIN


def _keep(format: int, numbers: Tensor, wire: Tensor) -> Tensor:
    """Writes the rows of ``numbers`` [rows, shard] as they travel; returns what they lose on the way."""
    if FORMATS[format] == "bf16":
        wire.view(torch.bfloat16).copy_(numbers)
    else:
        blocks = numbers.view(len(numbers), -1, BLOCK)
        # Infinite for what is not finite: the bits of a NaN would be the processor's choice.
        scale = blocks.abs().amax(2).nan_to_num(nan=math.inf, posinf=math.inf) / blocks.new_full((), MOST)
        usable = ((scale > 0) & scale.isfinite()).unsqueeze(2)
        steps = torch.where(usable, blocks / scale.unsqueeze(2), 0.0).clamp(-MOST, MOST).round()
        codes, scales = _parts(format, wire)
        codes.copy_(steps.view_as(codes))
        scales.copy_(scale)
    return numbers - _values(format, wire)


def _values(format: int, wire: Tensor) -> Tensor:
    """What the rows of ``wire`` [rows, shard_bytes] stand for, float32 [rows, shard]."""
    if FORMATS[format] == "bf16":
        return wire.view(torch.bfloat16).float()
    codes, scales = _parts(format, wire)
    return (codes.float().view(len(wire), -1, BLOCK) * scales.unsqueeze(2)).view(len(wire), -1)


def _parts(format: int, wire: Tensor) -> tuple[Tensor, Tensor]:
    shard = shard_of(format, wire)
    return wire[:, :shard].view(torch.int8), wire[:, shard:].view(torch.float32)
