"""A first backward pass whose gradients are not finite where the losses are is refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.stack.inputs import Batch
from tests.stack.cases import WIDTH, Messages, R, batch, loss_of


class Model(nn.Module):
    """A BatchNorm, random numbers, and a function whose gradient can be made non-finite."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.BatchNorm1d(5), nn.Linear(WIDTH, 4), nn.Linear(4, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        noise = 1e-3 * torch.rand(4, dtype=x.dtype)
        return self.outer(self.function(self.inner(self.norm(x)) + noise)).square().mean()


class _Identity(torch.autograd.Function):
    """An identity, for gradients of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class _WrongRule(_Identity):
    """An identity whose gradient is NaN in the second replica, under vmap only."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        rows = x.unbind(in_dims[0])
        return torch.stack([rows[0], root_at_zero(rows[1]), *rows[2:]]), 0


def root_at_zero(x: Tensor) -> Tensor:
    return x + (x * 0).abs().sqrt()


def overflow(x: Tensor) -> Tensor:
    """Scale a loss as GradScaler does, so that gradients overflow in fp16."""
    return _Scale.apply(x.half()).to(x.dtype)


class _Scale(_Identity):
    generate_vmap_rule = True

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 1e30


def state_of(stack: hk.ReplicaStack) -> list[Tensor]:
    return [*(buffer.clone() for buffer in stack.buffers()), torch.get_rng_state()]


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("gradients", ["local", "shared"])
def test_an_operation_that_vmap_computes_wrongly_is_reported(gradients: Any, chunk_size: int | None) -> None:
    stack = hk.ReplicaStack(Model(_WrongRule.apply), R, gradients=gradients)
    before = state_of(stack)
    text = (
        r"gradients of norm.weight, norm.bias, inner.weight, inner.bias are not, in replica 1\. One replica after "
        r"another they are finite: torch\.func\.vmap.*chunk_size=1.*fp32.*sdpa_kernel\(SDPBackend\.MATH\).*report"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            stack.backward(loss_of, batch(), chunk_size=chunk_size)
    assert all(map(torch.equal, state_of(stack), before)), "nothing is changed"
    assert all(parameter.grad is None for parameter in stack.parameters())
    assert stack.backward(loss_of, batch(), chunk_size=1).isfinite().all(), "the remedy works"


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_gradients_of_the_model_itself_are_reported(chunk_size: int | None) -> None:
    stack = hk.ReplicaStack(Model(root_at_zero), R)
    with pytest.raises(RuntimeError, match=r"in replicas 0, 1, 2\. Separate modules have them too.*detect_anomaly"):
        stack.backward(loss_of, batch(), chunk_size=chunk_size)


def test_looking_for_the_cause_gives_no_gradients_to_the_batch() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    copied = Batch((x, {"name": "a"}), 2, False).copy(detach=True)
    given, rest = copied.with_slices(copied.slices(1))
    given.square().sum().backward()
    assert (x.grad, rest) == (None, {"name": "a"})
    assert torch.equal(given, x[2:])


def test_many_parameters_are_counted() -> None:
    stack = hk.ReplicaStack(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Hardtanh()), R)
    with pytest.raises(RuntimeError, match=r"of 0.weight, 0.bias, 1.weight, 1.bias, 2.weight and 3 more are not"):
        stack.backward(lambda model, x: root_at_zero(model(x)).mean(), batch())


def test_later_passes_are_not_checked() -> None:
    function: list[Callable[[Tensor], Tensor]] = [torch.tanh]
    stack = hk.ReplicaStack(Model(lambda x: function[0](x)), R)
    stack.backward(loss_of, batch())
    function[0] = root_at_zero
    stack.backward(loss_of, batch())
    assert any(not p.grad.isfinite().all() for p in stack.parameters() if p.grad is not None)


@pytest.mark.parametrize("gradients", ["local", "shared"])
def test_losses_that_are_not_finite_are_left_to_the_scheduler(gradients: Any) -> None:
    stack, sound = (hk.ReplicaStack(Model(torch.tanh), R, gradients=gradients) for _ in range(2))
    with torch.no_grad():
        next(stack.parameters())[1] = torch.nan
    drawn = []
    for each, finite in ((stack, [True, False, True]), (sound, [True] * 3)):
        torch.manual_seed(0)
        assert each.backward(loss_of, batch()).isfinite().tolist() == finite
        drawn.append(torch.rand(1))
        assert dict(each.named_buffers())["norm.num_batches_tracked"].tolist() == [1] * 3
    assert torch.equal(*drawn), "looking for the cause draws no random numbers"


def test_an_overflow_in_fp16_is_no_error(warnings_logged: Messages) -> None:
    stack = hk.ReplicaStack(Model(overflow), R)
    stack.backward(loss_of, batch())
    gradient = stack._parameters[("inner.weight",)].grad
    assert gradient is not None
    assert not gradient.isfinite().all()
    assert len(warnings_logged()) == 1
    assert "a scaled loss overflows in the first steps" in warnings_logged()[0]
