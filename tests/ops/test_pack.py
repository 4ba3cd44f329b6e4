"""Packing and unpacking: every backend against a formula in plain torch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_kernels.buckets import cut
from hdet_kernels.ops.chunks import CHUNK
from hdet_kernels.ops.pack import MOST_ROWS, Pack
from hdet_kernels.tensors import Piece
from tests.ops.cases import (
    BACKENDS,
    BF16,
    FP16,
    FP32,
    FP64,
    POISON,
    QUICK,
    SENTINEL,
    SOME_OR_EVERY,
    assert_same,
    available,
    interpreted,
    naming,
    share,
)
from tests.ops.pack_cases import DTYPES, INTERPRETED_SIZES, SIZES, assert_bits, make_case, round_trip

# The number of rows, which of them are included, and the divisor.
ROWS = {
    "1": (1, None, 1.0),
    "1-over-3": (1, None, 3.0),
    "2": (2, None, 2.0),
    "3-without-1": (3, (True, False, True), 2.0),
    "8-over-3": (8, None, 3.0),
    "8-one": (8, (False,) * 5 + (True, False, False), 1.0),
    "8-without-3": (8, (False, True, True, False, True, True, False, True), 5.0),
    "11": (11, (True,) * 10 + (False,), 10.0),
}


# The dtypes that are not among the mixed ones; the others alone are left to make test-full.
EACH_DTYPE = [
    pytest.param(*dtypes, id=name, marks=[] if name in ("fp64", "mixed") else pytest.mark.full)
    for name, dtypes in DTYPES.items()
]


def sizes_for(backend: tuple[str, str]) -> tuple[int, ...]:
    return INTERPRETED_SIZES if interpreted(backend) else SIZES


@SOME_OR_EVERY
@pytest.mark.parametrize("choice", ROWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packing_and_unpacking(backend: tuple[str, str], choice: str, every: bool) -> None:
    """Some: mixed dtypes with every choice of rows, and every dtype with one or more of them."""
    some = {"mixed", *share(list(ROWS).index(choice) % len(DTYPES), len(DTYPES), list(DTYPES))}
    rows, included, divisor = ROWS[choice]
    for kind in DTYPES if every else sorted(some):
        wide, kinds = DTYPES[kind]
        with naming(kind):
            case = make_case(sizes_for(backend), kinds, wide, backend[1], rows=rows)
            round_trip(case, backend[0], included, divisor)


@pytest.mark.parametrize(("wide", "kinds"), EACH_DTYPE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pieces_inside_tensors_and_a_staging_buffer_at_an_odd_address(
    backend: tuple[str, str], wide: torch.dtype, kinds: tuple[torch.dtype, ...]
) -> None:
    where, device = backend
    pieces = [
        Piece(5, 3, 500),  # out of order, and at an odd element
        Piece(0, 4, CHUNK + 5),
        Piece(1, 1, 400),
        Piece(1, 400, 400),
        Piece(1, 401, 521),
        Piece(2, 0, 0),
        Piece(4, 1, 2),
    ]
    for rows, divisor, shift in ((1, 1.0, 0), (1, 3.0, 1), (2, 1.0, 1), (2, 3.0, 0)):
        case = make_case(sizes_for(backend), kinds, wide, device, rows=rows, pieces=pieces, shift=shift)
        round_trip(case, where, None, divisor)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_is_to_the_nearest_even_once(backend: tuple[str, str]) -> None:
    where, device = backend
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 65519.9, 65520.0, 1e-8, 3.4e38, -0.0, 1e-40])
    values = torch.cat([halfway, halfway * 3, torch.tensor([float("inf"), float("-inf"), float("nan")])]).to(device)
    for kind in (BF16, FP16, FP32):
        for divisor in (1.0, 3.0, 0.1, 7.0):
            pack = Pack([values.numel()], [Piece(0, 0, values.numel())], values.device, FP32, backend=where)
            target = torch.zeros(values.numel(), dtype=kind, device=device)
            pack.unpack([target], values, divisor)
            expected = (values.cpu() / torch.tensor(divisor)).to(kind)
            assert_same([target], [expected])
            back = torch.zeros_like(values)
            pack.pack([target], back, divisor=divisor)
            assert_same([back], [expected.float() / torch.tensor(divisor)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_double_divisor_is_used_in_full(backend: tuple[str, str]) -> None:
    where, device = backend
    case = make_case((17,), (FP64,), FP64, device)
    round_trip(case, where, None, 1.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_an_included_row_the_staging_buffer_is_zeros(backend: tuple[str, str]) -> None:
    where, device = backend
    case = make_case((CHUNK + 3, 5), (FP32, BF16), FP32, device, rows=3)
    for tensor in case.tensors:
        tensor.fill_(POISON)
    case.surround(POISON, SENTINEL)
    case.staging.fill_(SENTINEL)
    case.pack(where).pack(case.tensors, case.staging, (False, False, False), 4.0)
    assert_bits([case.staging], [torch.zeros(CHUNK + 8)])
    case.assert_only_inside_written([(case.staging, case.around_staging)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_as_many_rows_as_there_can_be(backend: tuple[str, str]) -> None:
    where, device = backend
    for included in (None, (False,) * (MOST_ROWS - 1) + (True,), (True, False) * (MOST_ROWS // 2)):
        round_trip(make_case((37, 8), (FP32, BF16), FP32, device, rows=MOST_ROWS), where, included, 3.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(), (0, 0)], ids=["no-tensors", "empty-tensors"])
def test_nothing_to_pack(backend: tuple[str, str], sizes: tuple[int, ...]) -> None:
    where, device = backend
    case = make_case(sizes, (FP32,), FP32, device)
    assert case.pack(where).numel == 0
    round_trip(case, where)


@pytest.mark.parametrize("backend", BACKENDS)
def test_buckets_of_any_size_hold_every_element_once(backend: tuple[str, str]) -> None:
    where, device = backend
    kinds = (FP32, BF16, FP64, FP16)
    flats = [torch.randn(size).to(device, kinds[index % 4]) for index, size in enumerate((700, 1, 0, 333, 40, 9, 250))]
    for bucket_bytes in (4 * 77, 4 * 10_000):
        targets = [torch.full_like(flat, POISON) for flat in flats]
        buckets = cut(flats, bucket_bytes)
        assert {bucket.dtype for bucket in buckets} == {FP32, FP64}
        for bucket in buckets:
            pack = Pack([flat.numel() for flat in flats], bucket.pieces, bucket.device, bucket.dtype, backend=where)
            assert pack.numel == bucket.numel
            staging = torch.full((bucket.numel,), POISON, dtype=bucket.dtype, device=device)
            pack.pack(flats, staging)
            pack.unpack(targets, staging)
        assert_same(targets, flats)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pack_follows_tensors_that_move_and_change_their_dtype(backend: tuple[str, str]) -> None:
    where, device = backend
    sizes = (CHUNK + 1, 0, 33)
    pack = make_case(sizes, (FP32,), FP32, device).pack(where)
    staging = torch.zeros(pack.numel, device=device)
    alive = []  # keeps the tensors, so that the next ones get other addresses
    for value, kinds in enumerate(((FP32, FP32), (FP32, FP32), (BF16, FP16), (FP16, FP32), (FP32, FP32)), start=1):
        tensors = [
            torch.full((size,), float(value), dtype=kinds[index % 2], device=device) for index, size in enumerate(sizes)
        ]
        pack.pack(tensors, staging)
        assert (staging == value).all()
        pack.unpack(tensors, staging, 2.0)
        assert all((tensor == value / 2).all() for tensor in tensors)
        alive += tensors


@pytest.mark.parametrize("backend", QUICK)
def test_autograd_notices_that_unpack_writes_parameters(backend: tuple[str, str]) -> None:
    where, device = backend
    param = torch.nn.Parameter(torch.ones(5, device=device))
    other = torch.nn.Parameter(torch.ones(5, device=device))
    pack = Pack([5, 5], [Piece(0, 0, 5)], param.device, FP32, backend=where)
    staging = torch.zeros(5, device=device)
    kept = param.square(), other.square()
    pack.pack([param, other], staging)
    pack.unpack([param, other], staging, 2.0)
    assert param.tolist() == [0.5] * 5
    assert not staging.requires_grad
    kept[1].sum().backward()  # it has no piece and was not written
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept[0].sum().backward()


@pytest.mark.parametrize("backend", [available("cpp", "cpu")])
def test_threads_do_not_change_the_result(backend: tuple[str, str]) -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            round_trip(make_case((100_000, 3, 50_001), (FP32, BF16), FP32, "cpu", rows=2), backend[0], None, 3.0)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", [available("cuda", "cuda"), available("triton", "cuda")])
@pytest.mark.parametrize("rows", [1, 3])
def test_more_elements_than_32_bits_count(backend: tuple[str, str], rows: int) -> None:
    where, device = backend
    count = 2**31 + CHUNK + 5
    tensor = torch.ones((rows, count), dtype=BF16, device=device)
    tensor[:, -1] = 3
    staging = torch.zeros(count, device=device)
    pack = Pack([count], [Piece(0, 0, count)], staging.device, FP32, rows=rows, backend=where)
    pack.pack([tensor], staging, divisor=float(rows))
    assert staging[-1] == 3
    assert (staging[:-1] == 1).all()
    pack.unpack([tensor], staging, 2.0)
    assert (tensor[:, -1] == 1.5).all()
    assert (tensor[:, :-1] == 0.5).all()


@pytest.mark.parametrize("backend", [available("cuda", "cuda"), available("triton", "cuda")])
def test_nothing_waits_for_the_device(backend: tuple[str, str]) -> None:
    where, device = backend
    case = make_case(SIZES, (FP32, BF16), FP32, device, rows=2)
    pack = case.pack(where)
    others = [tensor.clone() for tensor in case.tensors]
    pack.pack(case.tensors, case.staging)  # Triton compiles
    pack.unpack(case.tensors, case.staging)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tensors in (others, case.tensors):
            pack.pack(tensors, case.staging, (True, False))
            pack.unpack(tensors, case.staging)
    finally:
        torch.cuda.set_sync_debug_mode("default")


#: A change to the arguments, the error, and what its message names.
BAD_LAYOUTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "staging dtype": ({"dtype": BF16}, TypeError, "torch.bfloat16"),
    "no rows": ({"rows": 0}, ValueError, "rows"),
    "too many rows": ({"rows": 65}, ValueError, "rows"),
    "index": ({"pieces": [Piece(2, 0, 1)]}, ValueError, "piece 0 is of tensor 2"),
    "below": ({"pieces": [Piece(0, -1, 3)]}, ValueError, "piece 0"),
    "beyond": ({"pieces": [Piece(0, 0, 1), Piece(1, 0, 6)]}, ValueError, "piece 1"),
    "reversed": ({"pieces": [Piece(0, 3, 2)]}, ValueError, "elements 3 to 2"),
    "overlap": ({"pieces": [Piece(0, 4, 9), Piece(1, 0, 5), Piece(0, 0, 5)]}, ValueError, "overlap"),
}


@pytest.mark.parametrize("what", BAD_LAYOUTS)
def test_bad_layouts_name_what_was_given_and_expected(what: str) -> None:
    change, kind, message = BAD_LAYOUTS[what]
    arguments = {"pieces": [Piece(0, 0, 10), Piece(1, 0, 5)], "device": torch.device("cpu"), "dtype": FP32} | change
    with pytest.raises(kind, match=message):
        Pack([10, 5], **arguments)


def _strided(rows: int, count: int) -> Tensor:
    return torch.zeros(rows, 2 * count)[:, ::2]


def _freed(rows: int, count: int) -> Tensor:
    tensor = torch.zeros(rows, count)
    tensor.untyped_storage().resize_(0)
    return tensor


# Arguments that replace the second tensor, the staging buffer, the included rows or the divisor.
BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "shape": ({"tensor": torch.zeros(5, 2)}, ValueError, r"tensor 1 .*must be \(2, 5\)"),
    "flat": ({"tensor": torch.zeros(10)}, ValueError, r"tensor 1 .*must be \(2, 5\)"),
    "scalar": ({"tensor": torch.zeros(())}, ValueError, r"tensor 1 .*must be \(2, 5\)"),
    "fp64": ({"tensor": torch.zeros(2, 5).double()}, TypeError, "tensor 1 is torch.float64"),
    "int": ({"tensor": torch.zeros(2, 5).long()}, TypeError, "tensor 1 is torch.int64"),
    "device": ({"tensor": torch.zeros(2, 5, device="meta")}, ValueError, "on meta"),
    "strided": ({"tensor": _strided(2, 5)}, ValueError, "tensor 1 .*not contiguous"),
    "sparse": ({"tensor": torch.zeros(2, 5).to_sparse()}, ValueError, "tensor 1 .*sparse"),
    "freed": ({"tensor": _freed(2, 5)}, ValueError, "tensor 1 .*memory"),
    "too few": ({"tensors": [torch.zeros(2, 10)]}, ValueError, "2 tensors, got 1"),
    "staging size": ({"staging": torch.zeros(16)}, ValueError, "15 contiguous"),
    "staging dtype": ({"staging": torch.zeros(15).double()}, ValueError, "torch.float64"),
    "staging device": ({"staging": torch.zeros(15, device="meta")}, ValueError, "on meta"),
    "staging strides": ({"staging": torch.zeros(30)[::2]}, ValueError, "15 contiguous"),
    "included": ({"included": [True]}, ValueError, "2 rows, got 1"),
    "zero": ({"divisor": 0.0}, ValueError, "got 0.0"),
    "nan": ({"divisor": float("nan")}, ValueError, "got nan"),
    "vanishing": ({"divisor": 1e-50}, ValueError, "got 1e-50"),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_bad_calls_name_what_was_given_and_expected_and_write_nothing(what: str) -> None:
    change, kind, message = BAD_CALLS[what]
    first = torch.ones(2, 10)
    tensors = change.get("tensors", [first, change.get("tensor", torch.ones(2, 5))])
    staging, divisor = change.get("staging", torch.full((15,), SENTINEL)), change.get("divisor", 1.0)
    pack = Pack([10, 5], [Piece(0, 0, 10), Piece(1, 0, 5)], torch.device("cpu"), FP32, rows=2)
    with pytest.raises(kind, match=message):
        pack.pack(tensors, staging, change.get("included"), divisor)
    if "staging" not in change:
        assert (staging == SENTINEL).all()
    if "included" not in change:
        with pytest.raises(kind, match=message):
            pack.unpack(tensors, staging, divisor)
        assert (first == 1).all()


@pytest.mark.parametrize("backend", QUICK)
def test_the_elements_of_a_row_may_be_of_any_shape(backend: tuple[str, str]) -> None:
    where, device = backend
    for rows, shapes in ((1, [(), (3, 4), (1, 2, 2)]), (2, [(2,), (2, 3, 4), (2, 1, 2, 2)])):
        tensors = [torch.randn(shape, device=device) for shape in shapes]
        numels = [tensor.numel() // rows for tensor in tensors]
        pieces = [Piece(index, 0, numel) for index, numel in enumerate(numels)]
        staging = torch.zeros(sum(numels), device=device)
        pack = Pack(numels, pieces, staging.device, FP32, rows=rows, backend=where)
        expected = torch.cat([tensor.view(rows, -1).sum(0) for tensor in tensors])
        pack.pack(tensors, staging)
        assert_same([staging], [expected])
        pack.unpack(tensors, staging)
        assert_same([torch.cat([tensor.view(rows, -1)[-1] for tensor in tensors])], [expected])


def test_tensors_without_a_piece_are_ignored() -> None:
    pack = Pack([10, 5], [Piece(1, 0, 5)], torch.device("cpu"), FP32, backend="torch")
    staging = torch.zeros(5)
    pack.pack([torch.zeros(3, device="meta"), torch.ones(1, 5)], staging)
    assert staging.tolist() == [1.0] * 5


def table_of(*pieces: Piece, rows: int = 1) -> Pack:
    return Pack([10, CHUNK + 5, 7], pieces, torch.device("cpu"), FP32, rows=rows)


def test_chunks_follow_the_order_of_the_staging_buffer() -> None:
    table = table_of(Piece(1, 2, CHUNK + 4), Piece(0, 3, 3), Piece(2, 0, 7), Piece(1, 0, 2))
    assert table.numel == CHUNK + 2 + 7 + 2
    assert table.indices == [1, 2], "a tensor that has only empty pieces has no slot"
    assert table.spans == [(0, 2, CHUNK + 4), (1, 0, 7), (0, 0, 2)]
    assert table.chunks.tolist() == [
        [0, 2, CHUNK, 0],
        [CHUNK, CHUNK + 2, 2, 0],
        [CHUNK + 2, 0, 7, 1],
        [CHUNK + 9, 0, 2, 0],
    ]
    assert table.strides.tolist() == [CHUNK + 5, 7]
