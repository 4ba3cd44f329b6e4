"""Tensors that are looked at in one call of the extension, and in Python without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hdet_kernels.ops.extension import why_not
from hdet_kernels.ops.live_tensors import LiveTensors

needs_extension = pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")
#: The backend ``"torch"`` is Python alone.
WAYS = ["torch", pytest.param("cpp", marks=needs_extension)]


@needs_extension
def test_the_extension_looks_at_tensors() -> None:
    assert LiveTensors([torch.ones(1)]).library is not None


@pytest.mark.parametrize("backend", WAYS)
def test_a_tensor_that_moved(backend: str) -> None:
    tensors = [torch.ones(2), nn.Parameter(torch.ones(3)), torch.ones(0)]
    live = LiveTensors(tensors, backend)
    assert (live.library is not None) == (backend == "cpp")
    assert not live.moved()
    for change in (lambda: tensors[1].data.clone(), lambda: tensors[1].data[1:]):
        tensors[1].data = change()
        assert live.moved()
        live.remember_addresses()
        assert not live.moved()


@pytest.mark.parametrize("backend", WAYS)
def test_a_parameter_that_was_swapped_with_another(backend: str) -> None:
    """``swap_tensors`` gives a Python tensor another C++ tensor, as ``module.to`` does where it swaps parameters."""
    param, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    live = LiveTensors([param], backend)
    torch.utils.swap_tensors(param, other)
    del other  # with it the C++ tensor that was the parameter's
    assert live.moved()
    live.remember_addresses()
    before = param._version
    live.advance_versions()
    assert (live.moved(), param._version) == (False, before + 1)


@pytest.mark.parametrize("backend", WAYS)
def test_versions_advance_where_told(backend: str) -> None:
    tensors = [torch.ones(2) for _ in range(4)]
    live = LiveTensors(tensors, backend)
    live.advance_versions()
    live.advance_versions(np.array([1, 3]))
    live.advance_versions(np.array([], dtype=np.intp))
    assert [tensor._version for tensor in tensors] == [1, 2, 1, 2]


@pytest.mark.parametrize("backend", WAYS)
def test_a_tensor_without_a_version_is_passed_over(backend: str) -> None:
    with torch.inference_mode():
        without = torch.ones(2)
    tensors = [torch.ones(2), without, torch.ones(2)]
    LiveTensors(tensors, backend).advance_versions()
    assert [tensors[0]._version, tensors[2]._version] == [1, 1]


@needs_extension
def test_subclasses_are_looked_at_in_python() -> None:
    class Own(torch.Tensor):
        pass

    assert LiveTensors([torch.ones(2), torch.ones(2).as_subclass(Own)]).library is None
    assert LiveTensors([]).library is None


@pytest.mark.parametrize("backend", WAYS)
def test_members_of_a_list_are_compared_as_objects(backend: str) -> None:
    members = [torch.ones(1), torch.ones(1)]
    live = LiveTensors(members, backend)
    assert live.are(members)
    assert live.are(list(members))
    others = [members[::-1], [members[0], torch.ones(1)], [], members[:1], [*members, members[0]]]
    assert not any(map(live.are, others)), "another order, an equal tensor, fewer and more"
