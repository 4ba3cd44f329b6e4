"""The page and plots of the quality suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.quality.report import write_report
from bench.quality.results import Report
from tests.bench.quality.scripted import scripted


def test_page_and_plot_from_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = scripted({0.1: (2.0, 1.25), 10.0: (3.0, 1.1)})
    again = Report(**json.loads(json.dumps(report.plain())))
    write_report([again], tmp_path)
    text = (tmp_path / "quality.md").read_text()
    assert "`command`, date, machine" in text
    assert "(quality_starts_ci.png)" in text
    assert (tmp_path / "quality_starts_ci.png").stat().st_size > 1000
