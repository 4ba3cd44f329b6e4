"""A part of a checkpoint as one object."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from hdet_kernels.schedule.checkpoint.packed import packed, unpacked
from tests.training import same

STATE: dict[str, Any] = {"empty": {}, "list": [1, {"a": torch.ones(2)}], "pair": (0.5, None), "tensor": torch.zeros(())}


def test_a_packed_state_is_one_leaf_that_plain_loading_reads() -> None:
    flat, _ = flatten_state_dict({"step": 3, "hdet": packed(STATE)})
    assert flat.keys() == {"step", "hdet"}
    file = io.BytesIO()
    torch.save(packed(STATE), file)
    file.seek(0)
    assert same(unpacked(torch.load(file, weights_only=True)), STATE)


@pytest.mark.parametrize("value", [None, 3, {"format": 3}, [], [1, 2]], ids=repr)
def test_what_was_not_packed_stays(value: Any) -> None:
    assert unpacked(value) is value


def test_a_tensor_on_the_cpu_is_not_copied() -> None:
    (found,) = packed(STATE)
    assert found["tensor"].data_ptr() == STATE["tensor"].data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_tensors_on_a_gpu_come_to_the_cpu() -> None:
    (found,) = packed({"a": [torch.ones(2, device="cuda")]})
    assert found["a"][0].device.type == "cpu"
