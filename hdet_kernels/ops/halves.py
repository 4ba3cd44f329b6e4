"""Split masters from their two halves to float32 and back. With the extension that is one pass over CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hdet_kernels.ops.backends import resolve
from hdet_kernels.split_master import joined, split

# The elements of a buffer that are converted at a time, which bounds the memory for what is between.
_AT_ONCE = 2**22


def read_halves(param: Tensor, low: Tensor, *, out: Tensor | None = None, backend: str | None = None) -> Tensor:
    """Return the float32 masters of bf16 buffers and int16 lower halves: 1-D, or [rows, n] of which rows may lie apart.

    They are written to ``out``, if given.
    """
    master = torch.empty(param.shape, dtype=torch.float32, device=param.device) if out is None else out
    join = torch.ops.hdet_kernels.join_halves if resolve(param.device, backend) == "cpp" else _join
    for halves in _in_parts(param, low, master):
        join(*halves)
    return master


def write_halves(master: Tensor, param: Tensor, low: Tensor, *, backend: str | None = None) -> None:
    """Write float32 masters to buffers as :func:`read_halves` takes them."""
    divide = torch.ops.hdet_kernels.split_into_halves if resolve(param.device, backend) == "cpp" else _split
    for halves in _in_parts(master, param, low):
        divide(*halves)


def _join(param: Tensor, low: Tensor, master: Tensor) -> None:
    master.copy_(joined(param, low))


def _split(master: Tensor, *halves: Tensor) -> None:
    for half, value in zip(halves, split(master), strict=True):
        half.copy_(value)


def _in_parts(*flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
    for rows in zip(*(flat.unbind() if flat.dim() > 1 else (flat,) for flat in flats), strict=True):
        yield from zip(*(row.split(_AT_ONCE) for row in rows), strict=True)
