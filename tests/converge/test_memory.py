"""What a converger remembers: nothing without compression and an outer optimizer, else what was saved is loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdet_kernels import Converger, Outer
from hdet_kernels.converge import Report
from hdet_kernels.ensemble import SingleReplica
from tests.training import same


def converger(size: int = 3, outer: Outer | None = None) -> Converger:
    return Converger([nn.Parameter(torch.ones(size))], SingleReplica(), outer=outer)


def test_a_plain_average_leaves_nothing_to_remember() -> None:
    plain = converger()
    plain.converge(Report(step=1))
    assert plain.memories() == []
    assert plain.state_dict() is None
    assert plain.outer_state_dict() is None
    plain.check_state_dict(None)
    plain.load_state_dict(None, own=True)
    plain.load_outer_state_dict(None)


def test_the_outer_optimizer_goes_on_from_what_was_saved() -> None:
    first, second = converger(outer=Outer()), converger(outer=Outer())
    with torch.no_grad():
        first.tensors.params[0].add_(1.0)
    first.converge(Report(step=1))
    saved = first.outer_state_dict()
    assert not same(second.outer_state_dict(), saved)
    second.load_outer_state_dict(saved)
    assert same(second.outer_state_dict(), saved)
    assert len(second.memories()) == 1
    with pytest.raises(ValueError, match="flat tensors of 3 float32, this one of 4 float32"):
        converger(4, outer=Outer()).check_outer_state_dict(saved)
