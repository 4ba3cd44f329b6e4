"""FusedLion against its equations."""

from __future__ import annotations

import pytest
import torch

from hdet_kernels.optim import FusedLion
from tests.ops.cases import BACKENDS
from tests.optim.cases import assert_refused, choose_backends, give_gradients, parameters


@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "torch-cpu", "cpp-cpu"))
def test_lion_follows_its_equations(backend: tuple[str, str]) -> None:
    where, device = backend
    lr, (beta1, beta2), decay = 0.01, (0.9, 0.99), 0.1
    params = parameters(torch.float64, device)
    expected = [param.detach().cpu().clone() for param in params]
    moments = [torch.zeros_like(param) for param in expected]
    optimizer = FusedLion(params, lr, (beta1, beta2), decay, backend=where)
    for seed in range(4):
        give_gradients(params, seed=seed)
        for theta, m, param in zip(expected, moments, params, strict=True):
            assert param.grad is not None
            g = param.grad.cpu()
            theta.mul_(1 - lr * decay).sub_(lr * torch.sign(beta1 * m + (1 - beta1) * g))
            m.mul_(beta2).add_((1 - beta2) * g)
        optimizer.step()
    for param, theta, m in zip(params, expected, moments, strict=True):
        torch.testing.assert_close(param.detach().cpu(), theta, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(optimizer.state[param]["exp_avg"].cpu(), m, rtol=1e-14, atol=1e-14)


def test_bad_betas_are_refused_before_anything_moves() -> None:
    assert_refused(FusedLion, {"betas": (-0.1, 0.9)}, "betas must be in")
