"""The checks of a Lightning run that need no Lightning; ``test_lightning.py`` has those of its own classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hdet_kernels as hk
from hdet_kernels.integrations.lightning_checks import check_optimizer, check_strategy, checked_schedulers


def test_plain_optimizers_are_accepted() -> None:
    check_optimizer(torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    check_optimizer(hk.FusedAdamW(nn.Linear(2, 2).parameters()))


def test_a_strategy_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="object is not known to give every process one whole replica"):
        check_strategy(object())


def test_no_scheduler_at_all() -> None:
    """``test_lightning.py`` has schedulers that are found, or refused."""
    with pytest.raises(ValueError, match="configure_optimizers returned: none"):
        checked_schedulers([], automatic=True)
