"""Buckets: no element is lost or reordered, and parameters keep their identity, values and layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hdet_kernels import Buckets
from hdet_kernels.buckets import ALIGN_BYTES, BUCKET_BYTES, Bucket, cut
from hdet_kernels.stack import StackedParameter
from hdet_kernels.tensors import Slot, travel_dtype

PROPERTY = settings(deadline=None, max_examples=60)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.complex64]

sizes = st.integers(0, 40)
dtypes = st.sampled_from(DTYPES)


def parameter(*shape: int, start: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Return a parameter whose elements are all different."""
    values = torch.arange(start, start + math.prod(shape)).reshape(shape).to(dtype)
    return nn.Parameter(values, requires_grad=dtype.is_floating_point or dtype.is_complex)


class TestCut:
    @PROPERTY
    @given(st.lists(st.tuples(sizes, dtypes, st.sampled_from(["cpu", "meta"])), max_size=8), st.integers(1, 200))
    def test_every_element_once_in_order_in_the_fewest_buckets(
        self, specs: list[tuple[int, torch.dtype, str]], bucket_bytes: int
    ) -> None:
        tensors = [torch.empty(size, dtype=dtype, device=device) for size, dtype, device in specs]
        buckets = cut(tensors, bucket_bytes)

        by_key: dict[tuple[torch.device, torch.dtype], list[Bucket]] = {}
        for bucket in buckets:
            by_key.setdefault((bucket.device, bucket.dtype), []).append(bucket)
        wanted: dict[tuple[torch.device, torch.dtype], list[tuple[int, int]]] = {}
        for index, tensor in enumerate(tensors):
            key = (tensor.device, travel_dtype(tensor.dtype))
            wanted.setdefault(key, []).extend((index, element) for element in range(tensor.numel()))

        for key, elements in wanted.items():
            mine = by_key.pop(key, [])
            carried = [(p.index, e) for b in mine for p in b.pieces for e in range(p.start, p.stop)]
            assert carried == elements
            capacity = max(bucket_bytes // key[1].itemsize, 1)
            assert len(mine) == math.ceil(len(elements) / capacity)
            assert [b.numel for b in mine[:-1]] == [capacity] * (len(mine) - 1)
            assert all(p.stop > p.start for b in mine for p in b.pieces)
            if bucket_bytes % key[1].itemsize == 0:
                assert len(mine) == math.ceil(len(elements) * key[1].itemsize / bucket_bytes)
                assert all(b.nbytes <= bucket_bytes for b in mine)
        assert not by_key

    @pytest.mark.parametrize("tensors", [[], [torch.empty(0)], [torch.empty(0), torch.empty(0, dtype=torch.int64)]])
    def test_empty_tensors_need_no_bucket(self, tensors: list[Tensor]) -> None:
        assert cut(tensors) == []

    def test_a_model_of_124_million_parameters_fits_into_one_bucket(self) -> None:
        assert BUCKET_BYTES == 512 * 2**20
        assert len(cut([torch.empty(124_000_000, device="meta")])) == 1
        assert len(cut([torch.empty(2**27 + 1, device="meta")])) == 2

    @pytest.mark.parametrize("bucket_bytes", [0, -1])
    def test_refuses_a_size(self, bucket_bytes: int) -> None:
        with pytest.raises(ValueError, match=f"bucket_bytes must be a whole number of at least 1, got {bucket_bytes}"):
            cut([torch.empty(3)], bucket_bytes)
        param = parameter(3)
        address = param.data_ptr()
        with pytest.raises(ValueError, match=f"bucket_bytes must be a whole number of at least 1, got {bucket_bytes}"):
            Buckets([param], bucket_bytes)
        assert param.data_ptr() == address


def overlapping(buckets: Buckets) -> Iterator[tuple[Slot, Slot]]:
    filled = {slot for slot in buckets.slots if slot.numel}
    slots = sorted(filled, key=lambda slot: (slot.flat, slot.offset))
    for a, b in itertools.pairwise(slots):
        if a.flat == b.flat and a.offset + a.numel > b.offset:
            yield a, b


def is_inside(param: Tensor, flat: Tensor) -> bool:
    if param.numel() == 0:
        return True
    start, end = flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.element_size()
    return start <= param.data_ptr() and param.data_ptr() + param.numel() * param.element_size() <= end


LAYOUTS = {
    "contiguous": lambda: parameter(3, 5),
    "scalar": lambda: parameter(),
    "one element": lambda: parameter(1),
    "empty": lambda: parameter(0, 4),
    "transposed": lambda: nn.Parameter(parameter(3, 5).data.t()),
    "channels last": lambda: nn.Parameter(parameter(2, 3, 4, 5).data.to(memory_format=torch.channels_last)),
    "permuted": lambda: nn.Parameter(parameter(2, 3, 4).data.permute(1, 2, 0)),
    "view of a larger tensor": lambda: nn.Parameter(torch.arange(20.0)[7:12]),
    "bf16": lambda: parameter(7, dtype=torch.bfloat16),
    "complex": lambda: parameter(2, 3, dtype=torch.complex64),
    "frozen": lambda: nn.Parameter(torch.arange(5.0), requires_grad=False),
    "integer": lambda: parameter(5, dtype=torch.int64),
}


class TestFlatBuffers:
    @PROPERTY
    @given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), dtypes, st.booleans()), min_size=1, max_size=8))
    def test_values_shapes_and_order_survive_any_mixture(
        self, specs: list[tuple[list[int], torch.dtype, bool]]
    ) -> None:
        params = []
        for place, (shape, dtype, reverse) in enumerate(specs):
            param = parameter(*shape, start=100 * place + 1, dtype=dtype)
            params.append(
                nn.Parameter(param.data.permute(tuple(reversed(range(len(shape))))), False) if reverse else param
            )
        before = [(p.detach().clone(), p.shape, p.stride(), p.dtype, p.requires_grad) for p in params]
        buckets = Buckets(params)

        assert [id(p) for p in buckets.params] == [id(p) for p in params]
        for param, (values, *layout) in zip(params, before, strict=True):
            assert [param.shape, param.stride(), param.dtype, param.requires_grad] == layout
            assert torch.equal(param, values)
        assert len(buckets.flats) == len({p.dtype for p in params})
        assert not list(overlapping(buckets))
        rest = [torch.ones_like(flat, dtype=torch.bool) for flat in buckets.flats]
        for param, slot in zip(params, buckets.slots, strict=True):
            flat = buckets.flats[slot.flat]
            assert flat.dtype == param.dtype
            assert slot.offset * flat.element_size() % ALIGN_BYTES == 0
            assert slot.offset + slot.numel <= flat.numel()
            if param.numel():
                assert param.data_ptr() == flat.data_ptr() + slot.offset * flat.element_size()
            rest[slot.flat][slot.offset : slot.offset + slot.numel] = False
        assert all((flat[gap] == 0).all() for flat, gap in zip(buckets.flats, rest, strict=True))
        assert buckets.moved() == []

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_parameter_keeps_its_values_strides_and_identity(self, layout: str) -> None:
        param = LAYOUTS[layout]()
        values, stride, wanted = param.detach().clone(), param.stride(), param.requires_grad
        buckets = Buckets([parameter(3, start=100), param])
        assert buckets.params[1] is param
        assert type(param) is nn.Parameter
        assert torch.equal(param, values)
        assert (param.stride(), param.requires_grad) == (stride, wanted)
        slot = buckets.slots[1]
        assert (slot.shape, slot.stride, slot.numel) == (tuple(param.shape), stride, param.numel())
        assert is_inside(param, buckets.flats[slot.flat])

    @pytest.mark.parametrize(("dtype", "second"), [(torch.bfloat16, 64), (torch.float64, 16), (torch.complex128, 8)])
    def test_alignment_counts_bytes(self, dtype: torch.dtype, second: int) -> None:
        assert ALIGN_BYTES == 128
        assert [s.offset for s in Buckets([parameter(1, dtype=dtype), parameter(1, dtype=dtype)]).slots] == [0, second]

    def test_the_flat_buffer_is_the_parameter(self) -> None:
        first, second = parameter(2, 3), parameter(4)
        buckets = Buckets([first, second])
        buckets.flats[0].fill_(7)
        assert torch.equal(first, torch.full((2, 3), 7.0))
        with torch.no_grad():
            second.mul_(2)
        assert buckets.flats[0][32:36].tolist() == [14.0] * 4

    def test_parameters_from_a_generator(self) -> None:
        model = nn.Linear(3, 2)
        assert Buckets(model.parameters()).params == tuple(model.parameters())

    def test_views_of_other_buffers(self) -> None:
        params = [parameter(2, 3), nn.Parameter(parameter(2, 3).data.t()), parameter(4, dtype=torch.float64)]
        buckets = Buckets(params)
        state = [torch.zeros_like(flat) for flat in buckets.flats]
        for place, view in enumerate(buckets.views(state)):
            view.fill_(place + 1)
        assert [(v.shape, v.stride(), v.dtype) for v in buckets.views(state)] == [
            (p.shape, p.stride(), p.dtype) for p in params
        ]
        assert state[0].sum() == 6 * 1 + 6 * 2
        assert state[1].sum() == 4 * 3
        assert torch.equal(params[0], parameter(2, 3)), "the parameters' own memory was written"

    def test_autograd_and_training_go_on(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 1))
        model[0].to(memory_format=torch.channels_last)
        twin = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 1))
        twin.load_state_dict(model.state_dict())
        buckets = Buckets(model.parameters())
        data = torch.randn(5, 2, 4, 4)
        for _ in range(3):
            for network in (model, twin):
                network.zero_grad()
                network(data).square().mean().backward()
                with torch.no_grad():
                    for param in network.parameters():
                        param.sub_(0.1 * param.grad)
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(param, other)
        assert buckets.moved() == []

    def test_no_graph_is_kept(self) -> None:
        buckets = Buckets([parameter(3)])
        assert buckets.params[0].is_leaf
        assert not buckets.flats[0].requires_grad

    def test_every_parameter_has_a_storage_of_its_own(self) -> None:
        params = [parameter(3, 5), parameter(), parameter(0, 2), parameter(7, dtype=torch.bfloat16)]
        Buckets(params)
        assert [param.untyped_storage().nbytes() for param in params] == [param.nbytes for param in params]
        twin = nn.Parameter(params[0].data)
        Buckets([*params, twin])
        assert twin.untyped_storage()._cdata == params[0].untyped_storage()._cdata

    def test_versions_advance_with_writes_through_the_buffer(self) -> None:
        params = [parameter(3), parameter(2)]
        buckets = Buckets(params)
        loss = (params[0] * params[0]).sum()
        buckets.flats[0].zero_()
        buckets.advance_versions()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_buffers_made_in_inference_mode_can_be_written_later(self) -> None:
        with torch.inference_mode():
            buckets = Buckets([parameter(3)])
        buckets.flats[0].zero_()


