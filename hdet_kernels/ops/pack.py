"""Packing: pieces of tensors that lie anywhere, gathered into one contiguous staging buffer and scattered back.

One launch each way, whatever the number of tensors. Where replicas are stacked in one process, a tensor has a row for
each: packing takes the mean of the chosen rows, unpacking writes all of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels import ops
from hdet_kernels.buckets import Piece
from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.chunks import GRADIENT_DTYPES, chunks_of
from hdet_kernels.ops.table import Staged

#: Rows at most: which of them are included is a number of 64 bits. ``kMostRows`` of ``csrc/pack.h``.
MOST_ROWS = 64

#: By dtype of the staging buffer, the dtypes of the tensors.
DTYPES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.float64: (torch.float64,),
}

_shape_of, _dtype_of, _device_of, _layout_of = map(attrgetter, ("shape", "dtype", "device", "layout"))


class Spans(NamedTuple):
    """One entry a piece: which of the table's tensors, and from where to where in a row of it."""

    slots: list[int]
    starts: list[int]
    stops: list[int]


class PieceTable:
    """What kernels read beside the numbers, on ``device``; ``used`` are the indices of the tensors that have a piece.

    ========== =========== ======================================================== =================
    table      shape       a row                                                    changes
    ========== =========== ======================================================== =================
    chunks     [chunks, 4] offset in the staging buffer, in a row, count, slot      never
    strides    [slots]     elements from a row of a tensor to its next              never
    places     [slots, 2]  address of a tensor; its dtype's index (GRADIENT_DTYPES) when one moved
    ========== =========== ======================================================== =================

    A slot is one of the tensors that are used, in the order of their indices.
    """

    def __init__(self, numels: Sequence[int], pieces: Sequence[Piece], rows: int, device: torch.device) -> None:
        filled = [piece for piece in pieces if piece.stop > piece.start]
        self.rows = rows
        self.used = sorted({piece.index for piece in filled})
        slot_of = {index: slot for slot, index in enumerate(self.used)}
        self.spans = Spans(
            [slot_of[piece.index] for piece in filled],
            [piece.start for piece in filled],
            [piece.stop for piece in filled],
        )
        slots, starts, stops = np.array(self.spans, dtype=np.int64).reshape(3, -1)
        counts = stops - starts
        self.numel = int(counts.sum())
        spans = np.stack([np.cumsum(counts) - counts, starts, counts, slots], axis=1)
        self.chunks = torch.from_numpy(chunks_of(spans)).to(device)
        self.strides = torch.tensor([numels[index] for index in self.used], dtype=torch.int64).to(device)
        self._places = Staged((len(self.used), 2), torch.int64, device)
        self._known: tuple[list[int], list[torch.dtype], NDArray[np.int64]] | None = None

    def point_at(self, tensors: Sequence[Tensor]) -> Tensor:
        """The places of the tensors that are used, on the device; written only if one changed."""
        addresses, dtypes = list(map(Tensor.data_ptr, tensors)), list(map(_dtype_of, tensors))
        if self._known is None or self._known[:2] != (addresses, dtypes):
            table = np.empty((len(tensors), 2), dtype=np.int64)
            table[:, 0] = np.frombuffer(array("q", addresses), dtype=np.int64)
            table[:, 1] = [GRADIENT_DTYPES.index(dtype) for dtype in dtypes]
            self._known = addresses, dtypes, table
        self._places.write(self._known[2])
        return self._places.tensor


