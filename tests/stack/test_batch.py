"""Batches are cut into one slice per replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hdet_kernels as hk
from hdet_kernels.stack.inputs import Batch
from tests.stack.cases import WIDTH, R, batch, check_close, diverged_stack, loss_of

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


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
    with pytest.raises(ValueError, match=r"7 is not divisible by 3 \(shapes \(7, 5, 8\)\).*drop_last=True"):
        stack.backward(loss_of, batch(7))
    with pytest.raises(ValueError, match=r"must agree in dimension 0.*\(6, 5, 8\), \(3, 5, 8\).*close over"):
        stack.backward(lambda model, x, y: model(x).mean(), batch(6), batch(3))
    with pytest.raises(TypeError, match=r"numpy array of shape \(6,\).*torch\.as_tensor"):
        stack.backward(loss_of, np.zeros(6))
    with pytest.raises(TypeError, match="nested"):
        stack.backward(loss_of, torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged))


def test_a_detached_copy_gives_no_gradients_to_the_batch() -> None:
    x, label = torch.randn(4, 3, requires_grad=True), torch.arange(4)
    whole = Batch((x, {"label": label, "name": "a"}), 2, False)
    copied = whole.copy(detach=True)
    given, rest = copied.with_slices(copied.slices(1))
    assert rest["name"] == "a"
    assert torch.equal(rest["label"], label[2:])
    assert given.requires_grad
    given.square().sum().backward()
    assert x.grad is None
