"""Packing: pieces of tensors that lie anywhere, gathered into one contiguous staging buffer and scattered back.

Each direction is one launch, whatever the number of tensors. A tensor may hold several replicas as its rows: packing
takes the mean of the included rows, and unpacking writes all of them.
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

from hdet_kernels.ops.backends import implementation, resolve
from hdet_kernels.ops.chunks import GRADIENT_DTYPES, chunks_of
from hdet_kernels.ops.table import Staged
from hdet_kernels.tensors import Piece

#: The most rows: a 64-bit mask says which of them are included. ``kMostRows`` of ``csrc/pack.h``.
MOST_ROWS = 64

#: By dtype of the staging buffer, the dtypes of the tensors.
STAGED_DTYPES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.float64: (torch.float64,),
}

_dtype_of = attrgetter("dtype")


class MatchedTensors(NamedTuple):
    """Tensors that were checked against their slots, with their addresses and dtypes.

    :meth:`Pack.match` makes them, so their addresses are safe to hand to a kernel.
    """

    tensors: Sequence[Tensor]
    addresses: list[int]
    dtypes: list[torch.dtype]


class Pack:
    """Copies between pieces of tensors and one staging buffer; checked once, called often.

    The staging buffer has :attr:`numel` elements, the pieces one after another. A float32 staging buffer takes float32,
    bfloat16 and float16 tensors in any mix, a float64 one takes float64 tensors. Tensors without a piece are ignored.
    These tables on the device describe the pieces, where a *slot* is a tensor that has a piece:

    ========== =========== ============================================================== ========================
    table      shape       an entry                                                       is written
    ========== =========== ============================================================== ========================
    chunks     [chunks, 4] offset in the staging buffer, offset in a replica, count, slot once
    strides    [slots]     elements from one replica of the tensor to the next            once
    places     [slots, 2]  address of the tensor; index of its dtype in GRADIENT_DTYPES   when a tensor has moved
    ========== =========== ============================================================== ========================

    Args:
        numels: For each tensor, the elements of one of its rows.
        pieces: The pieces, in the order of the staging buffer. They must not overlap.
        device, dtype: Those of the staging buffer; the tensors are on the same device.
        rows: The number of replicas that each tensor holds as its rows.
        backend: A backend by name; the fastest available by default.
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
        self.rows, self.device, self.dtype = rows, torch.empty(0, device=device).device, dtype
        filled = [piece for piece in pieces if piece.stop > piece.start]
        # The index of each slot's tensor.
        self.indices = sorted({piece.index for piece in filled})
        slot_of = {index: slot for slot, index in enumerate(self.indices)}
        #: Of each piece the slot of the tensor, and the first and last element (excluded).
        self.spans = [(slot_of[piece.index], piece.start, piece.stop) for piece in filled]
        slots, starts, stops = np.array(self.spans, dtype=np.int64).reshape(-1, 3).T
        counts = stops - starts
        self.numel = int(counts.sum())
        spans = np.stack([np.cumsum(counts) - counts, starts, counts, slots], axis=1)
        self.chunks = torch.from_numpy(chunks_of(spans)).to(device)
        strides = [numels[index] for index in self.indices]
        self.strides = torch.tensor(strides, dtype=torch.int64, device=device)
        self._places = Staged((len(self.indices), 2), torch.int64, device)
        self._known: tuple[list[int], list[torch.dtype], NDArray[np.int64]] | None = None
        self._count = len(numels)
        self._counts = [rows * stride for stride in strides]
        self._all = self.indices == list(range(len(numels)))
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
        matched = self.match(tensors)
        self._check_staging(staging, divisor)
        mask = self._mask(included)
        if mask == 0:
            staging.zero_()
        else:
            self._module.pack(self, matched, mask, divisor, staging)

    @torch.no_grad()
    def unpack(self, tensors: Sequence[Tensor], staging: Tensor, divisor: float = 1.0) -> None:
        """Set tensor[r, e] to staging[k] / divisor for every row r, rounded to the nearest number of its dtype.

        Ties round to even. The arguments are those of :meth:`pack`.
        """
        matched = self.match(tensors)
        self._check_staging(staging, divisor)
        self._module.unpack(self, matched, divisor, staging)
        # The operators write through addresses, which autograd does not see. As after any write in place, it must learn
        # that tensors which it saved have changed.
        if not any(map(Tensor.is_inference, matched.tensors)):  # inference tensors have no version
            torch.autograd.graph.increment_version(matched.tensors)

    def match(self, tensors: Sequence[Tensor]) -> MatchedTensors:
        """Check the tensors, one for each of ``numels``, and return those that have a piece."""
        if len(tensors) != self._count:
            raise ValueError(f"this Pack is of {self._count} tensors, got {len(tensors)}; pass all of them, in order")
        used = tensors if self._all else [tensors[index] for index in self.indices]
        dtypes = list(map(_dtype_of, used))
        try:
            addresses = list(map(Tensor.data_ptr, used))
            if all(addresses) and self._are_sound(used) and set(dtypes) <= set(STAGED_DTYPES[self.dtype]):
                return MatchedTensors(used, addresses, dtypes)
        except (RuntimeError, TypeError):  # sparse tensors have no address, and scalars no length
            pass
        for slot, tensor in enumerate(used):
            self._check(slot, tensor)
        return MatchedTensors(used, list(map(Tensor.data_ptr, used)), dtypes)

    def point_at(self, matched: MatchedTensors) -> Tensor:
        """Return the ``places`` table on the device. It is written only if an entry has changed."""
        if self._known is None or self._known[:2] != matched[1:]:
            table = np.empty((len(self.indices), 2), dtype=np.int64)
            table[:, 0] = np.frombuffer(array("q", matched.addresses), dtype=np.int64)  # faster than from a list
            table[:, 1] = list(map(GRADIENT_DTYPES.index, matched.dtypes))
            self._known = matched.addresses, matched.dtypes, table
        self._places.write(self._known[2].tobytes())
        return self._places.tensor

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

    def _are_sound(self, used: Sequence[Tensor]) -> bool:
        """Return whether all sizes, layouts and devices are right, without a Python statement for each tensor."""
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
                f"{(self.rows, count // self.rows)}: pass such a view, or build a new Pack for these tensors"
            )
        if tensor.dtype not in STAGED_DTYPES[self.dtype]:
            known = ", ".join(map(str, STAGED_DTYPES[self.dtype]))
            raise TypeError(
                f"{got}; a staging buffer of {self.dtype} takes {known}: cut the tensors by dtype, as buckets.cut does"
            )
        if tensor.device != self.device:
            raise ValueError(f"{got}; the staging buffer is on {self.device}: they must be together")
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ValueError(
                f"{got}, of layout {tensor.layout} and not contiguous; unpacking must write to the tensor itself: "
                "pass tensors.flat_view(tensor), or make it contiguous before training"
            )
        if tensor.data_ptr() == 0:
            raise ValueError(f"{got}, but has no memory because it was freed; allocate it before packing")


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
