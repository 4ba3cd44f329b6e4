"""Report of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import run_report
from tests.bench.entries import RESULTS


def test_report_without_matplotlib_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    drawn = run_report.plots([RESULTS / "h200_reduce.json"], tmp_path)
    assert "plots need matplotlib" in drawn
    assert not list(tmp_path.iterdir())