class TestTied:
    def test_the_same_object_twice_is_one_parameter(self) -> None:
        shared, other = parameter(3), parameter(2)
        buckets = Buckets([shared, other, shared])
        assert [id(p) for p in buckets.params] == [id(shared), id(other)]
        assert buckets.flats[0].numel() == 64

    def test_parameters_on_the_same_memory_have_one_slot(self) -> None:
        first = parameter(2, 3)
        between = parameter(4)
        second, third = nn.Parameter(first.data), nn.Parameter(first.data)
        buckets = Buckets([first, between, second, third])
        assert buckets.slots[0] == buckets.slots[2] == buckets.slots[3]
        assert buckets.slots[1] != buckets.slots[0]
        assert buckets.flats[0].numel() == 64
        with torch.no_grad():
            third.fill_(9)
        assert torch.equal(first, torch.full((2, 3), 9.0))
        assert torch.equal(second, first)
        assert torch.equal(between, parameter(4))
        assert buckets.moved() == []

    def test_neighbours_in_memory_are_not_tied(self) -> None:
        memory = torch.arange(6.0)
        first, second = nn.Parameter(memory[:3]), nn.Parameter(memory[3:])
        assert len(set(Buckets([second, first]).slots)) == 2
        assert [first.tolist(), second.tolist()] == [[0, 1, 2], [3, 4, 5]]

    def test_empty_parameters_are_not_tied(self) -> None:
        memory = torch.arange(3.0)
        params = [nn.Parameter(memory), nn.Parameter(memory[:0]), nn.Parameter(torch.empty(0))]
        Buckets(params)
        assert [p.tolist() for p in params] == [[0, 1, 2], [], []]

    @pytest.mark.parametrize(
        "pair",
        [
            lambda m: (m[:4], m[2:]),
            lambda m: (m, m[1:3]),
            lambda m: (m[:3], m[:4]),
            lambda m: (m[:4], m[:4].view(2, 2)),
            lambda m: (m[:4].view(2, 2), m[:4].view(2, 2).t()),
            lambda m: (m[:4], m[:4].view(torch.int32)),
        ],
        ids=["overlap", "inside", "prefix", "other shape", "transposed", "other dtype"],
    )
    @pytest.mark.parametrize("swapped", [False, True])
    def test_sharing_a_part_is_refused_and_nothing_moved(self, pair: object, swapped: bool) -> None:
        memory = torch.arange(6.0)
        params = [parameter(2), *(nn.Parameter(view, requires_grad=False) for view in pair(memory))]
        if swapped:
            params[1:] = params[:0:-1]
        addresses = [p.data_ptr() for p in params]
        with pytest.raises(ValueError, match=r"parameters [12] and [12] share part of their memory"):
            Buckets(params)
        assert [p.data_ptr() for p in params] == addresses
        assert memory.tolist() == [0, 1, 2, 3, 4, 5]


