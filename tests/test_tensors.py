"""Helpers for dtypes, strides, views and stacked parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from hdet_kernels.stack import StackedParameter
from hdet_kernels.tensors import (
    Slot,
    compact,
    devices_of,
    distinct,
    flat_view,
    has_overlap,
    in_full,
    in_shared_memory,
    is_dense,
    layout_hash,
    local,
    one_replica,
    own_storage,
    replicas_of,
    share_gradients,
    travel_dtype,
    unique,
    wide_dtype,
)


@pytest.mark.parametrize(
    ("dtype", "travels"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
    ],
    ids=str,
)
def test_dtype_in_which_replicas_are_summed(dtype: torch.dtype, travels: torch.dtype) -> None:
    assert travel_dtype(dtype) is travels


@pytest.mark.parametrize(("device", "wide"), [("cpu", torch.float64), ("cuda", torch.float64), ("mps", torch.float32)])
def test_dtype_for_sums_of_many_numbers(device: str, wide: torch.dtype) -> None:
    assert wide_dtype(torch.device(device)) is wide


DENSE = {
    "contiguous": torch.empty(3, 4),
    "transposed": torch.empty(3, 4).t(),
    "channels last": torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": torch.empty(2, 3, 4).permute(2, 0, 1),
    "scalar": torch.empty(()),
    "single column": torch.empty(3, 4)[:1, :],
    "size one with any stride": torch.empty(20).as_strided((1, 3), (17, 1)),
    "sizes one only": torch.empty(20).as_strided((1, 1), (5, 7)),
    "offset": torch.empty(10)[3:7],
    "empty": torch.empty(0),
    "empty with odd strides": torch.empty(20).as_strided((2, 0, 3), (7, 5, 2)),
}
LOOSE = {
    "every second": torch.empty(8)[::2],
    "columns": torch.empty(4, 4)[:, :2],
    "expanded": torch.empty(1).expand(4),
    "expanded rows": torch.empty(1, 4).expand(3, 4),
    "overlapping windows": torch.empty(8).as_strided((3, 3), (1, 1)),
    "unfolded": torch.empty(6).unfold(0, 3, 1),
    "padded rows": torch.empty(20).as_strided((3, 4), (5, 1)),
}


@pytest.mark.parametrize("case", DENSE)
def test_dense_tensors_have_no_overlap(case: str) -> None:
    assert is_dense(DENSE[case])
    assert not has_overlap(DENSE[case])


@pytest.mark.parametrize("case", LOOSE)
def test_overlap_is_told_from_gaps(case: str) -> None:
    assert not is_dense(LOOSE[case])
    assert has_overlap(LOOSE[case]) == (case not in ("every second", "columns", "padded rows"))


class TestFlatView:
    @pytest.mark.parametrize("case", DENSE)
    def test_is_a_view_of_the_same_memory(self, case: str) -> None:
        tensor = DENSE[case].clone(memory_format=torch.preserve_format)
        flat = flat_view(tensor)
        assert flat.shape == (tensor.numel(),)
        flat.copy_(torch.arange(1.0, tensor.numel() + 1))
        assert tensor.data_ptr() == flat.data_ptr()
        assert sorted(tensor.flatten().tolist()) == list(range(1, tensor.numel() + 1))

    def test_elements_are_in_memory_order(self) -> None:
        assert flat_view(torch.arange(6.0).reshape(2, 3).t()).tolist() == [0, 1, 2, 3, 4, 5]
        image = torch.arange(12.0).reshape(1, 2, 2, 3)
        expected = image.permute(0, 2, 3, 1).flatten().tolist()
        assert flat_view(image.to(memory_format=torch.channels_last)).tolist() == expected

    def test_a_slice_starts_where_it_starts(self) -> None:
        memory = torch.arange(12.0)
        assert flat_view(memory[3:7]).tolist() == [3, 4, 5, 6]
        assert flat_view(memory[4:10].view(2, 3).t()).tolist() == [4, 5, 6, 7, 8, 9]

    def test_complex_as_pairs_of_reals(self) -> None:
        tensor = torch.tensor([1 + 2j, 3 - 4j])
        flat = flat_view(tensor)
        assert flat.dtype == torch.float32
        assert flat.tolist() == [1, 2, 3, -4]
        flat[1] = 5
        assert tensor[0] == 1 + 5j

    def test_complex_in_another_order(self) -> None:
        tensor = torch.complex(torch.arange(4.0), -torch.arange(4.0)).reshape(2, 2).t()
        assert flat_view(tensor).tolist() == [0, 0, 1, -1, 2, -2, 3, -3]

    def test_has_no_graph(self) -> None:
        assert not flat_view(nn.Parameter(torch.ones(3))).requires_grad

    @pytest.mark.parametrize("case", LOOSE)
    def test_refuses_gaps_and_overlaps(self, case: str) -> None:
        with pytest.raises(ValueError, match=r"has gaps or overlaps in memory.*contiguous\(\)"):
            flat_view(LOOSE[case])


def tensors() -> list[Tensor]:
    return [torch.empty(2, 3), torch.empty(6), torch.empty(4, dtype=torch.float64)]


CHANGES = {
    "order": lambda t: [t[1], t[0], t[2]],
    "one less": lambda t: t[:2],
    "one more": lambda t: [*t, torch.empty(0)],
    "shape": lambda t: [t[0].view(3, 2), *t[1:]],
    "strides": lambda t: [torch.empty(3, 2).t(), *t[1:]],
    "dtype": lambda t: [*t[:2], torch.empty(4, dtype=torch.int64)],
    "split": lambda t: [t[0], torch.empty(3), torch.empty(3), t[2]],
    "none": lambda t: [],
}


class TestLayoutHash:
    def test_values_and_objects_do_not_matter(self) -> None:
        assert layout_hash(tensors()) == layout_hash([t.fill_(3) for t in tensors()])
        assert layout_hash(tensors()) == layout_hash([nn.Parameter(t, requires_grad=False) for t in tensors()])
        assert layout_hash(iter(tensors())) == layout_hash(tensors())

    @pytest.mark.parametrize("change", CHANGES)
    def test_the_layout_does(self, change: str) -> None:
        assert layout_hash(CHANGES[change](tensors())) != layout_hash(tensors())

    def test_all_changes_differ(self) -> None:
        assert len({layout_hash(change(tensors())) for change in CHANGES.values()}) == len(CHANGES)

    def test_survives_float64(self) -> None:
        for change in CHANGES.values():
            found = layout_hash(change(tensors()))
            assert 0 <= found < 2**48
            assert int(float(found)) == found

    def test_the_same_in_every_process(self) -> None:
        """A constant: the hash depends on nothing that differs between processes or runs."""
        assert layout_hash(tensors()) == 12558451229104

    def test_names_matter(self) -> None:
        found = {layout_hash(tensors(), names) for names in (None, ["a", "b", "c"], ["a", "c", "b"])}
        assert len(found) == 3


def test_unique_keeps_the_first_of_each_object_in_order() -> None:
    a, b = torch.ones(2), torch.ones(2)
    found = unique(iter([b, a, b, a]))
    assert [id(t) for t in found] == [id(b), id(a)]


def test_a_slot_views_its_part_of_one_or_several_replicas() -> None:
    slot = Slot(0, 2, 6, (2, 3), (1, 2))
    flat = torch.arange(20.0)
    assert slot.view(flat).tolist() == [[2, 4, 6], [3, 5, 7]]
    assert slot.view(flat.view(2, 10))[1].tolist() == [[12, 14, 16], [13, 15, 17]]


def test_a_master_counts_where_the_parameter_is_its_rounding() -> None:
    master = torch.tensor([1 + 2.0**-12, 1 + 2.0**-12])
    param = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    assert in_full(param, master).tolist() == [1 + 2.0**-12, 3]


def test_the_local_part_of_a_distributed_tensor() -> None:
    plain = nn.Parameter(torch.ones(2))
    assert local(plain).data_ptr() == plain.data_ptr()
    assert not local(plain).requires_grad

    class Sharded(Tensor):
        def to_local(self) -> Tensor:
            return torch.zeros(1)

    assert local(torch.ones(2).as_subclass(Sharded)).tolist() == [0]


class TestOwnStorage:
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool], ids=str
    )
    def test_it_covers_the_view_and_nothing_else(self, dtype: torch.dtype) -> None:
        flat = torch.zeros(100, dtype=dtype)
        view = flat[16:22].view(3, 2).t()
        owned = own_storage(view)
        assert (owned.data_ptr(), owned.shape, owned.stride()) == (view.data_ptr(), view.shape, view.stride())
        assert (owned.storage_offset(), owned.untyped_storage().nbytes()) == (0, view.nbytes)
        owned.fill_(1)
        assert flat.sum() == 6, "the same memory"

    @pytest.mark.parametrize(("shape", "stride"), [((1, 5), (5, 1)), ((2, 1, 3), (3, 7, 1)), ((4, 1, 1), (1, 4, 4))])
    def test_strides_are_kept(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        assert own_storage(torch.zeros(40).as_strided(shape, stride, 3)).stride() == stride

    def test_it_keeps_the_memory_alive(self) -> None:
        owned = own_storage(torch.arange(1e6)[500_000:500_002])
        torch.zeros(1_000_000)
        assert owned.tolist() == [500_000, 500_001]

    @pytest.mark.parametrize("shape", [(), (0, 3), (1,)], ids=str)
    def test_shapes_of_one_element_or_none(self, shape: tuple[int, ...]) -> None:
        flat = torch.arange(9.0)
        owned = own_storage(torch.as_strided(flat, shape, (1,) * len(shape), 4))
        assert (owned.shape, owned.untyped_storage().nbytes()) == (shape, 4 * math.prod(shape))

    def test_what_cannot_have_one_is_returned_as_it_is(self) -> None:
        gaps, meta = torch.zeros(4, 4)[:, :2], torch.zeros(4, device="meta")
        assert own_storage(gaps) is gaps
        assert own_storage(meta) is meta
        with FakeTensorMode():
            fake = torch.zeros(3)[1:]
            assert own_storage(fake) is fake

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
    def test_on_a_gpu_without_waiting_for_it(self) -> None:
        flat = torch.zeros(100, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            owned = own_storage(flat[16:22])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        owned.fill_(1)
        assert (flat.sum().item(), owned.untyped_storage().nbytes(), owned.device) == (6, 24, flat.device)
        owned.record_stream(torch.cuda.Stream())
        del flat
        torch.zeros(100, device="cuda")
        assert owned.tolist() == [1] * 6


def test_compact_copies_only_a_part_of_a_storage() -> None:
    whole = torch.arange(6.0).view(2, 3)
    assert compact(whole) is whole
    assert compact(whole.t()).data_ptr() == whole.data_ptr()
    column = compact(whole[:, 1])
    assert (column.tolist(), column.untyped_storage().nbytes()) == ([1, 4], 8)


def test_memory_that_other_processes_may_share() -> None:
    assert not in_shared_memory(torch.ones(2))
    assert in_shared_memory(torch.ones(2).share_memory_()[1:])
    assert not in_shared_memory(torch.ones(2, device="meta"))


class TestDistinct:
    def test_tied_tensors_are_kept_once(self) -> None:
        memory, other = torch.arange(6.0), torch.ones(2)
        assert [id(t) for t in distinct([memory, other, memory.view(2, 3)])] == [id(memory), id(other)]

    def test_empty_tensors_are_not_tied(self) -> None:
        assert len(distinct([torch.empty(0), torch.empty(0)])) == 2

    def test_sharing_a_part_of_the_memory_is_refused(self) -> None:
        memory = torch.arange(6.0)
        with pytest.raises(ValueError, match=r"shapes \(4,\) and \(3,\), share a part of their memory"):
            distinct([memory[:4], memory[3:]])


def test_stacks_of_replicas() -> None:
    stack, plain = StackedParameter(torch.arange(6.0).view(3, 2)), nn.Parameter(torch.ones(2))
    assert (replicas_of(stack), replicas_of(plain)) == (3, None)
    assert one_replica(stack).tolist() == [0, 1]
    assert one_replica(stack, torch.ones(3, 4)).tolist() == [1] * 4
    assert one_replica(plain) is plain
    assert share_gradients([stack])
    assert not share_gradients([stack, plain])
    assert not share_gradients([StackedParameter(torch.ones(2, 2), shares_gradient=False)])


def test_devices_of_tensors() -> None:
    here, meta = torch.ones(1), torch.ones(1, device="meta")
    assert devices_of([]) == set()
    assert devices_of([here, here]) == {torch.device("cpu")}
    assert devices_of([here, meta]) == {torch.device("cpu"), torch.device("meta")}
