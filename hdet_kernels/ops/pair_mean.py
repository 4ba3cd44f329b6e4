"""The mean of two replicas: tensors of this process, wherever they lie, and their values in another one.

With the extension it is one pass over the memory of both, in which the tensors are overwritten and the distance of the
two is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hdet_kernels.ops.backends import implementation
from hdet_kernels.ops.pack import Pack


class PairMean:
    """Sets CPU tensors to (own + received) / 2, all of them or, if an error comes first, none.

    A signal may interrupt Python between any two operations. :meth:`write` can be called again then, and completes what
    was begun: no tensor is averaged twice.

    Args:
        pack: The pack of the tensors, of one row.
        tensors: The tensors, as :meth:`Pack.pack` takes them.
        received: The values of the other replica, in the order of the staging buffer of ``pack``.
        measured: The number of elements, from the start of the staging buffer on, that :attr:`squared_distance` is of.
    """

    def __init__(self, pack: Pack, tensors: Sequence[Tensor], received: Tensor, measured: int = 0) -> None:
        self._pack, self._tensors, self._received, self._measured = pack, tensors, received, measured
        self._means: Tensor | None = None
        # 1 once the tensors are written, and the squared distance. The operator that writes the tensors sets both.
        self._result = torch.zeros(2, dtype=torch.float64, device="cpu")

    @property
    def squared_distance(self) -> float:
        """Σ (own − received)² over the measured elements, after :meth:`write`."""
        return float(self._result[1])

    @torch.no_grad()
    def write(self) -> None:
        """Write the means to the tensors; nothing if that was done before."""
        if self._result[0]:
            return
        if self._pack.backend == "cpp":
            self._write_in_one_pass()
        else:
            self._write_in_steps()

    def _write_in_one_pass(self) -> None:
        table = self._pack.table
        matched = table.match(self._tensors)
        # The operator writes through addresses, which autograd does not see.
        written = matched.tensors
        if any(map(Tensor.is_inference, written)):  # these have no version
            written = [tensor for tensor in written if not tensor.is_inference()]
        increment_version(written)
        compiled = implementation(self._pack.backend, "pair_mean")
        compiled.pair_mean_(table, matched, self._measured, self._received, self._result)

    def _write_in_steps(self) -> None:
        if self._means is None:
            own = torch.empty_like(self._received)
            self._pack.pack(self._tensors, own)
            measured = slice(self._measured)
            distance = torch.linalg.vector_norm(own[measured] - self._received[measured], dtype=torch.float64)
            self._result[1] = distance.square()
            self._means = own.add_(self._received).mul_(0.5)  # the tensors may change now, and only these count
        self._pack.unpack(self._tensors, self._means)
        self._result[0] = 1