class Sharded(Tensor):
    """A stand-in for a DTensor: a Tensor subclass whose memory does not hold all of its elements."""


UNFIT = {
    "subclass": (lambda: Sharded([1.0, 2.0]), TypeError, "parameter 1 is a Sharded"),
    "sparse": (lambda: torch.eye(3).to_sparse(), TypeError, "layout torch.sparse_coo; only dense torch tensors"),
    "lazy": (lambda: nn.UninitializedParameter(), TypeError, "parameter 1 is a UninitializedParameter"),
    "number": (lambda: 3.0, TypeError, "must be tensors, got 3.0 as number 1"),
    "gaps": (lambda: nn.Parameter(torch.ones(4, 4)[:, :2]), ValueError, r"shape \(4, 2\) has strides \(4, 1\)"),
    "expanded": (lambda: nn.Parameter(torch.ones(1).expand(4)), ValueError, r"shape \(4,\) has strides \(0,\)"),
    "meta": (lambda: nn.Parameter(torch.empty(2, device="meta")), (TypeError, ValueError), "parameter 1 .*meta"),
}


class TestRefuses:
    @pytest.mark.parametrize("unfit", UNFIT)
    def test_before_anything_is_moved(self, unfit: str) -> None:
        make, error, message = UNFIT[unfit]
        fine = parameter(3)
        address = fine.data_ptr()
        with pytest.raises(error, match=message):
            Buckets([fine, make()])
        assert fine.data_ptr() == address
        assert fine.tolist() == [0, 1, 2]

    def test_no_parameters(self) -> None:
        with pytest.raises(ValueError, match="Buckets got no parameters"):
            Buckets([])

    def test_parameters_in_shared_memory_before_anything_is_moved(self) -> None:
        private, shared = parameter(3), parameter(4)
        shared.share_memory_()
        addresses = [private.data_ptr(), shared.data_ptr()]
        with pytest.raises(
            ValueError, match=r"parameter 1 of shape \(4,\) is in memory that other processes may share"
        ):
            Buckets([private, shared])
        assert addresses == [private.data_ptr(), shared.data_ptr()]


