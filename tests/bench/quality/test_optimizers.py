"""Optimizers of the tasks."""

from __future__ import annotations

import pytest
import torch

from bench.quality.optimizers import OPTIMIZERS, plain_optimizer, replica_optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_and_replicas_have_the_same_rule(name: str) -> None:
    weights = [torch.nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2)]
    for weight, make in zip(weights, (plain_optimizer, replica_optimizer), strict=True):
        optimizer = make(name, [{"params": [weight], "lr": 0.1}], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1])
