"""Losses and gradients of a stack equal those of separate modules, each run on its slice of the batch.

Then: losses that vmap cannot compute, batches, hyperparameters in the loss, and what forward leaves in the module.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

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
    ReassignedBuffers,
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
    with pytest.raises(TypeError, match="must return the loss, a tensor, got a tuple"):
        stack.backward(lambda model, x: (model(x).mean(), 1), batch())  # type: ignore[arg-type, return-value]


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


def test_a_loss_that_fails_both_ways_tells_why_it_was_not_computed_together() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        if model(x).sum() > 0:  # vmap cannot branch on values
            return model(x).mean()
        raise ValueError("one after another")

    stack = hk.ReplicaStack(nn.Linear(WIDTH, 1), R)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.zero_()
    with pytest.raises(ValueError, match="one after another") as caught:
        stack.backward(loss_fn, batch())
    (note,) = caught.value.__notes__
    assert "because together they raised: vmap" in note


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


def test_random_numbers_are_restored_when_vmap_fails() -> None:
    def noisy(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x + torch.randn_like(x)).mean()
        return y * y.detach().item()

    stack = diverged_stack(nn.Linear(WIDTH, 1))
    torch.manual_seed(5)
    first = stack.losses(noisy, batch())
    torch.manual_seed(5)
    assert torch.equal(first, stack.losses(noisy, batch(), chunk_size=1)), "as if vmap had not been tried"


def test_buffers_are_restored_when_a_later_replica_raises() -> None:
    stack = hk.ReplicaStack(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 3)
    calls = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        loss = model(x).square().mean()
        if loss.item() > -1 and len(calls) >= 6:  # of the last replica in the second call; the first fails under vmap
            raise KeyError("mine")
        return loss

    stack.backward(loss_fn, torch.randn(12, 3))
    before = [buffer.clone() for buffer in stack.buffers()]
    calls[:] = [1] * 3
    with pytest.raises(KeyError, match="mine"):
        stack.backward(loss_fn, torch.randn(12, 3))
    assert all(map(torch.equal, stack.buffers(), before))


def test_a_batch_that_the_loss_changes_in_place_is_changed_once() -> None:
    stack = hk.ReplicaStack(nn.Linear(3, 1), 2)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        x.mul_(2.0)
        loss = model(x).square().mean()
        return loss if loss.item() > -1 else 2 * loss  # which vmap cannot follow

    x = torch.randn(4, 3)
    expected = [model(2 * part).square().mean() for model, part in zip([stack.replica(0)] * 2, x.chunk(2), strict=True)]
    found = stack.losses(loss_fn, x.clone())
    torch.testing.assert_close(found, torch.stack(expected).detach())


@dataclass
class Pair:
    x: Tensor
    y: Tensor


def test_nested_batches() -> None:
    stack = diverged_stack(nn.Linear(WIDTH, 1))
    x, y = batch(), batch()[:, :, :1]

    def loss_fn(
        model: nn.Module, inputs: dict[str, Any], pair: tuple[Tensor, float], scale: Tensor, name: str
    ) -> Tensor:
        assert (inputs["deep"][0]["x"].shape, pair[0].shape, scale.shape) == ((2, 5, WIDTH), (2, 5, 1), ())
        assert (pair[1], name) == (0.5, "name")
        return (F.mse_loss(model(inputs["deep"][0]["x"]), pair[0]) * scale * pair[1]).mean()

    found = stack.backward(loss_fn, {"deep": [{"x": x}]}, (y, 0.5), torch.tensor(2.0), "name")
    for r in range(R):
        check_close(found[r], F.mse_loss(stack.replica(r)(x.chunk(R)[r]), y.chunk(R)[r]).detach(), "loss")


def test_registered_classes_are_cut_and_others_refused() -> None:
    stack = hk.ReplicaStack(nn.Linear(WIDTH, 1), R)
    pair = Pair(batch(), batch())
    with pytest.raises(TypeError, match=r"a batch holds a Pair with tensors in it.*register the class"):
        stack.losses(lambda model, p: model(p.x).mean(), pair)
    assert stack.losses(lambda model, p: model(p.x).mean(), pair, same_batch=True).shape == (R,)
    pytree.register_dataclass(Pair)
    losses = stack.losses(lambda model, p: model(p.x).mean(), pair)
    check_close(losses, torch.stack([stack.replica(0)(part).mean() for part in pair.x.chunk(R)]).detach(), "losses")


def test_a_loss_without_a_batch() -> None:
    stack = hk.ReplicaStack(nn.Linear(WIDTH, 1), R)
    assert len(set(stack.backward(lambda model: model(torch.randn(2, WIDTH)).mean()).tolist())) == R


def test_batches_that_cannot_be_cut_are_refused() -> None:
    stack = hk.ReplicaStack(nn.Linear(WIDTH, 1), R)
    with pytest.raises(ValueError, match=r"must agree in dimension 0.*\(6, 5, 8\), \(3, 5, 8\).*close over"):
        stack.backward(lambda model, x, y: model(x).mean(), batch(6), batch(3))
    with pytest.raises(TypeError, match="nested"):
        stack.backward(loss_of, torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged))


def scaled(stack: hk.ReplicaStack) -> Callable[..., Tensor]:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        assert stack.hyper["scale"].shape == ()
        return model(x).mean() * stack.hyper["scale"] + stack.hyper["offset"]

    return loss_fn


@pytest.mark.parametrize("chunk_size", [None, 2, 1])
def test_each_replica_reads_its_own_value(chunk_size: int | None) -> None:
    stack = hk.ReplicaStack(nn.Linear(2, 1), R, gradients="local")
    stack.hyper["scale"] = [1, 2, 4]
    stack.hyper.set("offset", 0.5)
    x = torch.ones(1, 2)
    plain = stack.replica(0)(x).mean().detach()
    losses = stack.backward(scaled(stack), x, same_batch=True, chunk_size=chunk_size)
    torch.testing.assert_close(losses, plain * torch.tensor([1.0, 2.0, 4.0]) + 0.5)
    bias = dict(stack.named_parameters())["bias"].grad
    assert bias is not None
    assert bias.flatten().tolist() == [1, 2, 4]
    stack.hyper["scale"] = torch.tensor([3.0, 3.0, 5.0], dtype=torch.float64)
    losses = stack.losses(scaled(stack), x, same_batch=True, chunk_size=chunk_size)
    torch.testing.assert_close(losses, plain * torch.tensor([3.0, 3.0, 5.0]) + 0.5)


def test_hyper_is_a_mapping() -> None:
    hyper = hk.ReplicaStack(nn.Linear(2, 1), R).hyper
    assert (len(hyper), list(hyper), "p" in hyper) == (0, [], False)
    hyper["p"] = 0.25
    assert (len(hyper), list(hyper), "p" in hyper, hyper["p"].tolist()) == (1, ["p"], True, [0.25] * R)
    assert hyper["p"].dtype == torch.float32
    given = torch.tensor([1.0, 2.0, 3.0])
    hyper["p"] = given
    given.zero_()
    assert hyper["p"].tolist() == [1, 2, 3], "a copy"


def test_hyper_cannot_be_set_inside_a_loss() -> None:
    stack = hk.ReplicaStack(nn.Linear(2, 1), R)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        stack.hyper["p"] = 1.0
        return model(x).mean()

    with pytest.raises(RuntimeError, match="set inside a loss function"):
        stack.losses(loss_fn, torch.ones(R, 2))
    stack.hyper["p"] = 1.0


class ParameterInList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.kept = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kept[0], self.layer.bias)


def test_a_loss_of_the_templates_own_parameters_is_refused() -> None:
    module, keeper = nn.Linear(WIDTH, 1), ParameterInList()
    weight = module.weight
    with pytest.raises(RuntimeError, match=r"the module's own weight, not on the replicas'.*model that it is given"):
        hk.ReplicaStack(module, R).backward(lambda model, x: F.linear(x, weight, model.bias).mean(), batch())
    with pytest.raises(RuntimeError, match=r"the module's own layer\.weight, not"):
        hk.ReplicaStack(keeper, R).backward(lambda model, x: model(x).mean(), batch())
    assert all(p.grad is None for p in (*module.parameters(), *keeper.parameters()))


def test_a_loss_may_close_over_the_module() -> None:
    module = nn.Linear(WIDTH, 1)
    stack = diverged_stack(module)
    expected = separate_modules(stack, list(batch().chunk(R)))
    check_stack(stack, expected, stack.backward(lambda _, x: loss_of(module, x), batch()))


class AttributeSetter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, 1), 0
        self.constant = torch.full((WIDTH,), 2.0)
        self.register_buffer("later", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.layer(x * self.constant)
        self.later = self.seen.detach()
        return self.seen.square().mean()


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_tensors_assigned_to_attributes_are_dropped(chunk_size: int | None, warnings_logged: Messages) -> None:
    module = AttributeSetter()
    stack = diverged_stack(module)
    expected = separate_modules(stack, list(batch().chunk(R)))
    for _ in range(2):
        stack.zero_grad()
        check_stack(stack, expected, stack.backward(loss_of, batch(), chunk_size=chunk_size))
    assert not hasattr(module, "seen")
    assert module.later is None
    assert module.calls > 0, "values that are no tensors stay"
    assert len(warnings_logged()) == 1
    assert "forward sets later, seen" in warnings_logged()[0] or "forward sets seen, later" in warnings_logged()[0]
    stack.replica(0)


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    class Growing(ReassignedBuffers):
        def forward(self, x: Tensor) -> Tensor:
            self.mean = torch.cat([self.mean, self.mean])
            return self.layer(x).mean()

    with pytest.raises(RuntimeError, match=r"forward has set buffer mean of shape \(4,\) to a tensor of shape \(8,\)"):
        hk.ReplicaStack(Growing(), R).backward(loss_of, batch())