class TestMovedParameters:
    def test_new_data_is_copied_into_the_slot(self) -> None:
        first, second, third = params = [parameter(2, 3), parameter(4), parameter(2)]
        buckets = Buckets(params)
        address = second.data_ptr()
        second.data = torch.tensor([9.0, 8.0, 7.0, 6.0])
        assert buckets.moved() == [1]
        assert buckets.rehome() == [1]
        assert second.data_ptr() == address
        assert second.tolist() == [9, 8, 7, 6]
        assert buckets.flats[0][32:36].tolist() == [9, 8, 7, 6]
        assert (first.tolist(), third.tolist()) == (parameter(2, 3).tolist(), [0, 1])
        assert buckets.moved() == buckets.rehome() == []

    def test_nothing_moved(self) -> None:
        param = parameter(3)
        buckets = Buckets([param])
        with torch.no_grad():
            param.add_(1)
        param.grad = torch.ones(3)
        assert buckets.moved() == buckets.rehome() == []
        assert param.tolist() == [1, 2, 3]

    def test_another_memory_format_gets_its_old_strides_back(self) -> None:
        param = parameter(2, 3, 4, 5)
        buckets = Buckets([param])
        param.data = param.data.to(memory_format=torch.channels_last)
        assert buckets.rehome() == [0]
        assert param.is_contiguous()
        assert torch.equal(param, parameter(2, 3, 4, 5))

    def test_a_transposed_view_of_its_own_memory_is_noticed(self) -> None:
        """Same address, shape and dtype: only the strides tell that the elements changed places."""
        param = parameter(3, 3)
        buckets = Buckets([param])
        param.data = param.data.t()
        assert buckets.moved() == [0]
        buckets.rehome()
        assert torch.equal(param, parameter(3, 3).t())
        assert param.stride() == buckets.slots[0].stride == (3, 1)
        assert buckets.flats[0][:9].tolist() == [0, 3, 6, 1, 4, 7, 2, 5, 8]

    def test_two_parameters_that_exchanged_their_memory(self) -> None:
        first, second = parameter(3), parameter(3, start=10)
        buckets = Buckets([first, second])
        first.data, second.data = second.data, first.data
        assert buckets.rehome() == [0, 1]
        assert [first.tolist(), second.tolist()] == [[10, 11, 12], [0, 1, 2]]
        assert buckets.flats[0][[0, 1, 2, 32, 33, 34]].tolist() == [10, 11, 12, 0, 1, 2]

    def test_tied_parameters_stay_tied(self) -> None:
        first = parameter(3)
        second = nn.Parameter(first.data)
        buckets = Buckets([first, second])
        first.data = torch.tensor([5.0, 6.0, 7.0])
        assert buckets.rehome() == [0]
        assert first.data_ptr() == second.data_ptr()
        assert second.tolist() == [5, 6, 7]

    def test_buckets_notice_that_later_ones_took_their_parameters(self) -> None:
        params = [parameter(3), parameter(2)]
        first = Buckets(params)
        second = Buckets(params)
        assert first.moved() == [0, 1]
        assert second.moved() == []

    def test_a_conversion_and_back(self) -> None:
        model = nn.Linear(3, 2)
        values = [p.detach().clone() for p in model.parameters()]
        buckets = Buckets(model.parameters())
        model.double().float()
        assert buckets.rehome() == [0, 1]
        assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
        assert all(is_inside(p, buckets.flats[0]) for p in model.parameters())

    def test_another_dtype_is_refused(self) -> None:
        model = nn.Linear(3, 2)
        buckets = Buckets(model.parameters())
        model.to(torch.bfloat16)
        assert buckets.moved() == [0, 1]
        with pytest.raises(
            RuntimeError,
            match=r"parameter 0 was torch.float32 \(2, 3\) on cpu .* is torch.bfloat16 \(2, 3\) on cpu now",
        ):
            buckets.rehome()
        assert model.weight.dtype == torch.bfloat16

    def test_another_shape_is_refused_before_anything_is_copied(self) -> None:
        first, second = parameter(3), parameter(4)
        buckets = Buckets([first, second])
        before = buckets.flats[0].clone()
        first.data = torch.full((3,), 9.0)
        second.data = torch.ones(5)
        with pytest.raises(
            RuntimeError, match=r"parameter 1 was torch.float32 \(4,\) on cpu .* is torch.float32 \(5,\)"
        ):
            buckets.rehome()
        assert torch.equal(buckets.flats[0], before)
        assert first.tolist() == [9, 9, 9]

    def test_an_empty_parameter_that_got_elements_is_refused(self) -> None:
        param = nn.Parameter(torch.empty(0))
        buckets = Buckets([parameter(3), param])
        param.data = torch.ones(2)
        with pytest.raises(RuntimeError, match=r"parameter 1 was torch.float32 \(0,\)"):
            buckets.rehome()

    def test_load_state_dict_writes_into_the_flat_buffer(self) -> None:
        model = nn.Linear(3, 2)
        buckets = Buckets(model.parameters())
        model.load_state_dict({"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.tensor([7.0, 8.0])})
        assert buckets.moved() == []
        assert buckets.flats[0][:6].tolist() == [0, 1, 2, 3, 4, 5]
        assert buckets.flats[0][32:34].tolist() == [7, 8]

    def test_load_state_dict_with_assign_that_keeps_the_parameters(self) -> None:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model = nn.Linear(3, 2)
            buckets = Buckets(model.parameters())
            loaded = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.tensor([7.0, 8.0])}
            model.load_state_dict(loaded, assign=True)
            assert buckets.params[0] is model.weight
            assert buckets.moved() == [0, 1]
            assert buckets.rehome() == [0, 1]
            assert torch.equal(model.weight, loaded["weight"])
            assert buckets.flats[0][32:34].tolist() == [7, 8]
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    def test_load_state_dict_with_assign_that_replaces_the_parameters(self) -> None:
        """torch gives the module new Parameter objects; buckets, like any optimizer, keep the old ones."""
        model = nn.Linear(3, 2)
        held = model.weight.detach().clone()
        buckets = Buckets(model.parameters())
        model.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, assign=True)
        assert buckets.params[0] is not model.weight
        assert buckets.moved() == []
        assert torch.equal(buckets.params[0], held)


