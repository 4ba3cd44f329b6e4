"""Split masters in an average: joined to float32 a bucket at a time, instead of all of them at once.

The mean of a part is split again as soon as it is known, so that one bucket of float32 exists at a time. Where an
average must be all or nothing, the old and the new value of every parameter have to exist until the last part has
arrived. Then the means are kept, 4 bytes a parameter: as many as those of their two halves, or of a backup of these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.converge.split_region import SplitRegion
from hdet_kernels.converge.summary import Checksum
from hdet_kernels.converge.trade import Trade
from hdet_kernels.converge.transport import Cost, Transport
from hdet_kernels.converge.two_phase import write_all
from hdet_kernels.ops.halves import read_halves, write_halves
from hdet_kernels.tensors import wide_dtype


@dataclass
class SplitMasters:
    """The split masters of a process: 1-D, or [rows, n] where it holds several replicas.

    Attributes:
        halves: bf16 parameters and the int16 lower halves of their masters.
        bucket_bytes: the most bytes of one row that are joined at a time.
        backend: of the conversions; see :func:`hdet_kernels.use_backend`.
        norm: that of the means of the latest average; NaN before.
        kept: the means of the latest average that are not written yet: by number of the halves and by first element.
    """

    halves: Sequence[tuple[Tensor, Tensor]] = ()
    bucket_bytes: int = 0
    backend: str | None = None
    norm: float = field(default=math.nan, init=False)
    kept: list[dict[int, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.kept = [{} for _ in self.halves]

    @property
    def params(self) -> list[Tensor]:
        return [param for param, _ in self.halves]

    @property
    def regions(self) -> list[SplitRegion]:
        """The halves as regions. What is kept is read and written in their place."""
        return [SplitRegion(*pair, kept, self.backend) for pair, kept in zip(self.halves, self.kept, strict=True)]

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the halves in parts, each of one bucket in float32."""
        for _, _, param, low in self._places():
            yield param, low

    def _places(self) -> Iterator[tuple[dict[int, Tensor], int, Tensor, Tensor]]:
        """Yield every part with the place for its mean: a dict and the key, which is the part's first element."""
        elements = max(self.bucket_bytes // torch.float32.itemsize, 1)
        for kept, pair in zip(self.kept, self.halves, strict=True):
            starts = itertools.count(step=elements)
            for start, param, low in zip(starts, *(half.split(elements, dim=-1) for half in pair), strict=False):
                yield kept, start, param, low

    def checksum(self, checksum: Checksum, device: torch.device) -> Tensor:
        """Return the norm of every row of the masters, [rows], on ``device``; see :class:`.summary.Checksum`."""
        total = torch.zeros(checksum.rows, dtype=wide_dtype(device), device=device)
        for halves in self.parts():
            total = torch.hypot(total, checksum([read_halves(*halves, backend=self.backend)], device))
        return total

    def average(
        self, transport: Transport, trade: Trade | None, included: NDArray[np.bool_], *, rescaled: bool, deferred: bool
    ) -> Cost:
        """Average the masters over the ``included`` replicas, [replicas], part by part. Collective.

        Args:
            transport, included, rescaled: see :meth:`.transport.Transport.average`.
            trade: averages instead of the transport, if given.
            deferred: whether the means are kept until :meth:`write_kept` is called, which takes no other process.
                Otherwise each part is written before the next one is averaged.
        """
        cost, norms = Cost(), list[Tensor]()
        for kept, start, *halves in self._places():
            means = read_halves(*halves, backend=self.backend)
            if trade is None:
                cost += transport.average([[means]], included, rescaled=rescaled)
            else:
                more, write = trade.average([[means]], included, rescaled=rescaled, measured=0)
                write()
                cost += more
            one = means[0] if means.dim() > 1 else means  # all rows are the mean now
            norms.append(transport.checksum_of_one([one], one.device))
            if deferred:
                kept[start] = means
            else:
                write_halves(means, *halves, backend=self.backend)
        self.norm = math.hypot(*map(float, norms))
        return cost

    def write_kept(self) -> None:
        """Write the means that are kept, and keep them no longer."""
        steps = [
            partial(
                write_halves,
                means,
                *(half[..., start : start + means.shape[-1]] for half in pair),
                backend=self.backend,
            )
            for pair, kept in zip(self.halves, self.kept, strict=True)
            for start, means in kept.items()
        ]
        write_all(steps)
        for kept in self.kept:
            kept.clear()
