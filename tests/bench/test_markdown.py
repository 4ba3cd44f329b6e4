"""Markdown tables and sections."""

from __future__ import annotations

from bench.markdown import section_text, table_lines


def test_table_is_aligned_by_its_rule() -> None:
    assert table_lines(["a", "b"], [["1", "2"]]) == ["| a | b |", "| --- | ---: |", "| 1 | 2 |"]


def test_section_leaves_out_an_empty_source() -> None:
    assert section_text("Title", "Text.", "", ["| a |", "| b |"]) == "## Title\n\nText.\n\n| a |\n| b |"
