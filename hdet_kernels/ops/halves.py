"""Split masters from their two halves to float32 and back. With the extension that is one pass over CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from hdet_kernels.ops.backends import resolve
from hdet_kernels.split_master import read_split, write_split


def read_halves(param: Tensor, low: Tensor, *, out: Tensor | None = None, backend: str | None = None) -> Tensor:
    """Return the float32 masters of buffers: 1-D, or [rows, n] of which rows may lie apart.

    Args:
        param: bf16 parameters.
        low: int16 lower halves of their masters.
        out: where the masters are written; default: memory of their own.
        backend: see :func:`hdet_kernels.use_backend`.
    """
    if resolve(param.device, backend) != "cpp":
        return read_split(param, low, out=out)
    master = torch.empty(param.shape, dtype=torch.float32, device=param.device) if out is None else out
    for row in zip(*map(_rows, (param, low, master)), strict=True):
        torch.ops.hdet_kernels.join_halves(*row)
    return master


def write_halves(master: Tensor, param: Tensor, low: Tensor, *, backend: str | None = None) -> None:
    """Write float32 masters to buffers as :func:`read_halves` takes them."""
    if resolve(param.device, backend) != "cpp":
        write_split(master, param, low)
        return
    for row in zip(*map(_rows, (master, param, low)), strict=True):
        torch.ops.hdet_kernels.split_into_halves(*row)


def _rows(flat: Tensor) -> tuple[Tensor, ...]:
    return flat.unbind() if flat.dim() > 1 else (flat,)
