"""Tasks on time series."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.quality.tasks.series import SERIES_TASKS, Weather
from tests.bench.quality.two_steps import CPU, check_two_steps


@pytest.mark.parametrize("name", [task.name for task in SERIES_TASKS])
def test_two_steps(name: str, little_data: Path) -> None:
    check_two_steps(name, little_data)


def test_windows_end_before_what_they_predict(little_data: Path) -> None:
    """The window that is h rows later ends with the temperature that the target of h hours leads to."""
    task = Weather(CPU, little_data)
    series, changes = (part[:72].numpy() for part in task.train)  # windows of three days in a row
    last = series[:, -1, 0]
    for i, ahead in enumerate(task.ahead):
        assert np.corrcoef(last[ahead:] - last[:-ahead], changes[:-ahead, i])[0, 1] == pytest.approx(1, abs=1e-4)
    assert np.array_equal(series[0, 1:], series[1, :-1])


def test_days_in_a_row_are_held_out(little_data: Path) -> None:
    """Of fifteen days three are for the probe and three to validate; windows need 24 hours before and 12 after."""
    task = Weather(CPU, little_data)
    assert len(task._probe[0]) == 3 * (6 * 72 - 23)
    assert len(task.validation()[0]) == 3 * (6 * 72 - 12)
    assert len(task.train[0]) == 3 * 16 * 72
