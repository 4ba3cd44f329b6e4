"""Gradients of a stack: collected as autograd produces them, averaged, and added to ``grad``."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.ensemble import ProcessEnsemble, SingleReplica
from hdet_kernels.stack.gradients import LocalGradients, SharedGradients
from tests import training
from tests.ranks import run_ranks
from tests.stack.cases import (
    WIDTH,
    Mlp,
    R,
    batch,
    check_close,
    check_stack,
    diverge,
    diverged_stack,
    loss_of,
    separate_modules,
)

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_gradients_accumulate(gradients: Any) -> None:
    stack = diverged_stack(Mlp(), gradients=gradients)
    first, second = batch(6), batch(9) + 1
    one, two = separate_modules(stack, list(first.chunk(R))), separate_modules(stack, list(second.chunk(R)))
    stack.backward(loss_of, first)
    losses = stack.backward(loss_of, second, chunk_size=2)
    check_stack(stack, (two[0], {name: one[1][name] + two[1][name] for name in one[1]}, {}), losses)
    stack.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in stack.parameters())
    check_stack(stack, two, stack.backward(loss_of, second))
    stack.zero_grad()
    assert all(p.grad is None for p in stack.parameters())


def test_the_mean_gradient_of_half_precision_parameters_is_rounded_once() -> None:
    stack = diverged_stack(Mlp().to(torch.bfloat16))
    x = batch().bfloat16()
    expected = separate_modules(stack, list(x.chunk(R)))[1]
    for chunk_size in (None, 1):
        stack.zero_grad()
        stack.backward(loss_of, x, chunk_size=chunk_size)
        for name, parameter in stack.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.bfloat16
            check_close(parameter.grad[0].float(), expected[name].float().mean(0), name, rtol=2**-7)


def test_rows_with_gaps_and_other_memory_formats() -> None:
    """An optimizer moves rows into its buffers, with gaps between them; a row may be channels_last."""
    module = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    stack = diverged_stack(module, gradients="local")
    for parameter in stack.parameters():
        space = torch.zeros(R, parameter[0].numel() + 7)
        strides = (space.stride(0), *parameter.stride()[1:])
        parameter.data = torch.as_strided(space, parameter.shape, strides, 3).copy_(parameter.data)
    x = torch.randn(2 * R, 2, 5, 5)
    check_stack(stack, separate_modules(stack, list(x.chunk(R))), stack.backward(loss_of, x))
    weight = next(iter(stack.parameters()))
    assert weight.grad is not None
    assert weight.grad.stride()[1:] == weight.stride()[1:], "the gradient lies as its parameter does"


@pytest.mark.parametrize("clip", [True, False])
def test_clipping_by_the_norm_of_all_replicas_names_what_clips_each(
    clip: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stack = hk.ReplicaStack(nn.Linear(3, 1), 2, gradients="local")
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(2):  # accumulated gradients are written too
            stack.backward(lambda model, x: model(x).square().mean(), torch.ones(4, 3))
        if clip:
            nn.utils.clip_grad_norm_(stack.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    assert caplog.text.count("pass max_grad_norm= to the optimizer") == clip


def test_an_unused_parameter_has_no_gradient() -> None:
    module = nn.ModuleDict({"used": nn.Linear(WIDTH, 1), "unused": nn.Linear(2, 2)})
    for gradients in ("shared", "local"):
        stack = hk.ReplicaStack(module, R, gradients=gradients)  # type: ignore[arg-type]
        stack.backward(lambda model, x: model["used"](x).mean(), batch())
        assert {n for n, p in stack.named_parameters() if p.grad is None} == {"unused.weight", "unused.bias"}


def test_a_stacked_parameter_frozen_later_gets_no_gradient() -> None:
    stack = diverged_stack(Mlp())
    stack._parameters["inner.weight",].requires_grad_(False)
    stack.backward(loss_of, batch())
    assert [n for n, p in stack.named_parameters() if p.grad is None] == ["inner.weight"]


def test_sparse_gradients_become_dense() -> None:
    stack = diverged_stack(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten()))
    tokens = torch.arange(2 * R).view(-1, 1) % 5
    stack.backward(loss_of, tokens)
    weight = next(iter(stack.parameters()))
    assert weight.grad is not None
    assert not weight.grad.is_sparse
    rows = [part.flatten() for part in tokens.chunk(R)]
    each = [torch.zeros(5, 3).index_add(0, t, 2 / 6 * weight[r].detach()[t]) for r, t in enumerate(rows)]
    check_close(weight.grad[0], torch.stack(each).mean(0), "weight")


def _on_two_ranks(rank: int) -> tuple[Tensor, dict[str, Tensor | None], list[str]]:
    torch.manual_seed(0)
    module = nn.ModuleDict({"a": Mlp(), "b": nn.Linear(WIDTH, 1), "c": nn.Linear(2, 2)})
    stack = diverge(hk.ReplicaStack(module, 2, ensemble=ProcessEnsemble()))

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        loss = model["a"](x)
        return loss + model["b"](x).mean() if rank else loss

    x = batch(8).chunk(2)[rank]
    losses = stack.backward(loss_fn, x)
    stack.backward(loss_fn, x, chunk_size=1)
    return losses, {name: p.grad for name, p in stack.named_parameters()}, [str(stack.ensemble.size), str(len(losses))]


def test_shared_gradients_are_averaged_over_processes() -> None:
    results = run_ranks(2, _on_two_ranks)
    torch.manual_seed(0)
    module = nn.ModuleDict({"a": Mlp(), "b": nn.Linear(WIDTH, 1), "c": nn.Linear(2, 2)})
    stack = diverge(hk.ReplicaStack(module, 2))
    total: dict[str, Tensor] = {}
    for rank, whole in enumerate(batch(8).chunk(2)):

        def loss_fn(model: Any, x: Tensor, rank: int = rank) -> Tensor:
            return model["a"](x) + (model["b"](x).mean() if rank else 0)

        losses, gradients, _ = separate_modules(stack, list(whole.chunk(2)), loss_fn)
        check_close(results[rank][0], losses, "losses")
        for name, gradient in gradients.items():
            total[name] = total.get(name, torch.zeros(())) + gradient.sum(0) / 4
    for _, found, facts in results:
        assert facts == ["4", "2"]
        for name, gradient in found.items():
            if name.startswith("c."):
                assert gradient is None, "None everywhere stays None"
            else:
                assert gradient is not None, name
                check_close(gradient[0], 2 * total[name], name)
    assert all(torch.equal(results[0][1][n], results[1][1][n]) for n in total)  # type: ignore[arg-type]


def _accumulated(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of three batches, averaged after each batch, and averaged once after the last."""
    found = []
    for waits in (False, True):
        stack = hk.ReplicaStack(training.network().double(), replicas=2)
        for step in range(3):
            own = [training.batch(2 * rank + row, step) for row in range(2)]
            parts = [torch.cat(part).double() for part in zip(*own, strict=True)]
            with stack.no_sync() if waits and step < 2 else contextlib.nullcontext():
                stack.backward(training.loss_of, *parts)
            if waits and step == 0:
                alone = [param.grad[0].clone() for param in stack.parameters()]
        found.append([param.grad[0].clone() for param in stack.parameters()])
    assert any(not torch.equal(a, b) for a, b in zip(alone, found[0], strict=True))
    return found[0], found[1]


