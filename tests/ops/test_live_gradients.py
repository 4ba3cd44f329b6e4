"""Gradients that are checked in one call of the extension are those that the chunk table finds one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hdet_kernels.ops.chunks import GRADIENT_DTYPES, ChunkTable, MatchedGradients
from hdet_kernels.ops.extension import why_not
from hdet_kernels.ops.live_gradients import LiveGradients
from hdet_kernels.ops.live_tensors import LiveTensors
from hdet_kernels.optim import FusedAdamW
from hdet_kernels.tensors import Slot

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")


def made(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], LiveGradients, ChunkTable]:
    """Return a vector, a channels-last weight, a transposed matrix, an empty parameter and a scalar, with gradients."""
    layouts = [torch.ones(7), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(3, 4).t()]
    params = [nn.Parameter(tensor.to(dtype)) for tensor in (*layouts, torch.ones(0, 3), torch.tensor(1.0))]
    slots = [Slot(0, 0, param.numel(), tuple(param.shape), param.stride()) for param in params]
    for param in params:
        param.grad = torch.empty_like(param).copy_(torch.randn(param.shape))
    live = LiveGradients(LiveTensors(params), slots, dtype)
    return params, live, ChunkTable(slots, range(len(slots)), torch.device("cpu"), dtype)


def matched(live: LiveGradients) -> MatchedGradients:
    found = live.match()
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
def test_the_table_is_that_of_the_gradients(dtype: torch.dtype) -> None:
    params, live, table = made(dtype)
    found = matched(live)
    assert found.table.tolist() == table.match([param.grad for param in params]).table.tolist()
    assert found.any
    assert found.complete
    assert not found.copied
    assert all(got is param.grad for got, param in zip(found.tensors, params, strict=True))
    assert found.tensors[1:3] == [params[1].grad, params[2].grad]


def test_gradients_that_are_missing_and_come_back() -> None:
    params, live, table = made()
    before, kept = matched(live), matched(live).table.copy()
    params[0].grad = params[3].grad = None
    found = matched(live)
    assert found.table.tolist() == table.match([param.grad for param in params]).table.tolist()
    assert (found.any, found.complete) == (True, False)
    for param in params:
        param.grad = None
    assert not matched(live).any
    assert before.table.tolist() == kept.tolist(), "what was returned keeps its table"
    params[4].grad = torch.ones(())
    assert matched(live).table[:, 0].tolist() == [0, 0, 0, 0, params[4].grad.data_ptr()]


def test_parameters_without_any_gradient_at_first() -> None:
    param = nn.Parameter(torch.ones(2))
    live = LiveGradients(LiveTensors([param]), [Slot(0, 0, 2, (2,), (1,))], torch.float32)
    assert not matched(live).any
    param.sum().backward()
    assert matched(live).any


def test_gradients_at_the_same_addresses_are_the_same_object() -> None:
    params, live, _ = made()
    first = matched(live)
    assert matched(live) is first
    for param in params:
        assert param.grad is not None
        param.grad = param.grad.detach()  # another tensor, the same memory
    assert matched(live) is first
    params[0].grad = torch.ones(7)
    second = matched(live)
    assert second is not first
    assert second.table[0, 0] == params[0].grad.data_ptr()


def test_a_gradient_of_another_dtype_at_the_same_address_is_noticed() -> None:
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    live = LiveGradients(LiveTensors([param]), [Slot(0, 0, 2, (2,), (1,))], torch.bfloat16)
    memory = torch.ones(4, dtype=torch.bfloat16)
    seen = []
    for dtype in (torch.bfloat16, torch.float16):
        param.grad = None
        grad = memory[:2].view(dtype)
        param.grad_dtype = dtype
        param.grad = grad
        seen.append(matched(live).table.tolist())
    assert seen == [[[memory.data_ptr(), GRADIENT_DTYPES.index(dtype)]] for dtype in (torch.bfloat16, torch.float16)]


def transposed(param: Tensor) -> Tensor:
    return torch.ones(4, 3) if param.dim() == 2 else torch.ones(*param.shape)


UNUSUAL: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "strided": (0, lambda param: torch.ones(14)[::2]),
    "expanded": (0, lambda param: torch.ones(1).expand(7)),
    "contiguous where the parameter is channels-last": (1, transposed),
    "contiguous where the parameter is transposed": (2, transposed),
    "sparse": (0, lambda param: torch.ones(7).to_sparse()),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_gradients_are_left_to_python(case: str) -> None:
    params, live, _ = made()
    index, gradient = UNUSUAL[case]
    params[index].grad = gradient(params[index])
    assert live.match() is None
    params[index].grad = None
    assert live.match() is not None


def test_a_freed_gradient_and_one_of_another_size_are_left_to_python() -> None:
    params, live, _ = made()
    assert params[0].grad is not None
    params[0].grad.untyped_storage().resize_(0)
    assert live.match() is None
    params[0].grad = torch.ones(7)
    params[0].grad.resize_(3)
    assert live.match() is None


def test_a_swapped_parameter_has_the_gradient_of_its_new_tensor() -> None:
    params, live, _ = made()
    other = nn.Parameter(torch.ones(7))
    other.grad = torch.ones(7)
    address = other.grad.data_ptr()
    torch.utils.swap_tensors(params[0], other)
    del other
    assert matched(live).table[0, 0] == address


def test_an_optimizer_with_default_gradients_uses_them() -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    (flat,) = FusedAdamW(params)._flat_groups
    sum(param.sum() for param in params).backward()  # type: ignore[union-attr]
    first = flat.gradients()
    assert first.complete
    assert flat.gradients() is first
