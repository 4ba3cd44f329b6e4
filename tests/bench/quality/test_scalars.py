"""Exploration of other scalars."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.quality.scalars import SCALARS, train_scalar

CPU = torch.device("cpu")


@pytest.mark.full
@pytest.mark.parametrize("name", ["weight_decay", "dropout", "label smoothing"])
def test_scalar_moves_down_from_a_high_start(digits: Any, name: str) -> None:
    high = SCALARS[name].starts[1]
    found = train_scalar(digits, name, high, 0, CPU, explores=True, steps=120)
    assert found["end"] < high
