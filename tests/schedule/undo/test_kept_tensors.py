"""Copies of nested tensors: values, memory that is used again, and where they live."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdet_kernels.schedule.undo import copies
from hdet_kernels.schedule.undo.copies import KeptTensors, tensors_in, with_tensors
from tests.training import same


def tree(value: float = 1.0, size: int = 3, device: str = "cpu") -> dict[str, Any]:
    def full(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return {"a": [full(size), None, 7], "b": {"c": full(2, 2, dtype=torch.int64), "d": "text"}, "e": full(0)}


def memory(found: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors_in(found) if tensor.numel()]


def test_tensors_are_found_and_replaced_in_order() -> None:
    given = tree()
    others = [tensor + 1 for tensor in tensors_in(given)]
    assert same(with_tensors(given, iter(others)), tree(2.0))
    assert same(given, tree())


def test_a_copy_does_not_follow_its_source() -> None:
    kept, source = KeptTensors(), tree()
    kept.copy(source)
    for tensor in tensors_in(source):
        tensor.zero_()
    assert same(kept.read(), tree())


def test_the_next_copy_uses_the_memory_again_unless_somebody_holds_it_or_the_shapes_differ() -> None:
    kept = KeptTensors()
    kept.copy(tree(1.0))
    first = memory(kept.read())
    kept.copy(tree(2.0))
    assert memory(kept.read()) == first
    lent = kept.lend()
    kept.copy(tree(3.0))
    assert same(lent, tree(2.0))
    assert same(kept.read(), tree(3.0))
    kept.copy(tree(4.0, size=5))
    assert same(kept.read(), tree(4.0, size=5))


def test_what_is_taken_over_is_never_modified() -> None:
    kept, loaded = KeptTensors(), tree(1.0)
    kept.take(loaded)
    assert kept.read() is loaded
    kept.copy(tree(2.0))
    assert same(loaded, tree(1.0))


def test_nothing_is_kept_after_a_drop() -> None:
    kept = KeptTensors()
    kept.copy(tree())
    kept.drop()
    assert kept.read() is None


@pytest.mark.parametrize(
    "source", [torch.ones(2, 3).t(), torch.ones(3, 1).expand(3, 4)], ids=["transposed", "expanded"]
)
def test_strides_do_not_matter(source: torch.Tensor) -> None:
    kept = KeptTensors()
    kept.copy([source])
    assert torch.equal(kept.read()[0], source)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [1.0, 0.0], ids=["device", "host"])
def test_on_a_gpu_the_copy_lives_where_there_is_room(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "SHARE", share)
    kept, source = KeptTensors(), tree(device="cuda", size=1 << 22)
    kept.copy(source)
    for tensor in tensors_in(source):
        tensor.zero_()
    held = [tensor for tensor in tensors_in(kept.read()) if tensor.numel()]
    assert [tensor.is_cuda for tensor in held] == [bool(share)] * 2
    assert [tensor.is_pinned() for tensor in held if not tensor.is_cuda] == [True] * (0 if share else 2)
    back = tree(0.0, device="cuda", size=1 << 22)
    copies.copy_all(list(tensors_in(back)), list(tensors_in(kept.read())))
    kept.was_read()
    assert same(back, tree(device="cuda", size=1 << 22))
    assert same([tensor.cpu() for tensor in tensors_in(kept.lend())], list(tensors_in(tree(size=1 << 22))))


@pytest.mark.gpu
def test_a_copy_to_host_memory_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is busy when the copy is made; what is read later has the values of that moment."""
    monkeypatch.setattr(copies, "SHARE", 0.0)
    kept, source = KeptTensors(), [torch.zeros(1 << 22, device="cuda")]
    kept.copy(source)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    source[0].fill_(1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept.copy(source)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    source[0].fill_(2.0)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        target = torch.zeros(1 << 22, device="cuda")
        torch.cuda._sleep(200_000_000)
        copies.copy_all([target], kept.read())
        kept.was_read()
    kept.copy([torch.full((1 << 22,), 3.0, device="cuda")])  # waits, on the device, until the other stream has read
    assert bool((kept.lend()[0] == 3).all())
    torch.cuda.synchronize()
    assert bool((target == 1).all())
