"""Constants that are fitted without the family of a task."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from bench.quality import held_out, observations
from bench.quality.fit import break_pair, edge_cost, fit, fit_table, leave_out, write_fit
from bench.quality.measure import AT_BEST, BREAK_NOISES, BREAK_SHARES, TEN_HIGH, TEN_LOW, Measured
from bench.quality.tasks import TASKS
from hdet_kernels.controller.settings import RegressionSettings
from tests.bench.quality.scripted_runs import scripted

PAIRS = (1, len(BREAK_SHARES), len(BREAK_NOISES))


def measured(turn: float = 0.0, edge: float = 0.1, alarms_below: float = 0.0) -> Measured:
    """Return a task: at its best a smaller ``break_share`` than ``alarms_below`` alarms, whatever the noise is."""
    alarms = np.tile((np.array(BREAK_SHARES) < alarms_below)[:, None], (1, 1, len(BREAK_NOISES)))
    broken = {AT_BEST: alarms, TEN_LOW: np.zeros(PAIRS, bool), TEN_HIGH: np.ones(PAIRS, bool)}
    return Measured(turn, 0.02, 3.0, 1.0, [edge], broken)


def test_constants_are_those_that_the_tasks_were_made_with() -> None:
    found = fit([measured(math.log(0.2)), measured(math.log(0.8))])
    assert found == {
        "turning_length": 0.4,
        "task_deviation": pytest.approx(math.log(4) / math.sqrt(2), rel=1e-2),
        "sign_error": 0.02,
        "quantile": 0.25,
        "edge_cost": 0.1,
        "break_share": 0.1,
        "break_noise": 4.0,
    }


def test_one_task_in_twenty_may_be_an_exception() -> None:
    usual = [measured() for _ in range(19)]
    assert edge_cost([*usual, measured(edge=0.5)]) == 0.1
    assert edge_cost([*usual[:18], measured(edge=0.5), measured(edge=0.4)]) == 0.4
    assert break_pair([*usual, measured(alarms_below=0.4)]) == (0.1, 4.0)
    assert break_pair([*usual[:18], *[measured(alarms_below=0.4)] * 2]) == (0.4, 4.0)


def test_the_pair_that_finds_most_is_taken() -> None:
    task = measured()
    task.broken[TEN_HIGH][:, :, [0, 2]] = False
    assert break_pair([task]) == (0.1, 8.0)
    task.broken[TEN_LOW][:, :4] = True
    assert break_pair([task]) == (0.3, 8.0)
    task.broken[AT_BEST][:] = True
    with pytest.raises(ValueError, match="every break_share judges more than 5 %"):
        break_pair([task])


def test_family_is_left_out() -> None:
    tasks = {"a": measured(0.0), "b": measured(1.0), "c": measured(2.0), "d": measured(5.0)}
    found = leave_out(tasks, ["d", "not observed"], lambda task: {"d"} if task == "d" else {"a", "d"})
    assert list(found) == ["d", "not observed"]
    assert found["d"]["turning_length"] == pytest.approx(math.e, rel=1e-2)
    assert found["not observed"]["turning_length"] == pytest.approx(math.exp(1.5), rel=1e-2)


def test_fit_of_a_file(tmp_path: Path) -> None:
    lengths = {"census": 0.2, "images": 0.5, "words": 0.3, "digits": 0.3}
    seen = {task: scripted(turning_length=length, too_low=2.0, too_high=2.0) for task, length in lengths.items()}
    observations.write(tmp_path / "seen.npz", seen, "made up")
    text = write_fit(tmp_path / "seen.npz", tmp_path / "constants.json")
    assert "| `turning_length` |" in text
    found = json.loads((tmp_path / "constants.json").read_text())
    assert set(found) == set(TASKS)
    assert found["census"]["turning_length"] == pytest.approx((0.5 * 0.3 * 0.3) ** (1 / 3), rel=0.1)
    assert found["images"]["turning_length"] == pytest.approx((0.2 * 0.3 * 0.3) ** (1 / 3), rel=0.1)


def test_too_few_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="1 task is left: expected at least 2"):
        fit([measured()])


def test_table_has_the_range_over_families() -> None:
    text = fit_table({"quantile": 0.26}, {"a": {"quantile": 0.2}, "b": {"quantile": 0.3}})
    assert f"| `quantile` | 0.26 | 0.2 – 0.3 | {RegressionSettings().quantile:g} |" in text


def test_recorded_constants_are_settings_that_exist() -> None:
    constants = held_out.read()
    assert set(constants) == set(TASKS)
    names = {field.name for field in fields(RegressionSettings)}
    assert all(set(found) <= names and RegressionSettings(**found) for found in constants.values())
