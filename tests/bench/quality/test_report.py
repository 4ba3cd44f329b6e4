"""The page and plots of the quality suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.quality.report import read, text, write_report
from bench.quality.results import Report
from tests.bench.quality.made_up_zoo import zoo
from tests.bench.quality.scripted import scripted


def test_page_and_plot_from_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = scripted({0.1: (2.0, 1.25), 10.0: (3.0, 1.1)})
    again = Report(**json.loads(json.dumps(report.plain())))
    write_report([again], tmp_path)
    page = (tmp_path / "quality.md").read_text()
    assert "`command`, date, machine" in page
    assert "(quality_starts_ci.png)" in page
    assert (tmp_path / "quality_starts_ci.png").stat().st_size > 1000


def test_zoo_comes_first() -> None:
    page = text([scripted({0.1: (2.0, 1.25)}), zoo()])
    assert page.index("## The zoo") < page.index("*Recovered* is") < page.index("## Digits")
    assert "*Recovered* is" not in text([zoo()])


def test_constants_and_designs_are_no_results(tmp_path: Path) -> None:
    (tmp_path / "constants.json").write_text(json.dumps({"digits": {"slack": 0.9}}))
    (tmp_path / "zoo.json").write_text(json.dumps(zoo().plain()))
    (tmp_path / "designs").mkdir()
    (tmp_path / "designs" / "a.json").write_text(json.dumps({"design": "a", "records": []}))
    assert [report.size for report in read(tmp_path)] == ["zoo"]
