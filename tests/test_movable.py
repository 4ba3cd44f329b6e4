"""Parameters that can be moved into flat buffers, and those that are tied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdet_kernels.movable import check_movable, common_replicas, tied_to
from hdet_kernels.stack import StackedParameter


def test_dense_parameters_can_be_moved() -> None:
    for param in (torch.ones(2), nn.Parameter(torch.ones(3, 4).t()), StackedParameter(torch.ones(2, 3))):
        check_movable(0, param)


def test_others_are_named() -> None:
    with pytest.raises(TypeError, match="parameter 5 is a str"):
        check_movable(5, "x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"parameter 2 .*share_memory"):
        check_movable(2, torch.ones(2).share_memory_())
    with pytest.raises(ValueError, match="materialise"):
        check_movable(0, torch.ones(2, device="meta"))


def test_the_number_of_replicas_must_be_common() -> None:
    stacks = [StackedParameter(torch.ones(n, 2)) for n in (3, 3, 2)]
    assert common_replicas(stacks[:2]) == 3
    assert common_replicas([torch.ones(2)]) is None
    with pytest.raises(ValueError, match="parameter 0 is a stack of 3 replicas and parameter 2 a stack of 2 replicas"):
        common_replicas(stacks)


def test_tied_parameters_have_the_first_as_their_owner() -> None:
    memory, other = torch.ones(4), torch.ones(2)
    assert tied_to([other, memory, memory.view(4), other]) == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="parameters 1 and 0 share part of their memory"):
        tied_to([memory[2:], memory])
