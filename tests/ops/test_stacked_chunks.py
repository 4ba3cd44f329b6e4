"""The chunk table of stacked parameters: slots of every replica, and gradients that replicas share or have each."""

from __future__ import annotations

import pytest
import torch

from hdet_kernels.ops.chunks import EMPTY_GRADIENT, NO_GRADIENT, flat_gradients
from hdet_kernels.ops.stacked_chunks import StackedTable
from hdet_kernels.tensors import Slot

SLOTS = [Slot(0, 0, 6, (2, 3), (3, 1)), Slot(0, 8, 0, (0,), (1,)), Slot(0, 8, 4, (4,), (1,))]
REPLICAS, STRIDE = 3, 16


def table_of(*, shares_state: bool, replicas: int = REPLICAS) -> StackedTable:
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


def gradients(dtype: torch.dtype = torch.float32) -> list[torch.Tensor | None]:
    return [torch.randn(REPLICAS, *slot.shape).to(dtype) for slot in SLOTS]


def test_every_replica_has_slots_and_table_rows_of_its_own() -> None:
    table = table_of(shares_state=False)
    assert table.slots.tolist() == [
        [slot.offset + r * STRIDE, slot.numel, row + 2 * r]
        for r in range(REPLICAS)
        for slot, row in zip(SLOTS, (0, 1, 1), strict=True)
    ]
    assert (table.extent, table.table_row_count) == (2 * STRIDE + 12, 6)


def test_replicas_that_share_state_have_the_slots_of_one() -> None:
    table = table_of(shares_state=True)
    assert table.slots.tolist() == [[0, 6, 0], [8, 0, 1], [8, 4, 1]]
    shared = [torch.randn(slot.shape).expand(REPLICAS, *slot.shape) for slot in SLOTS]
    got = table.match(shared)
    assert not got.copied
    assert got.table[:, 0].tolist() == [shared[0].data_ptr(), EMPTY_GRADIENT, shared[2].data_ptr()]


def test_the_gradient_of_every_replica_has_its_address() -> None:
    table, grads = table_of(shares_state=False), gradients()
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
    got = table_of(shares_state=False).match(shared)
    assert got.table[:, 0].tolist() == [shared[0].data_ptr(), EMPTY_GRADIENT, shared[2].data_ptr()] * REPLICAS


def test_gradients_in_another_order_are_copied() -> None:
    grads = gradients()
    grads[0] = torch.randn(REPLICAS, 3, 2).transpose(1, 2)
    got = table_of(shares_state=False).match(grads)
    assert got.copied
    assert torch.equal(got.tensors[0], grads[0])
    assert got.tensors[0].stride() == (6, 3, 1)
    shared = [torch.randn(slot.shape).expand(REPLICAS, *slot.shape) for slot in SLOTS]
    shared[0] = torch.randn(3, 2).T.expand(REPLICAS, 2, 3)
    got = table_of(shares_state=True).match(shared)
    assert got.copied
    assert torch.equal(got.tensors[0], shared[0])
    assert got.tensors[0].stride() == (0, 3, 1), "the copy is still shared"


def test_gradients_that_cannot_be_used_are_refused() -> None:
    local = gradients()
    with pytest.raises(RuntimeError, match=r"differs from replica to replica.*ReplicaStack\(…, gradients=\"local\"\)"):
        table_of(shares_state=True).match(local)
    local[0] = torch.randn(2, 2, 3)
    with pytest.raises(RuntimeError, match=r"has shape \(2, 2, 3\); its parameter has \(3, 2, 3\)"):
        table_of(shares_state=False).match(local)
    local[0] = torch.randn(3, 2, 3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse=False"):
        table_of(shares_state=False).match(local)
