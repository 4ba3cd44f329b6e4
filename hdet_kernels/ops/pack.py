"""Packing: pieces of tensors that lie anywhere, gathered into one contiguous staging buffer and scattered back.

Each direction is one launch, whatever the number of tensors. A tensor may hold several replicas as its rows: packing
takes the mean of the included rows, and unpacking writes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hdet_kernels.ops.backends import implementation, resolve
from hdet_kernels.ops.piece_table import STAGED_DTYPES, PieceTable
from hdet_kernels.tensors import Piece

#: The most rows: a 64-bit mask says which of them are included. ``kMostRows`` of ``csrc/pack.h``.
MOST_ROWS = 64


class Pack:
    """Copies between pieces of tensors and one staging buffer; checked once, called often.

    The staging buffer has :attr:`numel` elements, the pieces one after another. A float32 staging buffer takes float32,
    bfloat16 and float16 tensors in any mix, a float64 one takes float64 tensors. Tensors without a piece are ignored.

    Args:
        numels: For each tensor, the elements of one of its rows.
        pieces: The pieces, in the order of the staging buffer. They must not overlap.
        device: The device of tensors and staging buffer.
        dtype: The dtype of the staging buffer.
        rows: The number of replicas that each tensor holds as its rows.
        backend: A backend by name; the fastest available by default.

    Raises:
        ValueError: If pieces overlap or reach beyond a tensor, or ``rows`` is out of range.
        TypeError: If there is no staging buffer of ``dtype``.
    """

    def __init__(
        self,
        numels: Sequence[int],
        pieces: Sequence[Piece],
        device: torch.device,
        dtype: torch.dtype,
        *,
        rows: int = 1,
        backend: str | None = None,
    ) -> None:
        if dtype not in STAGED_DTYPES:
            known = " or ".join(map(str, STAGED_DTYPES))
            raise TypeError(f"a staging buffer must be {known}, got {dtype}; 16-bit tensors are summed in float32")
        if not 1 <= rows <= MOST_ROWS:
            raise ValueError(f"rows must be 1 to {MOST_ROWS}, got {rows}; stack fewer replicas in one process")
        _check_pieces(numels, pieces)
        self.backend = resolve(device, backend)
        self.table = PieceTable(numels, pieces, rows, device, dtype)
        self.device, self.dtype, self.rows, self.numel = self.table.device, dtype, rows, self.table.numel
        self._limits = torch.finfo(dtype).tiny, torch.finfo(dtype).max
        self._module = implementation(self.backend, "pack")

    @torch.no_grad()
    def pack(
        self,
        tensors: Sequence[Tensor],
        staging: Tensor,
        included: Sequence[bool] | None = None,
        divisor: float = 1.0,
    ) -> None:
        """Set staging[k] to (Σ tensor[r, e] over the included rows r, in ascending order) / divisor.

        The sum is formed in the dtype of the staging buffer.

        Args:
            tensors: Contiguous tensors. With one row, of any shape of ``numel`` elements; with several, [rows, …] with
                ``numel`` elements in each row.
            staging: The staging buffer.
            included: For each row whether it is included; ``None`` includes all. Other rows are not read. If no row is
                included, the staging buffer becomes zeros.
            divisor: A positive number.
        """
        matched = self.table.match(tensors)
        self._check_staging(staging, divisor)
        mask = self._mask(included)
        if mask == 0:
            staging.zero_()
        else:
            self._module.pack(self.table, matched, mask, divisor, staging)

    @torch.no_grad()
    def unpack(self, tensors: Sequence[Tensor], staging: Tensor, divisor: float = 1.0) -> None:
        """Set tensor[r, e] to staging[k] / divisor for every row r, rounded to the nearest number of its dtype.

        Ties round to even. The arguments are those of :meth:`pack`.
        """
        matched = self.table.match(tensors)
        self._check_staging(staging, divisor)
        self._module.unpack(self.table, matched, divisor, staging)
        # The operators write through addresses, which autograd does not see. As after any write in place, it must learn
        # that tensors which it saved have changed.
        if not any(map(Tensor.is_inference, matched.tensors)):  # inference tensors have no version
            torch.autograd.graph.increment_version(matched.tensors)

    def _mask(self, included: Sequence[bool] | None) -> int:
        """Return a mask with a bit for each included row, as a signed 64-bit number."""
        if included is None:
            mask = (1 << self.rows) - 1
        elif len(included) == self.rows:
            mask = sum(1 << row for row, taken in enumerate(included) if taken)
        else:
            raise ValueError(f"included must have an entry for each of {self.rows} rows, got {len(included)}")
        return mask - (1 << MOST_ROWS) if mask >> (MOST_ROWS - 1) else mask

    def _check_staging(self, staging: Tensor, divisor: float) -> None:
        got = staging.dtype, staging.device, tuple(staging.shape)
        if got != (self.dtype, self.device, (self.numel,)) or not staging.is_contiguous():
            raise ValueError(
                f"the staging buffer must be {self.numel} contiguous elements of {self.dtype} on {self.device}, got "
                f"{staging.dtype} of shape {tuple(staging.shape)} on {staging.device}; pass a slice of a longer buffer"
            )
        least, most = self._limits
        if not least <= divisor <= most:
            raise ValueError(f"the divisor must be a positive number that {self.dtype} can hold, got {divisor}")


def _check_pieces(numels: Sequence[int], pieces: Sequence[Piece]) -> None:
    for number, piece in enumerate(pieces):
        if not 0 <= piece.index < len(numels):
            raise ValueError(f"piece {number} is of tensor {piece.index}, and there are {len(numels)} tensors")
        if not 0 <= piece.start <= piece.stop <= numels[piece.index]:
            raise ValueError(
                f"piece {number} is elements {piece.start} to {piece.stop} of tensor {piece.index}, which has "
                f"{numels[piece.index]}"
            )
    filled = [piece for piece in pieces if piece.stop > piece.start]
    for before, after in pairwise(sorted(filled, key=lambda piece: (piece.index, piece.start))):
        if before.index == after.index and after.start < before.stop:
            raise ValueError(
                f"pieces {before} and {after} overlap; unpacking would write the same elements twice, so every element "
                "may be in one piece only"
            )
