"""Files of observations, and what they say about the best learning rate."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from bench.quality import observations
from bench.quality.sizes import SIZES
from bench.quality.tasks import TASKS
from hdet_kernels.controller import RegressionController
from tests.bench.quality.scripted_runs import EVERY, STEPS, scripted


def test_file_keeps_every_field(tmp_path: Path) -> None:
    seen = scripted()
    observations.write(tmp_path / "seen.npz", {"images, no norm": seen}, "source")
    found = observations.read(tmp_path / "seen.npz")
    assert list(found) == ["images, no norm"]
    for field in fields(seen):
        np.testing.assert_allclose(
            getattr(found["images, no norm"], field.name), getattr(seen, field.name), rtol=1e-6, err_msg=field.name
        )


def test_recorded_observations_are_of_the_zoo() -> None:
    found = observations.read()
    assert set(found) <= set(SIZES["zoo"].tasks)
    assert len(found) >= 30
    assert all(seen.steps == TASKS[task].steps and seen.step[-1] <= 0.3 * seen.steps for task, seen in found.items())
    assert observations.OBSERVATIONS.stat().st_size < 1.5e6
    with np.load(observations.OBSERVATIONS) as arrays:
        assert "NVIDIA H200" in str(arrays["source"])


def test_best_is_between_the_learning_rates_of_the_grid() -> None:
    assert scripted(best=0.02, too_low=2.0, too_high=2.0).best == pytest.approx(np.log2(0.02), abs=1e-3)
    assert np.log2(0.02) - 0.5 < scripted(best=0.02, too_low=1.0, too_high=4.0).best < np.log2(0.02)


def test_excess_is_interpolated_and_clipped() -> None:
    seen = scripted(too_low=2.0, too_high=30.0)
    at = np.log2(0.01) - seen.best  # the grid's best, which is a little above the vertex of the parabola
    assert seen.excess(at - 2) == pytest.approx(4.0, rel=1e-3)
    assert 2.0 < seen.excess(at - 1.5) < 4.0
    assert seen.excess(at + 6) == seen.excess(at + 20) == pytest.approx(100.0)
    assert seen.reaches(at + 6)
    assert not seen.reaches(at + 7)


def test_a_diverged_run_counts_as_the_worst() -> None:
    seen = scripted()
    seen.val[12] = np.inf
    assert seen.excess(6.0) > 50


def test_observation_is_that_of_the_run() -> None:
    seen = scripted()
    controller = RegressionController()
    run = seen.described(controller, probe=False)
    assert (run.total_steps, run.sync_every, run.slopes, run.in_pairs) == (STEPS, EVERY, True, False)
    first, later = seen.observation(0, 3, probe=False), seen.observation(5, 3, probe=False, mu=np.log(2))
    assert first.slopes is None
    assert later.slopes is not None
    assert (later.losses[0], later.slopes[0]) == (seen.level[5, 3], seen.slope[5, 3])
    assert later.base[0] == pytest.approx(2 * seen.rate[5, 3])
