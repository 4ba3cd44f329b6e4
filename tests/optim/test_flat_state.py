"""The state as whole buffers: one for all replicas of a stack or one for each, and back."""

from __future__ import annotations

import pytest
import torch

from hdet_kernels.optim import FusedOptimizer
from hdet_kernels.stack import StackedParameter
from tests.optim.cases import fused_optimizer, parameters


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "adagrad", "lion"])
def test_replicas_can_have_states_of_their_own_for_a_while(name: str) -> None:
    """Separated and shared again, the state is that of the first replica, and the next steps are those of sharing."""

    def trained(steps: int, *, apart: bool) -> tuple[list[StackedParameter], FusedOptimizer]:
        params = [StackedParameter(param.detach().repeat(3, *[1] * param.dim())) for param in parameters()]
        optimizer = fused_optimizer(name, params, weight_decay=0.0)
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape[1:], generator=generator).expand_as(param)
            if apart and step == 1:
                optimizer.separate_state()
                optimizer.separate_state()  # nothing more
                assert not optimizer.shares_state
                optimizer.share_state()
            optimizer.step()
        return params, optimizer

    (ours, optimizer), (expected, other) = trained(3, apart=True), trained(3, apart=False)
    assert optimizer.shares_state
    assert other.shares_state
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_plain_parameters_have_no_state_to_share() -> None:
    optimizer = fused_optimizer("adamw", parameters())
    optimizer.separate_state()
    optimizer.share_state()
    assert not optimizer.shares_state
