"""Properties and views of tensors."""

from __future__ import annotations

import pytest
import torch

from hdet_kernels import tensors
from hdet_kernels.tensors import Slot


def test_a_slot_views_its_part_of_one_buffer_or_of_all_replicas() -> None:
    slot = Slot(0, 2, 6, (3, 2), (1, 3))
    flat = torch.arange(10.0)
    assert slot.view(flat).tolist() == [[2, 5], [3, 6], [4, 7]]
    stack = torch.stack([flat, flat + 100])
    assert torch.equal(slot.view(stack)[1], slot.view(flat) + 100)
    slot.view(stack).zero_()
    assert stack.sum(dim=1).tolist() == [0 + 1 + 8 + 9, 400 + 18]


@pytest.mark.parametrize(
    ("tensor", "dense", "overlap"),
    [
        (torch.zeros(2, 3), True, False),
        (torch.zeros(2, 3).T, True, False),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True, False),
        (torch.zeros(4, 3)[:, 0], False, False),
        (torch.zeros(4, 3)[::2], False, False),
        (torch.zeros(3).expand(2, 3), False, True),
        (torch.zeros(5).as_strided((2, 3), (2, 1)), False, True),
        (torch.zeros(3, 1).as_strided((3, 1), (1, 7)), True, False),
        (torch.zeros(0, 3)[:, ::2], True, False),
        (torch.zeros(()), True, False),
    ],
    ids=[
        "plain",
        "transposed",
        "channels-last",
        "column",
        "rows",
        "expanded",
        "sliding",
        "size-one",
        "empty",
        "scalar",
    ],
)
def test_density_and_overlap(tensor: torch.Tensor, dense: bool, overlap: bool) -> None:
    assert (tensors.is_dense(tensor), tensors.has_overlap(tensor)) == (dense, overlap)


def test_a_flat_view_has_the_elements_in_memory_order() -> None:
    values = torch.arange(6.0).view(2, 3)
    assert tensors.flat_view(values.T).tolist() == list(range(6))
    assert tensors.flat_view(values.T).data_ptr() == values.data_ptr()
    assert tensors.flat_view(torch.tensor([1 + 2j])).tolist() == [1, 2]
    assert not tensors.flat_view(torch.zeros(2, requires_grad=True)).requires_grad
    with pytest.raises(ValueError, match=r"shape \(2,\) with strides \(3,\) has gaps or overlaps"):
        tensors.flat_view(values[:, 0])


def test_sums_are_formed_in_a_wide_enough_dtype() -> None:
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    assert [tensors.travel_dtype(kind) for kind in kinds] == [torch.float32] * 3 + [torch.float64]
    assert tensors.wide_dtype(torch.device("cpu")) == torch.float64
    assert tensors.wide_dtype(torch.device("mps")) == torch.float32


def test_the_master_counts_where_the_parameter_is_its_rounding() -> None:
    master = torch.tensor([1.001, 1.001, -1e-30, 0.0])
    param = master.to(torch.bfloat16)
    param[1] = 2.0
    param[3] = -0.0  # equal to the master's rounding as a number, but not bit for bit
    full = tensors.in_full(param, master)
    assert full[:3].tolist() == [master[0].item(), 2.0, master[2].item()]
    assert full[3].signbit()


def test_the_layout_hash_tells_layouts_apart() -> None:
    first = [torch.zeros(2, 3), torch.zeros(4)]
    same = [torch.ones(2, 3), torch.ones(4)]
    assert tensors.layout_hash(first) == tensors.layout_hash(same) < 2**48
    others = [
        first[::-1],
        first[:1],
        [torch.zeros(3, 2).T, first[1]],
        [torch.zeros(3, 2), first[1]],
        [first[0].double(), first[1]],
    ]
    hashes = {tensors.layout_hash(layout) for layout in [first, *others]}
    assert len(hashes) == 1 + len(others)
    assert tensors.layout_hash(first, ["a", "b"]) != tensors.layout_hash(first, ["a", "c"])


def test_tied_tensors_count_once() -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    assert [id(t) for t in tensors.unique([a, b, a])] == [id(a), id(b)]
    with pytest.raises(TypeError, match="got a single one; pass"):
        tensors.unique(a)
    kept = tensors.distinct([a, a.view(2, 2), b])
    assert [t.data_ptr() for t in kept] == [a.data_ptr(), b.data_ptr()]
    whole = torch.zeros(2, 6)
    assert len(tensors.distinct([whole[:, :3], whole[:, 3:]])) == 2, "tensors may lie in each other's gaps"
    with pytest.raises(ValueError, match=r"shapes \(4,\) and \(3,\), share a part of their memory"):
        tensors.distinct([a, a[1:]])


def test_stacked_parameters_say_how_many_replicas_they_hold() -> None:
    plain = torch.arange(6.0).view(2, 3)
    assert tensors.replicas_of(plain) is None
    assert tensors.one_replica(plain) is plain
    stack = torch.arange(6.0).view(2, 3)
    stack.replicas, stack.shares_gradient = 2, True  # type: ignore[attr-defined]
    assert tensors.replicas_of(stack) == 2
    assert tensors.one_replica(stack).tolist() == [0, 1, 2]
    assert tensors.one_replica(stack, stack + 1).tolist() == [1, 2, 3]
    assert tensors.share_gradients([stack])
    assert not tensors.share_gradients([stack, plain])


def test_a_plain_tensor_is_its_own_local_part() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    part = tensors.local(tensor)
    assert part.data_ptr() == tensor.data_ptr()
    assert not part.requires_grad