def _stacks(replicas: int = 3) -> list[StackedParameter]:
    shapes = ((5, 3), (), (0, 2), (7,))
    return [StackedParameter(torch.randn(replicas, *shape)) for shape in shapes]


def test_stacked_parameters_are_rows_of_one_buffer() -> None:
    params = _stacks()
    values = [param.detach().clone() for param in params]
    buckets = Buckets(params)
    (flat,) = buckets.flats
    assert buckets.replicas == 3
    assert flat.shape[0] == 3
    for param, value, slot in zip(params, values, buckets.slots, strict=True):
        assert torch.equal(param, value)
        assert param.stride(0) == flat.shape[1]
        for row in range(3):
            assert torch.equal(flat[row, slot.offset : slot.offset + slot.numel], value[row].reshape(-1))
    with torch.no_grad():
        params[0].fill_(2.0)
    assert (flat == 2).sum() == params[0].numel()


def test_a_stacked_parameter_that_was_moved_is_brought_back() -> None:
    params = _stacks()
    buckets = Buckets(params)
    params[3].data = torch.ones(3, 7)
    assert buckets.moved() == [3]
    assert buckets.rehome() == [3]
    assert (buckets.slots[3].view(buckets.flats[0]) == 1).all()


def test_stacked_parameters_keep_the_order_of_their_dimensions() -> None:
    rows = torch.randn(2, 4, 3, 5, 5).permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    param = StackedParameter(rows)
    Buckets([param])
    assert torch.equal(param, rows)
    assert param.stride()[1:] == rows.stride()[1:]


