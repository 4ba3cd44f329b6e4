"""Hyperparameters reach the tables on the device when they change, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hdet_kernels.ops.table import HyperTable
from hdet_kernels.optim import FusedAdamW, FusedSGD


def test_lists_are_frozen_and_tensors_that_change_in_place_are_read_again() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = FusedAdamW([param], lr=0.5, betas=[0.9, 0.99], weight_decay=0.0)  # type: ignore[arg-type]
    assert isinstance(optimizer.param_groups[0]["betas"], tuple)
    rate = torch.tensor(0.5)
    for expected in (-0.5, -1.0, -3.0):
        param.grad = torch.ones(2)
        optimizer.step()
        torch.testing.assert_close(param.detach(), torch.full((2,), expected))
        optimizer.param_groups[0]["lr"] = rate  # of the same value, then of another
        rate.fill_(0.5 if expected > -1.0 else 2.0)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rows that are written to hyperparameter tables."""
    found: list[Any] = []
    write = HyperTable.write
    monkeypatch.setattr(HyperTable, "write", lambda table, rows: (found.append(rows), write(table, rows))[1])
    return found


def test_the_table_is_written_only_after_a_change(writes: list[Any]) -> None:
    optimizer = FusedSGD([{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))]}], lr=0.5)
    for rate, momentum, count in ((0.5, 0, 1), (0.5, 0, 1), (0.25, 0, 2), (0.25, 0, 2), (0.25, 0.9, 3), (0.25, 0.9, 3)):
        optimizer.param_groups[1] |= {"lr": rate, "momentum": momentum}
        optimizer.write_hyperparameters()
        assert len(writes) == count
    assert [row["lr"] for row in writes[-1]] == [0.5, 0.25]
    assert [row["momentum"] for row in writes[-1]] == [0, 0.9]


def test_parameters_of_several_dtypes_share_one_table(writes: list[Any]) -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    FusedAdamW(params).write_hyperparameters()
    assert len(writes) == 1


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "x", None])
def test_a_bad_rounding_seed_is_refused(seed: Any) -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = FusedSGD([param], stochastic_rounding=True)
    optimizer.param_groups[0]["rounding_seed"] = seed
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"rounding_seed must be a whole number from 0 .* got"):
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones_like(param))
