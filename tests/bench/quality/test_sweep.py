"""Sweeps at the cost of one run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bench.quality import sweep
from bench.quality.spec import Spec


@pytest.mark.parametrize("method", sweep.SWEEPS)
@pytest.mark.parametrize("best", [1 / 64, 1.0, 16.0])
def test_trials_take_half_of_the_steps_and_find_the_best(method: str, best: float) -> None:
    spent = []

    def trial(factor: float, count: int) -> float:
        spent.append(count)
        return abs(math.log(factor / best))

    chosen = sweep.SWEEPS[method](trial, 480)
    assert 0.9 * 480 <= sum(spent) <= 480
    assert best / 2 < chosen < best * 2


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name == "sweep" else pytest.mark.full) for name in sweep.SWEEPS]
)
def test_all_runs_together_have_the_steps_of_one(digits: Any, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    lengths = []

    def train(task: Any, spec: Spec, device: torch.device) -> dict[str, Any]:
        found = real(task, spec, device)
        lengths.append(found["steps"])
        return found

    real = sweep.train
    monkeypatch.setattr(sweep, "train", train)
    found = sweep.train_sweep(digits, Spec("digits", method, 4e-3 / 16, 0, steps=100), torch.device("cpu"))
    assert sum(lengths) == 100
    assert lengths[-1] >= 50
    assert found["method"] == method
    assert found["lr"] == 4e-3 / 16
    assert found["chosen"] > 4e-3 / 16
