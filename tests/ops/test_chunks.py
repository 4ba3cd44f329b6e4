"""The tables that kernels walk: slots, chunks and gradients, of plain and stacked parameters, as C++ has them."""

from __future__ import annotations

import re
import weakref
from operator import is_
from pathlib import Path

import pytest
import torch

from hdet_kernels.ops import chunks
from hdet_kernels.ops.chunks import (
    CHUNK,
    EMPTY_GRADIENT,
    GRADIENT_DTYPES,
    NO_GRADIENT,
    ChunkTable,
    StackedTable,
    flat_gradients,
)
from hdet_kernels.ops.operators import why_not
from hdet_kernels.ops.table import COLUMNS
from hdet_kernels.tensors import Slot

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=["extension", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Gradients are matched by the operator of the extension, and in Python without it."""
    found: str = request.param
    if found == "python":
        monkeypatch.setattr(chunks, "why_not", lambda: "not wanted")
    elif why_not() is not None:
        pytest.skip(f"{why_not()}")
    return found


HEADERS = Path(__file__).parents[2] / "csrc"


def table_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> ChunkTable:
    slots, offset = [], 0
    for shape in shapes:
        plain = torch.empty(shape)
        slots.append(Slot(0, offset, plain.numel(), shape, plain.stride()))
        offset += plain.numel()
    return ChunkTable(slots, range(len(slots)), CPU, dtype)


def test_chunks_cover_every_slot_once() -> None:
    sizes = (1, 0, CHUNK, CHUNK + 1, 3 * CHUNK)
    table = table_of(*((size,) for size in sizes))
    assert table.chunks.dtype == table.slots.dtype == torch.int64
    offsets = [0, 1, 1, 1 + CHUNK, 2 + 2 * CHUNK]
    assert table.slots.tolist() == [list(row) for row in zip(offsets, sizes, range(5), strict=True)]
    assert table.chunks.tolist() == [
        [0, 0, 1, 0],
        [1, 0, CHUNK, 2],
        [1 + CHUNK, 0, CHUNK, 3],
        [1 + 2 * CHUNK, CHUNK, 1, 3],
        [2 + 2 * CHUNK, 0, CHUNK, 4],
        [2 + 3 * CHUNK, CHUNK, CHUNK, 4],
        [2 + 4 * CHUNK, 2 * CHUNK, CHUNK, 4],
    ]
    assert (table.extent, table.table_row_count) == (2 + 5 * CHUNK, 5)


def test_a_table_without_slots() -> None:
    table = ChunkTable([], [], CPU, torch.float32)
    assert (tuple(table.slots.shape), tuple(table.chunks.shape), table.extent, table.table_row_count) == (
        (0, 3),
        (0, 4),
        0,
        0,
    )
    assert not table.match([]).any
    with pytest.raises(ValueError, match="0 slots and 1 table rows"):
        ChunkTable([], [0], CPU, torch.float32)


def test_gradients_in_the_order_of_their_slots_are_not_copied() -> None:
    table = table_of((4,), (2, 3))
    grads = [torch.randn(4), torch.randn(2, 3)]
    got = table.match(grads)
    assert all(map(is_, got.tensors, grads))
    assert got.table.tolist() == [[grad.data_ptr(), 0] for grad in grads]
    assert not got.copied
    assert torch.equal(table.point_at(got), torch.from_numpy(got.table))


def test_missing_and_empty_gradients_are_distinguished() -> None:
    table = table_of((4,), (0, 3), (2,))
    full = torch.randn(4)
    got = table.match([full, torch.randn(0, 3), None])
    assert got.table[:, 0].tolist() == [full.data_ptr(), EMPTY_GRADIENT, NO_GRADIENT]
    assert got.any
    assert not table.match([None, None, None]).any
    assert table.match([torch.randn(4), torch.randn(0, 3), torch.randn(2)]).table[1, 0] == EMPTY_GRADIENT


def test_a_channels_last_parameter_takes_channels_last_gradients() -> None:
    param = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    slots = [Slot(0, 0, 120, tuple(param.shape), param.stride()), Slot(0, 128, 4, (4,), (1,))]
    table = ChunkTable(slots, [0, 0], CPU, torch.float32)
    other = torch.randn(4)
    kept = torch.randn_like(param)
    assert table.match([kept, other]).tensors[0] is kept
    contiguous = torch.randn(2, 3, 4, 5)
    got = table.match([contiguous, other])
    moved = got.tensors[0]
    assert moved is not None
    assert got.copied
    assert moved.stride() == param.stride()
    assert torch.equal(moved, contiguous)
    assert got.tensors[1] is other
    flat = flat_gradients(got)[0]
    assert flat is not None
    assert torch.equal(flat, contiguous.permute(0, 2, 3, 1).reshape(-1)), "in the order of the parameter's memory"


def test_strides_of_dimensions_of_size_one_do_not_matter() -> None:
    table = ChunkTable([Slot(0, 0, 3, (3, 1), (1, 1))], [0], CPU, torch.float32)
    column = torch.randn(3, 1).as_strided((3, 1), (1, 3))
    assert table.match([column]).tensors[0] is column


@pytest.mark.parametrize("param", GRADIENT_DTYPES, ids=str)
@pytest.mark.parametrize("grad", GRADIENT_DTYPES, ids=str)
def test_a_gradient_is_copied_only_if_kernels_do_not_read_its_dtype(param: torch.dtype, grad: torch.dtype) -> None:
    table = table_of((4,), dtype=param)
    given = torch.arange(4).to(grad)
    got = table.match([given])
    taken = got.tensors[0]
    assert taken is not None
    # float64 is never mixed with other dtypes; all narrower ones are widened in registers.
    read = (grad == torch.float64) == (param == torch.float64)
    assert (taken is given) == read == (not got.copied)
    assert taken.dtype == (grad if read else param)
    assert taken.tolist() == [0, 1, 2, 3]
    assert got.table.tolist() == [[taken.data_ptr(), GRADIENT_DTYPES.index(taken.dtype)]]


def test_gradients_of_several_dtypes_are_numbered_one_by_one() -> None:
    table = table_of((2,), (2,), (2,))
    got = table.match([torch.randn(2), torch.randn(2).half(), torch.randn(2).bfloat16()])
    assert not got.copied
    assert [GRADIENT_DTYPES[number] for number in got.table[:, 1]] == [torch.float32, torch.float16, torch.bfloat16]


def test_gradients_that_cannot_be_used_are_refused() -> None:
    table = table_of((4,))
    with pytest.raises(RuntimeError, match=r"sparse=False"):
        table.match([torch.ones(4).to_sparse()])
    with pytest.raises(RuntimeError, match=r"\(2, 2\) on cpu; its parameter is \(4,\)"):
        table.match([torch.ones(4, 4)[::2, ::2]])
    with pytest.raises(RuntimeError, match=r"\(4,\) on meta; its parameter is \(4,\) on cpu"):
        table.match([torch.ones(4, device="meta")])
    with pytest.raises(RuntimeError, match=r"complex64.*imaginary"):
        table.match([torch.ones(4, dtype=torch.complex64)])


def test_the_gradient_table_is_written_only_when_an_address_changed() -> None:
    table = table_of((4,))
    grad, other = torch.randn(4), torch.randn(4)
    on_device = table.point_at(table.match([grad]))
    on_device.zero_()
    assert table.point_at(table.match([grad])).tolist() == [[0, 0]], "equal addresses must not be copied again"
    assert table.point_at(table.match([other])).tolist() == [[other.data_ptr(), 0]]
    assert table.point_at(table.match([None])).tolist() == [[NO_GRADIENT, 0]]


def test_gradients_that_are_missing_come_back_or_change_their_dtype() -> None:
    table, memory = table_of((2,), (3,), dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)
    before = table.match([memory, torch.ones(3)])
    assert before.complete
    kept = before.table.copy()
    assert not table.match([memory, None]).complete
    assert not table.match([None, None]).any
    assert before.table.tolist() == kept.tolist(), "what was returned keeps its table"
    for dtype in (torch.bfloat16, torch.float16):
        found = table.match([memory.view(dtype), None])
        assert found.table[0].tolist() == [memory.data_ptr(), GRADIENT_DTYPES.index(dtype)]
    assert table.match([memory, torch.ones(3)]).complete


def test_no_gradient_is_kept_alive_after_a_match() -> None:
    table, grads = table_of((2,)), [torch.ones(2)]
    seen = weakref.ref(grads[0])
    table.point_at(table.match(grads))
    grads.clear()
    assert seen() is None


SLOTS = [Slot(0, 0, 6, (2, 3), (3, 1)), Slot(0, 8, 0, (0,), (1,)), Slot(0, 8, 4, (4,), (1,))]
REPLICAS, STRIDE = 3, 16


def stacked(*, shares_state: bool, replicas: int = REPLICAS) -> StackedTable:
    return StackedTable(
        SLOTS,
        [0, 1, 1],
        torch.device("cpu"),
        torch.float32,
        replicas=replicas,
        row_stride=STRIDE,
        table_rows_per_replica=2,
        shares_state=shares_state,
    )


def stacked_gradients(dtype: torch.dtype = torch.float32) -> list[torch.Tensor | None]:
    return [torch.randn(REPLICAS, *slot.shape).to(dtype) for slot in SLOTS]


def test_every_replica_has_slots_and_table_rows_of_its_own() -> None:
    table = stacked(shares_state=False)
    assert table.slots.tolist() == [
        [slot.offset + r * STRIDE, slot.numel, row + 2 * r]
        for r in range(REPLICAS)
        for slot, row in zip(SLOTS, (0, 1, 1), strict=True)
    ]
    assert (table.extent, table.table_row_count) == (2 * STRIDE + 12, 6)


def test_replicas_that_share_state_have_the_slots_of_one() -> None:
    table = stacked(shares_state=True)
    assert table.slots.tolist() == [[0, 6, 0], [8, 0, 1], [8, 4, 1]]
    shared = [torch.randn(slot.shape).expand(REPLICAS, *slot.shape) for slot in SLOTS]
    got = table.match(shared)
    assert not got.copied
    assert got.table[:, 0].tolist() == [shared[0].data_ptr(), EMPTY_GRADIENT, shared[2].data_ptr()]


def test_the_gradient_of_every_replica_has_its_address() -> None:
    table, grads = stacked(shares_state=False), stacked_gradients()
    grads[2] = None
    got = table.match(grads)
    first = grads[0]
    assert first is not None
    expected = [[first[r].data_ptr(), EMPTY_GRADIENT, NO_GRADIENT] for r in range(REPLICAS)]
    assert got.table[:, 0].reshape(REPLICAS, -1).tolist() == expected
    assert not got.copied
    flats = flat_gradients(got)
    assert [None if flat is None else flat.numel() for flat in flats] == [6, 0, None] * REPLICAS
    assert torch.equal(torch.stack([flats[0], flats[3], flats[6]]), first.view(REPLICAS, -1))


def test_a_shared_gradient_has_one_address_for_all_replicas() -> None:
    shared = [torch.randn(slot.shape).expand(REPLICAS, *slot.shape) for slot in SLOTS]
    got = stacked(shares_state=False).match(shared)
    assert got.table[:, 0].tolist() == [shared[0].data_ptr(), EMPTY_GRADIENT, shared[2].data_ptr()] * REPLICAS


def test_stacked_gradients_in_another_order_are_copied() -> None:
    grads = stacked_gradients()
    grads[0] = torch.randn(REPLICAS, 3, 2).transpose(1, 2)
    got = stacked(shares_state=False).match(grads)
    assert got.copied
    assert torch.equal(got.tensors[0], grads[0])
    assert got.tensors[0].stride() == (6, 3, 1)
    shared = [torch.randn(slot.shape).expand(REPLICAS, *slot.shape) for slot in SLOTS]
    shared[0] = torch.randn(3, 2).T.expand(REPLICAS, 2, 3)
    got = stacked(shares_state=True).match(shared)
    assert got.copied
    assert torch.equal(got.tensors[0], shared[0])
    assert got.tensors[0].stride() == (0, 3, 1), "the copy is still shared"


def test_stacked_gradients_that_cannot_be_used_are_refused() -> None:
    local = stacked_gradients()
    with pytest.raises(RuntimeError, match=r"differs from replica to replica.*ReplicaStack\(…, gradients=\"local\"\)"):
        stacked(shares_state=True).match(local)
    local[0] = torch.randn(2, 2, 3)
    with pytest.raises(RuntimeError, match=r"has shape \(2, 2, 3\); its parameter has \(3, 2, 3\)"):
        stacked(shares_state=False).match(local)
    local[0] = torch.randn(3, 2, 3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse=False"):
        stacked(shares_state=False).match(local)


def test_the_layout_is_that_of_the_c_header() -> None:
    header = (HEADERS / "table.h").read_text()

    def fields(struct: str) -> list[tuple[str, str]]:
        body = re.search(rf"struct (?:alignas\(\d+\) )?{struct} {{(.*?)\n}};", header, re.S)
        assert body is not None, f"csrc/table.h has no struct {struct}"
        return re.findall(r"^\s*(\w+) (\w+);", body.group(1), re.M)

    assert fields("Row") == [("double", name) for name in COLUMNS]
    assert fields("Slot") == [("int64_t", name) for name in ("offset", "count", "row")]
    assert fields("Chunk") == [("int64_t", name) for name in ("offset", "start", "count", "slot")]
    assert fields("Gradient") == [("int64_t", "address"), ("GradientType", "type")]
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in GRADIENT_DTYPES)
    assert f"enum class GradientType : int64_t {{ {names} }};" in header
    assert f"kNoGradient = {NO_GRADIENT};" in header
    assert f"kEmptyGradient = {EMPTY_GRADIENT};" in header
    assert f"kColumns = {len(COLUMNS)};" in header
