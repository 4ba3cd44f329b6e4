"""Plots of recorded benchmarks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from bench import plots, records
from tests.bench.entries import RESULTS, step_entry, write_record


def test_labels_of_the_roofline_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(plots.report, "save", lambda figure, path: kept.append(figure))
    assert plots.roofline(records.entries([RESULTS]), tmp_path / "roofline.png")
    (axes,) = kept[0].axes
    names = [text for text in axes.texts if text.get_text()]
    assert len(names) > 20
    boxes = [name.get_window_extent() for name in names]
    covering = [
        (names[i].get_text(), names[j].get_text())
        for i in range(len(boxes))
        for j in range(i)
        if boxes[i].shrunk(0.98, 0.98).overlaps(boxes[j].shrunk(0.98, 0.98))
    ]
    assert covering == []


def test_bars_are_relative_to_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(plots.report, "save", lambda figure, path: kept.append(figure))
    path = write_record(
        tmp_path / "a.json", step_entry("hdet-cpp", 2.0), step_entry("torch-fused", 3.0), step_entry("hdet-torch", 50.0)
    )
    assert plots.bars(records.entries([path]), tmp_path / "bars.png")
    (bar,) = kept[0].axes[0].patches
    assert (bar.get_x(), bar.get_x() + bar.get_width()) == (1.0, 1.5)


def test_without_data_no_plot_is_written(tmp_path: Path) -> None:
    alone = [copy.deepcopy(step_entry("torch-fused", 1.0))]
    alone[0]["extra_info"].pop("share")
    entries = records.entries([write_record(tmp_path / "a.json", *alone)])
    assert not plots.roofline(entries, tmp_path / "a.png")
    assert not plots.bars(entries, tmp_path / "b.png")
    assert not list(tmp_path.glob("*.png"))
