"""Losses and gradients of a stack equal those of separate modules, each run on its slice of the batch."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from tests.stack.cases import (
    MODULES,
    ONE_BY_ONE,
    RTOL,
    WIDTH,
    Attention,
    DataDependent,
    Messages,
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


# Every module together, two of them in chunks as well; the other combinations are left to make test-full.
COMBINATIONS = [
    *((name, None, "shared" if number % 2 else "local") for number, name in enumerate(MODULES)),
    *((name, 2, "local") for name in ("mlp", "batch-norm")),
    *((name, 1, "shared") for name in ("mlp", "batch-norm")),
]
MORE_COMBINATIONS = [
    *((name, None, "local" if number % 2 else "shared") for number, name in enumerate(MODULES)),
    *((name, 2, "shared") for name in MODULES),
    *((name, 1, "local") for name in MODULES),
]


@pytest.mark.parametrize(
    ("name", "chunk_size", "gradients"),
    [*COMBINATIONS, *(pytest.param(*combination, marks=pytest.mark.full) for combination in MORE_COMBINATIONS)],
)
def test_losses_gradients_and_buffers_equal_those_of_separate_modules(
    name: str, chunk_size: int | None, gradients: Any, warnings_logged: Messages
) -> None:
    torch.manual_seed(0)
    stack = diverged_stack(MODULES[name](), gradients=gradients)
    x = batch()
    expected = separate_modules(stack, list(x.chunk(R)))
    check_stack(stack, expected, stack.backward(loss_of, x, chunk_size=chunk_size))
    assert warnings_logged() == [], "computed together"


@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        *((name, "shared" if number % 2 else "local") for number, name in enumerate(ONE_BY_ONE)),
        *(
            pytest.param(name, "local" if number % 2 else "shared", marks=pytest.mark.full)
            for number, name in enumerate(ONE_BY_ONE)
        ),
    ],
)
def test_losses_that_vmap_cannot_compute_are_computed_one_by_one(
    name: str, gradients: Any, warnings_logged: Messages
) -> None:
    torch.manual_seed(0)
    stack = diverged_stack(ONE_BY_ONE[name](), gradients=gradients)
    x = batch().requires_grad_("reentrant" in name)
    expected = separate_modules(stack, [part.detach().requires_grad_(x.requires_grad) for part in x.chunk(R)], calls=2)
    stack.backward(loss_of, x)
    check_stack(stack, expected, stack.backward(loss_of, x))
    assert len(warnings_logged()) == 1, "logged once"
    assert "loss_of are computed one after the other" in warnings_logged()[0]
    assert "3 forward passes" in warnings_logged()[0]


def test_same_batch_goes_to_all_replicas() -> None:
    stack = diverged_stack(Mlp())
    x = batch(4)
    expected = separate_modules(stack, [x] * R)
    check_stack(stack, expected, stack.backward(loss_of, x, same_batch=True))


def test_a_stack_of_one_replica_equals_the_module_bit_for_bit() -> None:
    stack = diverge(hk.ReplicaStack(Mlp(), 1))
    x = batch(4)
    expected = separate_modules(stack, [x])
    losses = stack.backward(loss_of, x)
    assert torch.equal(losses, expected[0]), "to the bit"
    assert all(torch.equal(p.grad, expected[1][n]) for n, p in stack.named_parameters() if p.grad is not None)


def test_replicas_differ_by_more_than_the_tolerance() -> None:
    """Else the comparisons in this file would not notice rows that are mixed up."""
    stack = diverged_stack(Mlp())
    losses = stack.losses(loss_of, batch(4), same_batch=True)
    assert float(losses.std()) > 100 * RTOL * float(losses.mean())
    assert not math.isnan(float(losses.sum()))


@pytest.mark.parametrize("name", ["mlp", "batch-norm", "lstm"])
def test_losses_without_gradients(name: str) -> None:
    stack = diverged_stack({**MODULES, **ONE_BY_ONE}[name]())
    x = batch()
    expected = separate_modules(stack, list(x.chunk(R)))
    for chunk_size in (None, 2):
        losses = copy_of(stack).losses(loss_of, x, chunk_size=chunk_size)
        check_close(losses, expected[0], "losses")
        assert losses.grad_fn is None
    assert all(p.grad is None for p in stack.parameters())


def copy_of(stack: hk.ReplicaStack) -> hk.ReplicaStack:
    copied = hk.ReplicaStack(copy.deepcopy(stack.replica(0)), stack.replicas)
    copied.load_state_dict(stack.state_dict())
    return copied


def test_backward_under_no_grad() -> None:
    stack = diverged_stack(Mlp())
    expected = separate_modules(stack, list(batch().chunk(R)))
    with torch.no_grad():
        check_stack(stack, expected, stack.backward(loss_of, batch()))


def test_eval_mode_reaches_the_replicas() -> None:
    stack = diverged_stack(nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 1)))
    assert stack.eval() is stack
    assert not stack.training
    x = batch()
    check_stack(stack, separate_modules(stack, list(x.chunk(R))), stack.backward(loss_of, x))
    assert stack.train().training


@pytest.mark.parametrize(
    "module", [nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 4)), Attention(0.5)], ids=["dropout", "attention"]
)
def test_dropout_differs_between_replicas(module: nn.Module) -> None:
    stack = hk.ReplicaStack(module, R, gradients="local")
    losses = stack.backward(loss_of, batch(), same_batch=True)
    assert len(set(losses.tolist())) == R
    gradients = [p.grad for p in stack.parameters()]
    assert all(g is not None and not torch.equal(g[0], g[1]) for g in gradients)
    stack.eval()
    assert len(set(stack.losses(loss_of, batch(), same_batch=True).tolist())) == 1


def test_results_that_are_no_losses_are_refused() -> None:
    stack = hk.ReplicaStack(nn.Linear(WIDTH, 1), R)
    with pytest.raises(ValueError, match=r"one real number for each replica, got shape \(2, 5, 1\).*\.mean\(\)"):
        stack.backward(lambda model, x: model(x), batch())
    with pytest.raises(TypeError, match="must return the loss, a tensor, got a tuple"):
        stack.backward(lambda model, x: (model(x).mean(), 1), batch())
    with pytest.raises(TypeError, match="loss_fn must be callable"):
        stack.backward(batch())  # type: ignore[arg-type]
    for wrong in (0, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="chunk_size must be a whole number"):
            stack.backward(loss_of, batch(), chunk_size=wrong)  # type: ignore[arg-type]
    assert all(p.grad is None for p in stack.parameters())


def test_errors_of_the_loss_function_are_raised_unchanged(warnings_logged: Messages) -> None:
    def wrong(model: nn.Module, x: Tensor) -> Tensor:
        model.norm(x)  # changes the buffers, before it fails
        return model.layer(x[..., 1:]).mean()

    stack = hk.ReplicaStack(DataDependent("branch"), R)
    before = stack.state_dict()["norm.running_mean"].clone()
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(10x7 and 8x1\)"):
        stack.backward(wrong, batch())
    assert torch.equal(stack.state_dict()["norm.running_mean"], before)
    assert all(p.grad is None for p in stack.parameters())
    assert warnings_logged() == [], "the loss function failed, not vmap"
    with pytest.raises(ZeroDivisionError):
        stack.backward(lambda model, x: model(x) / 0 * (1 // 0), batch())


def test_vmap_may_fail_at_a_later_call(warnings_logged: Messages) -> None:
    how = "together"

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return y.square().mean() * (1 if how == "together" else float(y.detach().sum()))

    stack = diverged_stack(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(WIDTH, 1)))
    modules = [stack.replica(r) for r in range(R)]
    for how in ("together", "one by one"):
        expected = torch.stack([loss_fn(m, part) for m, part in zip(modules, batch().chunk(R), strict=True)])
        check_close(stack.losses(loss_fn, batch()), expected.detach(), how)
        assert len(warnings_logged()) == (how == "one by one")
    statistics = dict(stack.named_buffers())
    for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        check_close(statistics[name], torch.stack([dict(m.named_buffers())[name] for m in modules]), name)


def test_out_of_memory_is_raised_and_not_retried_one_by_one() -> None:
    calls = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(x.shape)
        raise torch.OutOfMemoryError("too much")

    with pytest.raises(torch.OutOfMemoryError, match="too much") as caught:
        hk.ReplicaStack(nn.Linear(WIDTH, 1), R).backward(loss_fn, batch())
    assert caught.value.__notes__ == ["chunk_size=k computes k of the 3 replicas at a time"]
    assert len(calls) == 1


class MethodLoss:
    def __init__(self) -> None:
        self.weight = 2.0

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.weight * loss_of(model, x)

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.loss(model, x)


def scaled_loss(factor: float, model: nn.Module, x: Tensor) -> Tensor:
    return factor * loss_of(model, x)


@pytest.mark.parametrize(
    ("loss_fn", "factor"),
    [
        (lambda m, x: loss_of(m, x), 1),
        (MethodLoss().loss, 2),
        (MethodLoss(), 2),
        (functools.partial(scaled_loss, 0.5), 0.5),
    ],
    ids=["lambda", "bound method", "object", "partial"],
)
def test_kinds_of_loss_functions(loss_fn: Any, factor: float) -> None:
    stack = diverged_stack(Mlp())
    expected = separate_modules(stack, list(batch().chunk(R)))[0]
    check_close(stack.backward(loss_fn, batch()), factor * expected, "losses")


def test_a_lambda_evaluated_again_is_the_same_loss_function(warnings_logged: Messages) -> None:
    stack = diverged_stack(nn.Linear(WIDTH, 1))
    for _ in range(3):
        stack.losses(lambda model, x: model(x).mean() * float(x.sum()), batch())
    assert len(warnings_logged()) == 1