def test_no_sync_averages_accumulated_gradients_once() -> None:
    results = run_ranks(2, _accumulated)
    for every, once in results:
        for a, b in zip(every, once, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a, b)


def _survivor(rank: int) -> tuple[str, bool]:
    """Return the error of the last rank when the other dies before the average, and whether it kept its gradients."""
    stack = hk.ReplicaStack(training.network().double(), replicas=2)
    parts = [torch.cat([part, part]).double() for part in training.batch(rank, 0)]
    with stack.no_sync():
        stack.backward(training.loss_of, *parts)
    before = [(param.detach().clone(), param.grad[0].clone()) for param in stack.parameters()]
    if rank == 0:
        os._exit(0)
    try:
        stack.backward(training.loss_of, *parts)
    except RuntimeError as error:
        kept = zip(stack.parameters(), before, strict=True)
        return str(error), all(torch.equal(p, own) and torch.equal(p.grad[0], grad) for p, (own, grad) in kept)
    return "nothing", False


def test_a_dead_peer_leaves_parameters_and_gradients_intact() -> None:
    message, kept = run_ranks(2, _survivor, expect_dead=1)[1]
    assert message != "nothing"
    assert kept


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_committed_gradients_do_not_alias_memory_that_is_overwritten(gradients: str) -> None:
    """A recorded pass writes to the same tensors at every replay."""
    param = hk.StackedParameter(torch.zeros(R, 2), shares_gradient=gradients == "shared")
    collector = SharedGradients([param], SingleReplica()) if gradients == "shared" else LocalGradients([param])
    collector.begin(1)
    collector.take(0, slice(0, R), torch.ones(R, 2))
    collected = list(collector.collected)
    collector.commit()
    assert param.grad is not None
    assert collected[0] is not None
    assert param.grad.data_ptr() == collected[0].data_ptr()
    collector.unalias(collected)
    collected[0].fill_(5.0)
    assert torch.equal(param.grad, torch.ones(R, 2))
    assert (param.grad.stride(0) == 0) == (gradients == "shared")
