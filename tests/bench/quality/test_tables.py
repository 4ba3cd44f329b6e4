"""Tables of the quality suite."""

from __future__ import annotations

import math

import pytest

from bench.quality import tables
from bench.quality.results import Report
from tests.bench.quality.scripted import run_record, scripted


def test_share_of_the_gap() -> None:
    table = tables.starts_table(scripted({0.1: (2.0, 1.25)}))
    (row,) = [line for line in table.splitlines() if "10× too low" in line]
    assert "75%" in row
    assert "90%: missed" in row
    assert "| 1 |" in row, "the learning rate ended at the best"


@pytest.mark.parametrize(
    ("start", "plain", "found", "text"),
    [
        (0.1, 2.0, 1.05, "90%: met"),
        (3.0, 2.0, 1.5, "70%: missed"),
        (3.0, 1.2, 1.25, "not worse than plain by σ: met"),
        (3.0, 1.2, 1.5, "not worse than plain by σ: missed"),
        (30.0, 3.0, 1.5, "70%, no run below 10%: met"),
        (30.0, 3.0, 2.9, "no run below 10%: missed, 2 of 2 below"),
        (30.0, 3.0, math.nan, "no run below 10%: missed, 2 of 2 below"),
        (0.1, 0.9, 0.95, "no gap; not worse than plain by σ: met"),
    ],
)
def test_goals(start: float, plain: float, found: float, text: str) -> None:
    assert text in tables.verdict(scripted({start: (plain, found)}), "digits", start)


def test_longer_runs_are_compared_with_the_best_of_their_length() -> None:
    plain = {0.5: 1.0, 1.0: 1.2, 10.0: 3.0}
    records = [run_record("long", "plain", lr, 0, loss, factor=lr) for lr, loss in plain.items()]
    records += [run_record("long", "hdet", lr, 0, 1.1, factor=lr) for lr in (1.0, 10.0)]
    table = tables.long_table(Report("command", "machine", "date", 1.0, "ci", {"digits": 1.0}, records))
    assert "| digits | 900 | 5.0e-01: 1.0000 | – | 1.2000 → 1.1000 (50%) | 3.0000 → 1.1000 (95%) | – |" in table
