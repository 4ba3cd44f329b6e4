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
from hdet_kernels.ops.backends import resolve
from hdet_kernels.ops.chunks import GRADIENT_DTYPES, chunks_of
from hdet_kernels.ops.table import Staged
from hdet_kernels.tensors import Piece

#: Rows at most: which of them are included is a number of 64 bits. ``kMostRows`` of ``csrc/pack.h``.
MOST_ROWS = 64

#: By dtype of the staging buffer, the dtypes of the tensors.
DTYPES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.float64: (torch.float64,),
}

_dtype_of = attrgetter("dtype")


class Spans(NamedTuple):
    """One entry a piece: which of the table's tensors, and from where to where in a row of it."""

    slots: list[int]
    starts: list[int]
    stops: list[int]


class Matched(NamedTuple):
    """The tensors that have a piece, and where they are. Made by :meth:`PieceTable.match`, which makes it safe to hand
    the addresses to a kernel."""

    tensors: Sequence[Tensor]
    addresses: list[int]
    dtypes: list[torch.dtype]


class PieceTable:
    """What kernels read beside the numbers, on ``device``. A *slot* is a tensor that has a piece.

    ========== =========== ======================================================== =================
    table      shape       a row                                                    changes
    ========== =========== ======================================================== =================
    chunks     [chunks, 4] offset in the staging buffer, in a row, count, slot      never
    strides    [slots]     elements from a row of a tensor to its next              never
    places     [slots, 2]  address of a tensor; its dtype's index (GRADIENT_DTYPES) when one moved
    ========== =========== ======================================================== =================
    """

    def __init__(
        self, numels: Sequence[int], pieces: Sequence[Piece], rows: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.rows, self.device, self.dtype = rows, torch.empty(0, device=device).device, dtype
        filled = [piece for piece in pieces if piece.stop > piece.start]
        #: The tensor of each slot.
        self.indices = sorted({piece.index for piece in filled})
        slot_of = {index: slot for slot, index in enumerate(self.indices)}
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
        strides = [numels[index] for index in self.indices]
        self.strides = torch.tensor(strides, dtype=torch.int64).to(device)
        self._places = Staged((len(self.indices), 2), torch.int64, device)
        self._known: tuple[list[int], list[torch.dtype], NDArray[np.int64]] | None = None
        self._count = len(numels)
        self._counts = [rows * stride for stride in strides]
        self._all = self.indices == list(range(len(numels)))

    def match(self, tensors: Sequence[Tensor]) -> Matched:
        """Check the tensors, one for each of ``numels``, and pick those that have a piece."""
        if len(tensors) != self._count:
            raise ValueError(f"this Pack is of {self._count} tensors, got {len(tensors)}; pass all of them, in order")
        used = tensors if self._all else [tensors[index] for index in self.indices]
        dtypes = list(map(_dtype_of, used))
        try:
            addresses = list(map(Tensor.data_ptr, used))
            if all(addresses) and self._are_sound(used) and set(dtypes) <= set(DTYPES[self.dtype]):
                return Matched(used, addresses, dtypes)
        except (RuntimeError, TypeError):  # sparse tensors have no address, and scalars no length
            pass
        for slot, tensor in enumerate(used):
            self._check(slot, tensor)
        return Matched(used, list(map(Tensor.data_ptr, used)), dtypes)

    def point_at(self, matched: Matched) -> Tensor:
        """The places of the tensors on the device, written only if one changed."""
        if self._known is None or self._known[:2] != matched[1:]:
            table = np.empty((len(self.indices), 2), dtype=np.int64)
            table[:, 0] = np.frombuffer(array("q", matched.addresses), dtype=np.int64)  # faster than from a list
            table[:, 1] = list(map(GRADIENT_DTYPES.index, matched.dtypes))
            self._known = matched.addresses, matched.dtypes, table
        self._places.write(self._known[2])
        return self._places.tensor

    def _are_sound(self, used: Sequence[Tensor]) -> bool:
        """Without a line of Python for each tensor, whether they are what they must be."""
        return (
            list(map(Tensor.numel, used)) == self._counts
            and all(map(Tensor.is_contiguous, used))
            and set(map(Tensor.get_device, used)) <= {-1 if self.device.index is None else self.device.index}
            and (self.rows == 1 or set(map(len, used)) <= {self.rows})
        )

    def _check(self, slot: int, tensor: Tensor) -> None:
        count = self._counts[slot]
        got = f"tensor {self.indices[slot]} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        if tensor.numel() != count or (self.rows > 1 and tensor.shape[:1] != (self.rows,)):
            raise ValueError(
                f"{got}; this Pack is of {self.rows} rows of {count // self.rows} elements, so its shape must be "
                f"{(self.rows, count // self.rows)}: pass such a view, or build the Pack for what there is now"
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
        self._table = PieceTable(numels, pieces, rows, device, dtype)
        self.device, self.dtype, self.rows, self.numel = self._table.device, dtype, rows, self._table.numel
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

        In the dtype of the staging buffer. ``tensors`` are contiguous: [numel] or any shape of as many elements for one
        row; [rows, numel] or any shape of as many elements after the first dimension for several. A row that is not
        included is not read; ``None`` includes all. Without any row the staging buffer becomes zeros.
        """
        matched = self._table.match(tensors)
        self._check_staging(staging, divisor)
        mask = self._mask(included)
        if mask == 0:
            staging.zero_()
        else:
            self._module.pack(self._table, matched, mask, divisor, staging)

    @torch.no_grad()
    def unpack(self, tensors: Sequence[Tensor], staging: Tensor, divisor: float = 1.0) -> None:
        """tensor[r, e] = staging[k] / divisor for every row r, rounded to the tensor's dtype (nearest, ties to even).

        ``tensors`` as in :meth:`pack`.
        """
        matched = self._table.match(tensors)
        self._check_staging(staging, divisor)
        self._module.unpack(self._table, matched, divisor, staging)
        # As after any other write in place, autograd is to see that what it saved is not what it was. The operators
        # that reach tensors through their addresses do not tell it.
        if not any(map(Tensor.is_inference, matched.tensors)):  # these have no version
            torch.autograd.graph.increment_version(matched.tensors)

    def _mask(self, included: Sequence[bool] | None) -> int:
        """A bit for each row that is included, as a signed number of 64 bits."""
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
