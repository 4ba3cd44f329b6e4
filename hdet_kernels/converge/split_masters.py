"""Split masters in an average: joined to float32 a bucket at a time, instead of all of them at once.

The mean of a part is split again as soon as it is known, so that one bucket of float32 exists at a time. Where an
average must be all or nothing, the old and the new value of every parameter have to exist until the last part has
arrived. Then the means are kept, 4 bytes a parameter: as many as those of their two halves, or of a backup of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.converge.summary import Checksum
from hdet_kernels.converge.trade import Trade
from hdet_kernels.converge.transport import Cost, Transport
from hdet_kernels.converge.two_phase import write_all
from hdet_kernels.split_master import read_split, write_split
from hdet_kernels.tensors import wide_dtype


@dataclass
class SplitMasters:
    """The split masters of a process: 1-D, or [rows, n] where it holds several replicas.

    Attributes:
        halves: bf16 parameters and the int16 lower halves of their masters.
        bucket_bytes: the most bytes of one row that are joined at a time.
        norm: that of the means of the latest average; NaN before.
    """

    halves: Sequence[tuple[Tensor, Tensor]] = ()
    bucket_bytes: int = 0
    norm: float = field(default=math.nan, init=False)

    @property
    def params(self) -> list[Tensor]:
        return [param for param, _ in self.halves]

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the halves in parts, each of one bucket in float32."""
        for param, low in self.halves:
            elements = max(self.bucket_bytes // torch.float32.itemsize, 1)
            yield from zip(param.split(elements, dim=-1), low.split(elements, dim=-1), strict=True)

    def checksum(self, checksum: Checksum, device: torch.device) -> Tensor:
        """Return the norm of every row of the masters, [rows], on ``device``; see :class:`.summary.Checksum`."""
        total = torch.zeros(checksum.rows, dtype=wide_dtype(device), device=device)
        for halves in self.parts():
            total = torch.hypot(total, checksum([read_split(*halves)], device))
        return total

    def average(
        self, transport: Transport, trade: Trade | None, included: NDArray[np.bool_], *, rescaled: bool, deferred: bool
    ) -> tuple[Cost, Callable[[], None]]:
        """Average the masters over the ``included`` replicas, [replicas], part by part. Collective.

        Args:
            transport, included, rescaled: see :meth:`.transport.Transport.average`.
            trade: averages instead of the transport, if given.
            deferred: whether the means are kept until the returned function is called. Otherwise each part is written
                before the next one is averaged.

        Returns:
            The cost, and a function that writes what was deferred. That takes no other process.
        """
        cost, norms, deferrals = Cost(), list[Tensor](), list[Callable[[], None]]()
        for halves in self.parts():
            means = read_split(*halves)
            if trade is None:
                cost += transport.average([[means]], included, rescaled=rescaled)
            else:
                more, write = trade.average([[means]], included, rescaled=rescaled, measured=0)
                write()
                cost += more
            one = means[0] if means.dim() > 1 else means  # all rows are the mean now
            norms.append(transport.checksum_of_one([one], one.device))
            if deferred:
                deferrals.append(partial(write_split, means, *halves))
            else:
                write_split(means, *halves)
        self.norm = math.hypot(*map(float, norms))
        return cost, partial(write_all, deferrals)
