"""Hyperparameters that act in the loss, one value per replica."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from tests.stack.cases import R


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
    with pytest.raises(KeyError, match=r"'q' is not a hyperparameter of this stack; it has \['p'\]"):
        hyper["q"]
    with pytest.raises(ValueError, match=r"one number or 3, one for each replica, got shape \(2,\)"):
        hyper["p"] = [1, 2]
    with pytest.raises(TypeError, match="takes numbers, got 'high'"):
        hyper["p"] = "high"  # type: ignore[assignment]
    assert hyper["p"].tolist() == [1, 2, 3]


def test_hyper_cannot_be_set_inside_a_loss() -> None:
    stack = hk.ReplicaStack(nn.Linear(2, 1), R)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        stack.hyper["p"] = 1.0
        return model(x).mean()

    with pytest.raises(RuntimeError, match="set inside a loss function"):
        stack.losses(loss_fn, torch.ones(R, 2))
    stack.hyper["p"] = 1.0
