"""Recovered share of the loss gap."""

from __future__ import annotations

from dataclasses import replace

from bench.quality import tables
from tests.bench.quality.scripted import run_record, scripted


def test_standard_error_is_that_of_pairs() -> None:
    """An offset of all losses of a seed is no error of the share; an offset of one loss is."""
    report = scripted({0.1: (2.0, 1.25)})
    assert "| 75% ± 0% |" in tables.starts_table(report)
    records = [
        record | {"val": record["val"] + 0.2 * record["seed"] * (record["method"] == "hdet")}
        for record in report.records
    ]
    # 0.75 and 0.55 of a gap of 1: their mean, and half of their difference.
    assert "| 65% ± 10% |" in tables.starts_table(replace(report, records=records))


def test_runs_are_compared_by_common_seeds() -> None:
    """A seed that HDET was not run with does not count."""
    report = scripted({0.1: (2.0, 1.25)})
    easy = [run_record("start", "plain", lr, 2, loss, factor=lr) for lr, loss in ((0.1, 1.0), (1.0, 0.9))]
    report = replace(report, records=[*report.records, *easy])
    table = tables.starts_table(report)
    assert "| digits | 10× too low | 2 | 2.0000 ± 0.1414 |" in table
    assert "| 75% ± 0% |" in table
    assert "(75%)" in tables.peers_table(report)


def test_without_common_seeds_there_is_no_verdict() -> None:
    report = scripted({0.1: (2.0, 1.25)})
    records = [record for record in report.records if (record["method"] == "plain") == (record["seed"] == 0)]
    assert tables.verdict(replace(report, records=records), "digits", 0.1) == "–"
