"""The constants of the scouting phase."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hdet_kernels.schedule.scout.rounds import ScoutSettings


def test_the_defaults_take_at_most_a_fifth_of_the_run() -> None:
    assert ScoutSettings().share <= 0.2


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"share": 0.0}, ValueError, r"ScoutSettings.share must be a finite number .* got 0.0"),
        ({"share": 0.6}, ValueError, r"share must be at most 0.5, got 0.6"),
        ({"share": "all"}, TypeError, r"ScoutSettings.share"),
        ({"lowest": 1.0, "highest": 0.1}, ValueError, r"lowest must be below highest, got 1.0 and 0.1"),
        ({"highest": float("inf")}, ValueError, r"ScoutSettings.highest"),
        ({"factor": 1.0}, ValueError, r"ScoutSettings.factor"),
        ({"fewest": 3}, ValueError, r"fewest must be at least 4, got 3"),
        ({"fewest": 4.5}, ValueError, r"ScoutSettings.fewest"),
        ({"deviations": -1.0}, ValueError, r"ScoutSettings.deviations"),
        ({"shift": float("nan")}, ValueError, r"ScoutSettings.shift"),
    ],
)
def test_constants_without_a_plan_are_refused(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ScoutSettings(**given)


def test_constants_are_kept_as_plain_numbers() -> None:
    settings = ScoutSettings(share=np.float32(0.25), fewest=np.int64(12), shift=1)
    assert [type(value) for value in (settings.share, settings.fewest, settings.shift)] == [float, int, float]


def test_constants_are_saved_by_name() -> None:
    assert ScoutSettings(**ScoutSettings(shift=0.3).to_dict()) == ScoutSettings(shift=0.3)


def test_the_page_lists_every_constant_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "usage" / "no-learning-rate.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| ([\d.e-]+) \|", page, re.M)
    assert {name: float(value) for name, value in listed} == ScoutSettings().to_dict()
