"""Gradients before a step: whether replicas share them, and the hypergradient's slopes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdet_kernels.schedule.gradient_hooks import Displacement, fingerprint


def group(*gradients: torch.Tensor | None) -> dict[str, list[nn.Parameter]]:
    params = []
    for gradient in gradients:
        param = nn.Parameter(torch.zeros_like(gradient) if gradient is not None else torch.zeros(2))
        param.grad = gradient
        params.append(param)
    return {"params": params}


def test_equal_gradients_have_equal_fingerprints_and_no_gradient_has_none() -> None:
    gradient = torch.randn(3, 4)
    assert fingerprint([group(gradient)]) == fingerprint([group(gradient.clone())])
    assert fingerprint([group(None)]) is None


def test_gradients_of_equal_norm_are_told_apart() -> None:
    """Clipping each tensor gives local gradients equal norms."""
    first, second = torch.tensor([0.6, 0.8]), torch.tensor([0.8, -0.6])
    assert fingerprint([group(first)]) != fingerprint([group(second)])


def test_fingerprints_differ_by_one_bit_of_bf16() -> None:
    first = torch.full((1000,), 1.0, dtype=torch.bfloat16)
    second = first.clone()
    second[500] = 1.0078125
    assert fingerprint([group(first)]) != fingerprint([group(second)])


def test_sparse_and_complex_gradients_have_fingerprints() -> None:
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 3.0], (4,), check_invariants=True)
    param = nn.Parameter(torch.zeros(4))
    param.grad = sparse
    assert fingerprint([{"params": [param]}]) is not None
    assert fingerprint([group(torch.tensor([1 + 2j]))]) != fingerprint([group(torch.tensor([1 - 2j]))])


def test_slopes_are_gradient_times_displacement_per_group() -> None:
    params = [nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0]))]
    optimizer = torch.optim.SGD([{"params": []}, {"params": params[:1]}, {"params": params[1:]}], lr=0.1)
    displacement = Displacement(optimizer)
    with torch.no_grad():
        params[0].add_(torch.tensor([0.5, -0.25]))
        params[1].add_(2.0)
    assert displacement.turn() is None
    params[0].grad, params[1].grad = torch.tensor([2.0, 4.0]), torch.tensor([-1.0])
    displacement.measure()
    params[0].grad = torch.tensor([99.0, 99.0])
    displacement.measure()  # only the first gradient after a sync counts
    assert displacement.turn() == [0.0, 0.0, -2.0]


def test_a_gradient_scale_of_the_optimizer_is_divided_out() -> None:
    param = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([param], lr=0.1)
    displacement = Displacement(optimizer)
    with torch.no_grad():
        param.add_(0.5)
    displacement.turn()
    param.grad = torch.tensor([64.0])
    optimizer.grad_scale = torch.tensor(16.0)  # type: ignore[attr-defined]
    displacement.measure()
    assert displacement.turn() == pytest.approx([2.0])


def test_replicas_that_start_apart_do_not_know_the_first_displacement() -> None:
    param = nn.Parameter(torch.tensor([1.0]))
    displacement = Displacement(torch.optim.SGD([param], lr=0.1), apart=True)
    param.grad = torch.tensor([2.0])
    for move, expected in ((0.5, None), (0.25, None), (0.0, [0.5])):
        with torch.no_grad():
            param.add_(move)
        assert displacement.turn() == expected
        displacement.measure()
