"""A region of split masters: read and written in float32 a bucket at a time, as if the masters were one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hdet_kernels.buckets import Bucket
from hdet_kernels.ops.halves import read_halves, write_halves


@dataclass(frozen=True, eq=False)
class SplitRegion:
    """The halves of masters: 1-D, or [rows, n] where the process holds several replicas.

    Attributes:
        param: bf16 parameters. A bucket that is cut from them is one of their masters, because bf16 travels as float32.
        low: the int16 lower halves of their masters.
        kept: new masters that the halves do not have yet, by the first element of their bucket.
        backend: of the conversions; see :func:`hdet_kernels.use_backend`.
    """

    param: Tensor
    low: Tensor
    kept: Mapping[int, Tensor] = field(default_factory=dict)
    backend: str | None = None

    def kept_of(self, bucket: Bucket) -> Tensor | None:
        """Return the new masters of a bucket, of all rows, in their own memory; None if the halves have them."""
        return self.kept.get(bucket.pieces[0].start)

    def joined(self, bucket: Bucket, out: Tensor | None = None) -> Tensor:
        """Return the masters of a bucket that has none kept, of all rows, in memory of their own or in ``out``."""
        return read_halves(*self._halves(bucket), out=out, backend=self.backend)

    def first(self, bucket: Bucket, out: Tensor) -> Tensor:
        """Write the masters of a bucket of the first replica held here to ``out``, and return it."""
        kept = self.kept_of(bucket)
        if kept is not None:
            return out.copy_(kept[0] if kept.dim() > 1 else kept)
        halves = (half[0] if half.dim() > 1 else half for half in self._halves(bucket))
        return read_halves(*halves, out=out, backend=self.backend)

    def write(self, bucket: Bucket, values: Tensor) -> None:
        """Set the masters of a bucket to ``values``, 1-D, in all rows."""
        kept = self.kept_of(bucket)
        if kept is not None:
            kept.copy_(values.expand_as(kept))
            return
        param, low = self._halves(bucket)
        write_halves(values.expand_as(param), param, low, backend=self.backend)

    def _halves(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        (piece,) = bucket.pieces
        return self.param[..., piece.start : piece.stop], self.low[..., piece.start : piece.stop]


#: Tensors that may share a bucket, or the halves of masters.
Region = Sequence[Tensor] | SplitRegion
