"""Layouts of tensors, compared with those of an earlier call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hdet_kernels.ops.live_layouts import LiveLayouts


def swapped(param: Tensor) -> None:
    torch.utils.swap_tensors(param, nn.Parameter(torch.ones(4, 4)))


def renewed(param: Tensor, made: Callable[[Tensor], Tensor]) -> None:
    param.data = made(param.data)


def halved(data: Tensor) -> Tensor:
    """The same memory with the same shape and strides, in elements of half the size."""
    return torch.empty(0, dtype=torch.bfloat16).set_(data.untyped_storage(), 0, data.shape, data.stride())


#: Each leaves the address as it was, except for the first and the last.
CHANGES: dict[str, Callable[[Tensor], None]] = {
    "address": lambda param: renewed(param, torch.clone),
    "order": lambda param: renewed(param, torch.t),
    "shape": lambda param: renewed(param, lambda data: data.view(2, 8)),
    "dimensions": lambda param: renewed(param, lambda data: data.view(2, 2, 2, 2)),
    "length": lambda param: renewed(param, lambda data: data[:3]),
    "dtype": lambda param: renewed(param, halved),
    "tensor": swapped,
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_layout_is_seen(change: str) -> None:
    tensors = [torch.ones(2), nn.Parameter(torch.ones(4, 4)), torch.ones(0)]
    live = LiveLayouts()
    assert not live.match(tensors), "nothing is remembered"
    live.remember(tensors)
    tensors[1].data.fill_(3.0)
    assert live.match(tensors), "values are no part of it"
    CHANGES[change](tensors[1])
    assert not live.match(tensors)
    live.remember(tensors)
    assert live.match(tensors)


def test_other_tensors_do_not_match() -> None:
    memory = torch.ones(2, 3)
    tensors = [memory[0], memory[1]]
    live = LiveLayouts()
    live.remember(tensors)
    assert not live.match([tensors[1], tensors[0]])
    assert not live.match(tensors[:1])
    assert not live.match([*tensors, torch.ones(1)])
    assert not live.match([tensors[0], nn.Parameter(memory[1])])
    assert live.match(tensors)
    live.remember([])
    assert live.match([])


def test_no_tensor_is_kept_alive() -> None:
    tensors = [torch.ones(3)]
    live, seen = LiveLayouts(), weakref.ref(tensors[0])
    live.remember(tensors)
    tensors.clear()
    gc.collect()
    assert seen() is None


def test_a_tensor_without_a_layout_never_matches() -> None:
    tensors = [torch.ones(3), torch.eye(2).to_sparse()]
    live = LiveLayouts()
    live.remember(tensors)
    assert not live.match(tensors)


def test_subclasses() -> None:
    class Own(torch.Tensor):
        pass

    tensors = [torch.ones(2).as_subclass(Own)]
    live = LiveLayouts()
    live.remember(tensors)
    assert live.match(tensors)
    tensors[0].data = torch.zeros(2).as_subclass(Own)
    assert not live.match(tensors)
