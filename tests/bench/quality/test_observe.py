"""Runs at many learning rates, as a controller would have seen them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bench.quality.observe import POWERS, SEEDS
from bench.quality.pool import run_job


@pytest.mark.full
def test_a_job_observes_all_runs_of_a_task(digits: Any) -> None:
    job = {"kind": "observe", "task": "digits", "steps": 40}
    seen = run_job(job, digits, torch.device("cpu"))["observed"]
    runs = len(POWERS) * len(SEEDS)
    assert seen.step.tolist() == [2, 4, 6, 8, 10, 12]
    assert seen.level.shape == seen.slope.shape == (6, runs)
    assert seen.lrs.max() / digits.lr == 64
    assert np.isfinite(seen.val[: len(POWERS) // 2]).all()
    assert (seen.error[1:] > 0).all()