def test_stacks_of_different_numbers_of_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="parameter 0 is a stack of 3 replicas and parameter 4 a stack of 2 replicas"):
        Buckets([*_stacks(3), *_stacks(2)])


class TestMasters:
    def buckets(self) -> Buckets:
        buckets = Buckets([parameter(3, dtype=torch.bfloat16), parameter(2)])
        buckets.keep_masters(lambda dtype: dtype == torch.bfloat16)
        return buckets

    def test_only_the_wanted_dtypes_have_masters(self) -> None:
        buckets = self.buckets()
        assert [master if master is None else master.dtype for master in buckets.masters] == [torch.float32, None]
        assert [flat.dtype for flat in buckets.full] == [torch.float32, torch.float32]
        assert buckets.full[1] is buckets.flats[1]

    def test_a_written_parameter_goes_into_its_master_and_others_keep_theirs(self) -> None:
        buckets = self.buckets()
        master = buckets.masters[0]
        assert master is not None
        master[1] += 2.0**-12  # lost by rounding to bf16
        with torch.no_grad():
            buckets.params[0][2] = 7
        buckets.refresh_masters()
        assert master[:3].tolist() == [0, 1 + 2.0**-12, 7]

    def test_split_masters_are_read_and_written_in_full(self) -> None:
        buckets = Buckets([parameter(3, dtype=torch.bfloat16), parameter(3, dtype=torch.float16)])
        buckets.keep_masters(lambda dtype: dtype != torch.float32, split=True)
        assert [each.dtype for each in buckets.masters if each is not None] == [torch.int16, torch.float32]
        full = buckets.full
        assert [each[:3].tolist() for each in full] == [[0, 1, 2]] * 2
        for each in full:
            each += 2.0**-12  # lost by rounding to bf16
        assert buckets.params[0].tolist() == [0, 1, 2]
        buckets.write_full(full)
        assert buckets.params[0].tolist() == [2.0**-12, 1, 2]
        assert [each[:3].tolist() for each in buckets.read_full()] == [[2.0**-12, 1 + 2.0**-12, 2 + 2.0**-12]] * 2
        with torch.no_grad():
            buckets.params[0][2] = 8
        buckets.refresh_masters()
        assert buckets.full[0][1:3].tolist() == [1 + 2.0**-12, 8 + 2.0**-10], "what the lower half is worth there"

    def test_parameters_become_the_rounded_masters(self) -> None:
        buckets = self.buckets()
        assert buckets.masters[0] is not None
        buckets.masters[0].fill_(1 + 2.0**-12)
        buckets.write_full(buckets.full)
        assert buckets.params[0].tolist() == [1, 1, 1]
