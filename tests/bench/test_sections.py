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


def test_host_times_show_the_best_call_and_the_bare_loop_where_they_are_recorded() -> None:
    (entry, *_) = records.of(records.entries([RESULTS]), "host_time")
    measured = {"us": 90.0, "best us": 60.0, "loop us": 40.0}
    changed = entry | {"extra_info": entry["extra_info"] | measured}
    assert "| 90.00 (best 60.00, 2.250 loops) |" in sections.text([changed])
    for name in ("best us", "loop us"):
        del measured[name]
    old = {name: value for name, value in entry["extra_info"].items() if name not in ("best us", "loop us")}
    assert "| 90.00 |" in sections.text([entry | {"extra_info": old | measured}])


def test_suite_without_records_has_no_section() -> None:
    assert sections.text([]) == ""
