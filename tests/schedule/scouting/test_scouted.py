"""The facts of a run without a learning rate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdet_kernels.schedule.scout.phase import Scouted, ratios_of
from hdet_kernels.schedule.scout.rounds import ScoutSettings, make_plan


def optimizer(*rates: float | torch.Tensor) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=0.1)


def test_groups_keep_the_ratios_of_their_learning_rates() -> None:
    ratios = ratios_of(optimizer(0.1, torch.tensor(0.05), 0.0))
    assert ratios == pytest.approx([1.0, 0.5, 0.0])
    settings = ScoutSettings()
    scouted = Scouted(make_plan(1000, 8, settings), settings, ratios)
    assert scouted.rates(0.02) == pytest.approx([0.02, 0.01, 0.0])
    assert scouted.found is None
    assert scouted.config["total_steps"] == 1000


@pytest.mark.parametrize("rates", [(0.0,), (0.0, 0.0), (float("inf"),), (float("nan"), 0.1)])
def test_without_a_largest_learning_rate_there_are_no_ratios(rates: tuple[float, ...]) -> None:
    built = optimizer(*[0.1] * len(rates))
    for group, rate in zip(built.param_groups, rates, strict=True):
        group["lr"] = rate
    with pytest.raises(ValueError, match="keeps the ratios of the optimizer's learning rates, got"):
        ratios_of(built)
