"""StackedParameter: copying and pickling."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from tests.stack.cases import R


def test_copies_and_pickles_are_stacked_parameters() -> None:
    parameter = hk.StackedParameter(torch.randn(R, 2), shares_gradient=False)
    for made in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert isinstance(made, hk.StackedParameter)
        assert isinstance(made, nn.Parameter)
        assert (made.replicas, made.shares_gradient, made.requires_grad) == (R, False, True)
        assert torch.equal(made, parameter)
    assert type(parameter * 2) is Tensor
    with pytest.raises(ValueError, match="without dimensions"):
        hk.StackedParameter(torch.zeros(()))
