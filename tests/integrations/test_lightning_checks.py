"""The checks of a Lightning run that need no Lightning; ``test_lightning.py`` has those of its own classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import hdet_kernels as hk
from hdet_kernels.integrations.lightning_checks import check_optimizer, check_strategy, checked_schedulers, is_hdet


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.1)


def test_the_schedulers_of_this_package_are_told_from_others() -> None:
    assert is_hdet(hk.HDETOneCycleLR(optimizer(), 0.1, 10))
    assert is_hdet(hk.HDETScheduler(CosineAnnealingLR(optimizer(), 10)))
    assert is_hdet(hk.compat.OneCycleAutoLR(optimizer(), 0.1, total_steps=10))
    assert not is_hdet(CosineAnnealingLR(optimizer(), 10))


def test_plain_optimizers_are_accepted() -> None:
    check_optimizer(optimizer())
    check_optimizer(hk.FusedAdamW(nn.Linear(2, 2).parameters()))


def test_a_strategy_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="object is not known to give every process one whole replica"):
        check_strategy(object())


def test_no_scheduler_at_all() -> None:
    with pytest.raises(ValueError, match="configure_optimizers returned: none"):
        checked_schedulers([], automatic=True)
