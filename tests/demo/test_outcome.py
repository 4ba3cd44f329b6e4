"""Merged results, table and verdict."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hdet_kernels.demo.outcome import comparison, verdict, write_json
from tests.demo.two_runs import OPTIONS, two_runs


def test_replicas_are_merged() -> None:
    run = two_runs()["hdet"]
    assert run.losses.tolist() == [1.5] * 40
    assert run.rates.shape == (2, 40)
    assert (run.peak, run.last_losses, run.seconds) == (0.6, 1.5, 2.0)


def test_a_peak_that_was_lowered_during_the_warm_up_does_not_count() -> None:
    run = two_runs()["hdet"]
    run.base[:5], run.base[11] = 9.0, 0.7
    assert run.peak == 0.7


def test_table_has_both_held_out_losses() -> None:
    row = next(line for line in comparison(two_runs(), OPTIONS).splitlines() if "held-out loss" in line)
    assert [cell.strip() for cell in row.split("|")[2:4]] == ["2.0000", "1.5000"]


@pytest.mark.parametrize(
    ("hdet", "text"),
    [(1.5, "ended 0.500 below"), (2.25, "ended 0.250 ABOVE"), (math.nan, "is not finite: try a lower --max-lr")],
)
def test_verdict(hdet: float, text: str) -> None:
    assert text in verdict(two_runs(hdet=hdet))
    assert "by a factor of 2" in verdict(two_runs(hdet=hdet))


def test_json_has_null_for_nan(tmp_path: Path) -> None:
    write_json(two_runs(hdet=math.nan), OPTIONS, "gloo", tmp_path / "results.json")
    content = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert content["runs"]["hdet"]["held_out_loss"] is None
    assert content["runs"]["plain"]["held_out_loss"] == 2.0
