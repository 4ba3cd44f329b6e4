"""An optimizer is as before if something that writes to it raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Adam
from torch.optim.lr_scheduler import OneCycleLR

from hdet_kernels.schedule.attachment import untouched_on_error
from tests.schedule.cases import groups_of, parameters


def _state(optimizer: Adam) -> Any:
    return groups_of(optimizer), "step" in vars(optimizer)


def _change(optimizer: Adam) -> None:
    OneCycleLR(optimizer, 0.3, total_steps=10)  # fills learning rates that are tensors, and wraps step()
    optimizer.param_groups[0]["extra"] = 1


def _change_and_raise(optimizer: Adam) -> None:
    before = _state(optimizer)
    _change(optimizer)
    assert all(now != then for now, then in zip(_state(optimizer), before, strict=True))
    raise ZeroDivisionError


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_groups_tensors_and_step_come_back(rate: Any) -> None:
    optimizer = Adam(parameters(), lr=rate)
    own, before = optimizer.param_groups[0]["lr"], _state(optimizer)
    with pytest.raises(ZeroDivisionError), untouched_on_error(optimizer):
        _change_and_raise(optimizer)
    assert _state(optimizer) == before
    assert optimizer.param_groups[0]["lr"] is own
    assert float(own) == pytest.approx(0.1)


def test_without_an_error_the_changes_stay() -> None:
    optimizer = Adam(parameters(), lr=0.1)
    with untouched_on_error(optimizer):
        _change(optimizer)
    assert optimizer.param_groups[0]["extra"] == 1
