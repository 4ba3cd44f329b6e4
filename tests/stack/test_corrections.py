"""Functions that compute something else under vmap are corrected: autocast and padding of embeddings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.stack.cases import (
    MODULES,
    ONE_BY_ONE,
    WIDTH,
    R,
    batch,
    check_stack,
    diverged_stack,
    loss_of,
    separate_modules,
)

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *(("mlp", "outside"), ("language", "inside"), ("convolutions", "outside"), ("checkpoint", "inside")),
        *(
            pytest.param(name, where, marks=pytest.mark.full)
            for name, where in (("mlp", "inside"), ("attention", "outside"), ("attention", "inside"))
        ),
        *(pytest.param(name, "outside", marks=pytest.mark.full) for name in ("language", "checkpoint")),
    ],
)
def test_autocast_is_as_precise_as_in_separate_modules(name: str, where: str) -> None:
    torch.manual_seed(0)
    stack = diverged_stack({**MODULES, **ONE_BY_ONE}[name](), gradients="local")
    x = batch()
    exact = separate_modules(stack, list(x.chunk(R)))

    def inside(model: nn.Module, part: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, part)

    expected = separate_modules(stack, list(x.chunk(R)), inside)
    for _ in range(2):
        stack.zero_grad()
        if where == "inside":
            losses = stack.backward(inside, x)
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = stack.backward(loss_of, x)
                assert torch.is_autocast_enabled("cpu")
    assert losses.dtype == expected[0].dtype
    off = (expected[0] - exact[0]).abs().max()
    assert (losses - exact[0]).abs().max() <= 2 * off + 2**-8 * exact[0].abs().max()
    for parameter_name, parameter in stack.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        own, theirs = exact[1][parameter_name], expected[1][parameter_name]
        # Both differ from fp32 by roundings to bf16, which are not the same ones.
        limit = 2 * (theirs - own).norm() + 2**-8 * own.norm()
        assert (parameter.grad - own).norm() <= limit, parameter_name


def test_autocast_does_not_cache_parameters_that_change() -> None:
    stack = diverged_stack(nn.Linear(WIDTH, 1, bias=False))
    x = batch()
    for loss_fn, chunk_size in ((loss_of, None), (loss_of, 1)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            before = stack.backward(loss_fn, x, chunk_size=chunk_size)
            with torch.no_grad():
                for parameter in stack.parameters():
                    parameter.mul_(2)
            after = stack.backward(loss_fn, x, chunk_size=chunk_size)
        torch.testing.assert_close(after, 4 * before, rtol=2**-6, atol=0)


def test_torch_embedding_keeps_its_padding_index() -> None:
    def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
        return torch.embedding(model.weight, tokens, 2).square().sum()

    stack = diverged_stack(nn.Embedding(5, 3), gradients="local")
    tokens = torch.arange(2 * R).view(-1, 1) % 4
    expected = separate_modules(stack, list(tokens.chunk(R)), loss_fn)
    assert not expected[1]["weight"][:, 2].any()
    check_stack(stack, expected, stack.backward(loss_fn, tokens))
