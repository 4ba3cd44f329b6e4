"""Split masters in an average: read and written in float32, a bucket at a time, as if the masters were one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hdet_kernels.buckets import Bucket
from hdet_kernels.ops.halves import read_halves, write_halves


@dataclass(frozen=True, eq=False)
class SplitRegion:
    """The halves of masters: 1-D, or [rows, n] where the process holds several replicas.

    Attributes:
        param: bf16 parameters. A bucket that is cut from them is one of their masters, because bf16 travels as float32.
        low: the int16 lower halves of their masters.
        backend: of the conversions; see :func:`hdet_kernels.use_backend`.
    """

    param: Tensor
    low: Tensor
    backend: str | None = field(default=None, kw_only=True)

    def read(self, bucket: Bucket | None = None, out: Tensor | None = None) -> Tensor:
        """Return the masters of a bucket, or all of them, of all rows, in memory of their own or in ``out``."""
        return read_halves(*self._halves(bucket), out=out, backend=self.backend)

    def read_first(self, bucket: Bucket, out: Tensor) -> Tensor:
        """Write the masters of a bucket of the first replica in this process to ``out``, and return it."""
        halves = (half[0] if half.dim() > 1 else half for half in self._halves(bucket))
        return read_halves(*halves, out=out, backend=self.backend)

    def write(self, values: Tensor, bucket: Bucket | None = None) -> None:
        """Set the masters of a bucket, or all of them, to ``values``; 1-D ones go to all rows."""
        param, low = self._halves(bucket)
        write_halves(values.expand_as(param), param, low, backend=self.backend)

    def parts(self, nbytes: int) -> Iterator[Tensor]:
        """Yield all masters, in parts of at most ``nbytes`` of one row."""
        elements = max(nbytes // torch.float32.itemsize, 1)
        for halves in zip(*(half.split(elements, dim=-1) for half in (self.param, self.low)), strict=True):
            yield read_halves(*halves, backend=self.backend)

    def _halves(self, bucket: Bucket | None) -> tuple[Tensor, Tensor]:
        if bucket is None:
            return self.param, self.low
        (piece,) = bucket.pieces
        return self.param[..., piece.start : piece.stop], self.low[..., piece.start : piece.stop]


#: Tensors that may share a bucket, or the halves of masters.
Region = Sequence[Tensor] | SplitRegion


def outline(region: Region) -> Sequence[Tensor]:
    """Return tensors with the shapes of a region: those of split masters are bf16."""
    return [region.param] if isinstance(region, SplitRegion) else region
