"""The facts that the optimizers state about their rules: those that torch.optim shows in its state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdet_kernels.optim import FusedOptimizer
from tests.optim.cases import PAIRS, fused_optimizer, parameters, run, torch_optimizer


@pytest.mark.parametrize("name", PAIRS)
def test_the_stated_state_is_that_of_torch(name: str) -> None:
    params = parameters()[:1]
    ours, theirs = fused_optimizer(name, parameters()), torch_optimizer(name, params)
    group = ours.param_groups[0]
    assert ours.eager_state is bool(theirs.state[params[0]])
    for state, value in theirs.state[params[0]].items():
        assert state == "step" or torch.all(value == ours.initial_state(state, group))
    run(theirs, params, [0])
    expected = {state: tuple(value.shape) for state, value in theirs.state[params[0]].items() if value is not None}
    stated = {state: ours.state_shape(state, tuple(params[0].shape)) for state in ours.state_names(group)}
    assert stated | ({"step": ()} if ours.shows_step_of(group) else {}) == expected


def test_a_rule_without_its_row_is_refused() -> None:
    class Nameless(FusedOptimizer):
        rule = "sgd"

    with pytest.raises(NotImplementedError):
        Nameless([nn.Parameter(torch.ones(2))], {"lr": 1.0})
