"""Cases of packing: tensors and a staging buffer with marked memory around them, and the expected results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import CHUNK
from hdet_kernels.ops.pack import Pack
from hdet_kernels.tensors import Piece
from tests.ops.cases import BF16, FP16, FP32, FP64, POISON, SENTINEL, assert_same

DTYPES = {
    "fp32": (FP32, (FP32,)),
    "bf16": (FP32, (BF16,)),
    "fp16": (FP32, (FP16,)),
    "mixed": (FP32, (FP32, BF16, FP16)),
    "fp64": (FP64, (FP64,)),
}
# Whole chunks where both sides allow vectors, where one does, where neither does; an empty tensor; odd tails.
SIZES = (CHUNK + 8, 2 * CHUNK + 9, 0, 1, 3, CHUNK - 1, 40)
# For Triton's interpreter, which is slow: whole blocks of both shapes, with and without vectors, and tails.
INTERPRETED_SIZES = (CHUNK + 8, 521, 0, 1, 3, 511)
GAP = 8


@dataclass
class Case:
    """Tensors and a staging buffer inside larger memory.

    Memory around buffers that are read holds NaN, memory around buffers that are written a sentinel. Every other tensor
    starts at an address that is no multiple of 16.
    """

    tensors: list[Tensor]
    around: list[Tensor]
    staging: Tensor
    around_staging: Tensor
    pieces: list[Piece]
    rows: int

    @property
    def numels(self) -> list[int]:
        return [tensor.shape[-1] for tensor in self.tensors]

    def pack(self, backend: str) -> Pack:
        staging = self.staging
        return Pack(self.numels, self.pieces, staging.device, staging.dtype, rows=self.rows, backend=backend)

    def surround(self, tensors: float, staging: float) -> None:
        """Fill the memory around the tensors and around the staging buffer, and keep their contents."""
        both = zip([*self.tensors, self.staging], [*self.around, self.around_staging], strict=True)
        for inner, outer in both:
            kept = inner.clone()
            outer.fill_(staging if outer is self.around_staging else tensors)
            inner.copy_(kept)

    def assert_only_inside_written(self, what: Sequence[tuple[Tensor, Tensor]]) -> None:
        for inner, outer in what:
            kept = inner.clone()
            inner.fill_(SENTINEL)
            assert (outer == SENTINEL).all(), "something was written beside a buffer"
            inner.copy_(kept)


def make_case(
    sizes: Sequence[int],
    kinds: Sequence[torch.dtype],
    wide: torch.dtype,
    device: str,
    *,
    rows: int = 1,
    pieces: Sequence[Piece] | None = None,
    shift: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(sum(sizes) + rows)
    tensors, around = [], []
    for index, size in enumerate(sizes):
        start, count = GAP + index % 2, rows * size
        values = torch.randn(count, generator=generator, dtype=FP64)
        values[::7] *= 1e-3
        values[1::11] = -0.0
        outer = torch.zeros(count + 2 * GAP + 1, dtype=kinds[index % len(kinds)], device=device)
        inner = outer[start : start + count]
        inner.copy_(values)
        tensors.append(inner if rows == 1 and index % 3 else inner.view(rows, size))
        around.append(outer)
    chosen = [Piece(i, 0, size) for i, size in enumerate(sizes)] if pieces is None else list(pieces)
    total = sum(piece.stop - piece.start for piece in chosen)
    outer = torch.zeros(total + 2 * GAP, dtype=wide, device=device)
    return Case(tensors, around, outer[GAP + shift : GAP + shift + total], outer, chosen, rows)


def packed(case: Case, included: Sequence[bool] | None, divisor: float) -> Tensor:
    """Return the expected staging buffer, computed in plain torch on the CPU."""
    taken = [row for row in range(case.rows) if included is None or included[row]]
    parts = [torch.zeros(0, dtype=case.staging.dtype)]
    for piece in case.pieces:
        values = case.tensors[piece.index].cpu().view(case.rows, -1) if piece.stop else torch.zeros(case.rows, 0)
        wide = values[:, piece.start : piece.stop].to(case.staging.dtype)
        total = torch.zeros_like(wide[0]) if not taken else wide[taken[0]].clone()
        for row in taken[1:]:
            total = total + wide[row]
        parts.append(total / torch.tensor(divisor, dtype=wide.dtype))
    return torch.cat(parts)


def unpacked(case: Case, divisor: float) -> list[Tensor]:
    """Return the expected tensors after unpacking, computed in plain torch on the CPU."""
    tensors = [tensor.cpu().clone().view(case.rows, tensor.shape[-1]) for tensor in case.tensors]
    values, offset = case.staging.cpu(), 0
    for piece in case.pieces:
        count = piece.stop - piece.start
        quotient = values[offset : offset + count] / torch.tensor(divisor, dtype=values.dtype)
        tensors[piece.index][:, piece.start : piece.stop] = quotient.to(tensors[piece.index].dtype)
        offset += count
    return [new.view(old.shape) for new, old in zip(tensors, case.tensors, strict=True)]


def assert_bits(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Assert that tensors are equal bit for bit, including the signs of zeros."""
    assert_same([tensor.cpu() for tensor in mine], theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a.cpu().signbit(), b.signbit()), "a zero has another sign"


def round_trip(case: Case, backend: str, included: Sequence[bool] | None = None, divisor: float = 1.0) -> None:
    """Pack with NaN around the tensors and in the excluded rows, then unpack other numbers, and check both results."""
    pack = case.pack(backend)
    expected = packed(case, included, divisor)
    case.surround(POISON, SENTINEL)
    kept = [tensor.clone() for tensor in case.tensors]
    for row, taken in enumerate([] if included is None else included):
        for tensor in case.tensors:
            if not taken and tensor.numel():
                tensor.view(case.rows, -1)[row] = POISON
    pack.pack(case.tensors, case.staging, included, divisor)
    assert_bits([case.staging], [expected])
    case.assert_only_inside_written([(case.staging, case.around_staging)])

    case.staging.mul_(1.7)
    for tensor, values in zip(case.tensors, kept, strict=True):
        tensor.copy_(values)
    restored = unpacked(case, divisor)
    case.surround(SENTINEL, POISON)
    pack.unpack(case.tensors, case.staging, divisor)
    assert_bits(case.tensors, restored)
    case.assert_only_inside_written(list(zip(case.tensors, case.around, strict=True)))