class Pack:
    """The pieces of tensors that share one staging buffer; checked once, called often.

    ``pieces`` name elements of tensors, of which number ``i`` has ``numels[i]`` of them in each of its ``rows``; the
    staging buffer, of ``dtype`` and :attr:`numel` elements, holds them one after another. A float32 staging buffer
    takes float32, bfloat16 and float16 tensors in any mix, a float64 one float64 tensors. Tensors that no piece names
    are not looked at.
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
        if dtype not in DTYPES:
            known = " or ".join(map(str, DTYPES))
            raise TypeError(f"a staging buffer must be {known}, got {dtype}; sums of halves are formed in float32")
        if not 1 <= rows <= MOST_ROWS:
            raise ValueError(f"rows must be 1 to {MOST_ROWS}, got {rows}; stack fewer replicas in one process")
        _check_pieces(numels, pieces)
        self.backend = resolve(device, backend)
        self.device, self.dtype, self.rows = torch.empty(0, device=device).device, dtype, rows
        self._table = PieceTable(numels, pieces, rows, self.device)
        self.numel = self._table.numel
        self._count = len(numels)
        self._numels = [numels[index] for index in self._table.used]
        #: What the shapes of the tensors may be.
        self._shapes: list[list[tuple[int, ...]]] = [[(rows, numel) for numel in self._numels]]
        if rows == 1:
            self._shapes.append([(numel,) for numel in self._numels])
        self._limits = torch.finfo(dtype).tiny, torch.finfo(dtype).max
        self._module = ops._implementation(self.backend)

    @torch.no_grad()
    def pack(
        self,
        tensors: Sequence[Tensor],
        staging: Tensor,
        included: Sequence[bool] | None = None,
        divisor: float = 1.0,
    ) -> None:
        """staging[k] = (Σ tensor[r, e] over the included rows r, in ascending order) / divisor.

        In the dtype of the staging buffer. ``tensors`` are contiguous, [numel] or [1, numel] for one row and
        [rows, numel] for more. A row that is not included is not read; ``None`` includes all. Without any row the
        staging buffer becomes zeros.
        """
        used = self._checked(tensors)
        self._check_staging(staging, divisor)
        mask = self._mask(included)
        if mask == 0:
            staging.zero_()
        else:
            self._module.pack(self._table, used, mask, divisor, staging)

    @torch.no_grad()
    def unpack(self, tensors: Sequence[Tensor], staging: Tensor, divisor: float = 1.0) -> None:
        """tensor[r, e] = staging[k] / divisor for every row r, rounded to the tensor's dtype (nearest, ties to even).

        ``tensors`` as in :meth:`pack`.
        """
        used = self._checked(tensors)
        self._check_staging(staging, divisor)
        self._module.unpack(self._table, used, divisor, staging)
        # As after any other write in place, autograd is to see that what it saved is not what it was. The operators
        # that reach tensors through their addresses do not tell it.
        torch.autograd.graph.increment_version([tensor for tensor in used if not tensor.is_inference()])

    def _mask(self, included: Sequence[bool] | None) -> int:
        """A bit for each row that is included, as a signed number of 64 bits."""
        if included is None:
            mask = (1 << self.rows) - 1
        elif len(included) == self.rows:
            mask = sum(1 << row for row, taken in enumerate(included) if taken)
        else:
            raise ValueError(f"included must have an entry for each of {self.rows} rows, got {len(included)}")
        return mask - (1 << MOST_ROWS) if mask >> (MOST_ROWS - 1) else mask

    def _checked(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that are used."""
        if len(tensors) != self._count:
            raise ValueError(f"this Pack is of {self._count} tensors, got {len(tensors)}; pass all of them, in order")
        used = [tensors[index] for index in self._table.used]
        # The usual case, without a line of Python for each tensor.
        if (
            set(map(_layout_of, used)) <= {torch.strided}
            and list(map(_shape_of, used)) in self._shapes
            and set(map(_dtype_of, used)) <= set(DTYPES[self.dtype])
            and set(map(_device_of, used)) <= {self.device}
            and all(map(Tensor.is_contiguous, used))
            and all(map(Tensor.data_ptr, used))
        ):
            return used
        for index, tensor, numel in zip(self._table.used, used, self._numels, strict=True):
            self._check_tensor(index, tensor, numel)
        return used

    def _check_tensor(self, index: int, tensor: Tensor, numel: int) -> None:
        shapes = [(1, numel), (numel,)] if self.rows == 1 else [(self.rows, numel)]
        got = f"tensor {index} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        if tuple(tensor.shape) not in shapes:
            raise ValueError(
                f"{got}; this Pack is of {self.rows} rows of {numel} elements, so its shape must be {shapes[-1]}: "
                "pass a view, such as buckets.flat_view makes, or build the Pack anew"
            )
        if tensor.dtype not in DTYPES[self.dtype]:
            known = ", ".join(map(str, DTYPES[self.dtype]))
            raise TypeError(
                f"{got}; a staging buffer of {self.dtype} takes {known}: cut the tensors by dtype, as buckets.cut does"
            )
        if tensor.device != self.device:
            raise ValueError(f"{got}; the staging buffer is on {self.device}: they must be together")
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ValueError(
                f"{got}, of layout {tensor.layout} and not contiguous; what is unpacked must reach the tensor itself: "
                "pass buckets.flat_view(tensor), or make it contiguous before training"
            )
        if tensor.data_ptr() == 0:
            raise ValueError(f"{got}, but has no memory; it was freed: allocate it before it is packed")

    def _check_staging(self, staging: Tensor, divisor: float) -> None:
        got = staging.dtype, staging.device, tuple(staging.shape)
        if got != (self.dtype, self.device, (self.numel,)) or not staging.is_contiguous():
            raise ValueError(
                f"the staging buffer must be {self.numel} contiguous elements of {self.dtype} on {self.device}, got "
                f"{staging.dtype} of shape {tuple(staging.shape)} on {staging.device}; of a longer buffer pass a slice"
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
