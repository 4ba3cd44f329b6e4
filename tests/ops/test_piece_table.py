"""The table of a pack: its chunks, the matching of tensors, and their addresses."""

from __future__ import annotations

import pytest
import torch

from hdet_kernels.ops.chunks import CHUNK, GRADIENT_DTYPES
from hdet_kernels.ops.piece_table import PieceTable
from hdet_kernels.tensors import Piece

CPU = torch.device("cpu")


def table_of(*pieces: Piece, rows: int = 1) -> PieceTable:
    return PieceTable([10, CHUNK + 5, 7], pieces, rows, CPU, torch.float32)


def test_chunks_follow_the_order_of_the_staging_buffer() -> None:
    table = table_of(Piece(1, 2, CHUNK + 4), Piece(0, 3, 3), Piece(2, 0, 7), Piece(1, 0, 2))
    assert table.numel == CHUNK + 2 + 7 + 2
    assert table.indices == [1, 2], "a tensor that has only empty pieces has no slot"
    assert tuple(table.spans) == ([0, 1, 0], [2, 0, 0], [CHUNK + 4, 7, 2])
    assert table.chunks.tolist() == [
        [0, 2, CHUNK, 0],
        [CHUNK, CHUNK + 2, 2, 0],
        [CHUNK + 2, 0, 7, 1],
        [CHUNK + 9, 0, 2, 0],
    ]
    assert table.strides.tolist() == [CHUNK + 5, 7]


def test_a_table_without_pieces() -> None:
    table = table_of()
    assert (table.numel, table.indices, tuple(table.chunks.shape)) == (0, [], (0, 4))
    assert table.match([torch.zeros(1)] * 3).tensors == []


def test_the_places_are_addresses_and_dtypes_and_follow_the_tensors() -> None:
    table = table_of(Piece(0, 0, 10), Piece(2, 0, 7))
    for dtypes in ((torch.float32, torch.bfloat16), (torch.float16, torch.float32)):
        tensors = [torch.zeros(10, dtype=dtypes[0]), torch.zeros(0), torch.zeros(7, dtype=dtypes[1])]
        matched = table.match(tensors)
        assert [tensor.data_ptr() for tensor in matched.tensors] == matched.addresses
        expected = [[tensors[i].data_ptr(), GRADIENT_DTYPES.index(tensors[i].dtype)] for i in (0, 2)]
        assert table.point_at(matched).tolist() == expected


def test_places_are_written_only_when_one_changed() -> None:
    table = table_of(Piece(0, 0, 10))
    tensors = [torch.zeros(10), torch.zeros(0), torch.zeros(0)]
    table.point_at(table.match(tensors)).zero_()
    assert table.point_at(table.match(tensors)).tolist() == [[0, 0]], "equal addresses must not be copied again"


def test_tensors_of_several_rows_have_their_rows_first() -> None:
    table = table_of(Piece(0, 0, 10), rows=2)
    others = [torch.zeros(0), torch.zeros(0)]
    assert table.match([torch.zeros(2, 10), *others]).tensors[0].shape == (2, 10)
    for shape in ((10, 2), (20,), (2, 9)):
        with pytest.raises(ValueError, match=r"2 rows of 10 elements, so its shape must be \(2, 10\)"):
            table.match([torch.zeros(shape), *others])
    with pytest.raises(ValueError, match="is of 3 tensors, got 1"):
        table.match([torch.zeros(2, 10)])
