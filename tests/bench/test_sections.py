"""Sections of all suites."""

from __future__ import annotations

from bench import records, sections
from bench.suites import SUITES
from tests.bench.entries import RESULTS


def test_every_suite_has_a_section() -> None:
    assert set(sections.BY_DEVICE) | set(sections.OTHERS) == set(SUITES)


def test_every_recorded_suite_is_shown_with_its_command() -> None:
    entries = records.entries([RESULTS])
    text = sections.text(entries, drift=RESULTS / "drift.json")
    for record in records.records(entries):
        assert record["machine_info"]["command"] in text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert "## Drift of a compressed consensus" in headings
    assert len(headings) == len(set(headings))


def test_suite_without_records_has_no_section() -> None:
    assert sections.text([]) == ""
