"""Plain C functions of the extension: where they can be called, and which tensors they can be given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hdet_kernels.ops import native_calls
from hdet_kernels.ops.extension import why_not
from hdet_kernels.ops.native_calls import address_of, handle_of, is_plain, looks, steps, why_not_callable

needs_extension = pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")


@needs_extension
def test_the_functions_can_be_called_with_this_torch() -> None:
    """A new release of torch fails here. Look at what csrc/live_tensors.cpp takes from it, then admit it."""
    assert why_not_callable() is None
    assert looks().hdet_can_look()
    assert steps().hdet_bound_step_bytes() > 0


@needs_extension
@pytest.mark.parametrize("release", ["2.10.1", "2.14.0a0+git1", "3.0.0"])
def test_another_release_of_torch_is_not_trusted(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_calls.torch, "__version__", release)
    reason = why_not_callable.__wrapped__()
    assert reason is not None
    assert release in reason


def test_without_the_extension_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_calls, "why_not", lambda: "not built")
    assert why_not_callable.__wrapped__() == "not built"


@needs_extension
def test_an_extension_of_another_version_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(native_calls._STEPS, "hdet_of_a_later_version", [])
    assert "lacks hdet_of_a_later_version; it is of another version" in (why_not_callable.__wrapped__() or "")


@needs_extension
def test_plain_tensors_have_a_handle_and_subclasses_have_none() -> None:
    class Own(torch.Tensor):
        pass

    tensors = [torch.ones(3), nn.Parameter(torch.ones(2))]
    assert all(map(is_plain, tensors))
    assert not is_plain(torch.ones(2).as_subclass(Own))
    handles = np.array([handle_of(tensor) for tensor in tensors], dtype=np.int64)
    addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
    assert looks().hdet_lie_at(address_of(handles), 2, address_of(addresses)) == 1
