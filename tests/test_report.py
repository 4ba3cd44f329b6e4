"""Tables and plots of hand-made histories."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from hdet_kernels import SyncRecord, report
from tests.png import png_size


def record(step: int, losses: list[float], **changes: Any) -> SyncRecord:
    content: dict[str, Any] = {
        "step": step,
        "cycle": step // 10 - 1,
        "kind": "sync",
        "losses": losses,
        "probes": None,
        "base": {"lr/0": 1e-3 * step, "wd/0": 0.01},
        "values": {"lr/0": [0.7e-3 * step, 1.3e-3 * step], "wd/0": [0.013, 0.007]},
        "excluded": [],
        "gradients": "shared",
        "bytes": 1_234_567,
        "collectives": 2,
        "seconds": 0.01234,
    }
    return SyncRecord(**{**content, **changes})


HISTORY = [
    record(10, [2.0, 3.0], probes=[2.5, 2.25]),
    record(20, [1.5, math.nan], excluded=[1], bytes=999, seconds=0.5, act="found", why="step 20: halved"),
    record(25, [math.nan, math.nan], kind="last", collectives=0, bytes=0),
]


def test_table_is_exact() -> None:
    assert report.table(HISTORY) == (
        "| step | cycle | mean loss | best | worst |  lr/0 | wd/0 |   act | excluded | collectives |  bytes |    ms |\n"
        "| ---: | ----: | --------: | ---: | ----: | ----: | ---: | ----: | -------: | ----------: | -----: | ----: |\n"
        "|   10 |     0 |       2.5 |    2 |     3 |  0.01 | 0.01 |     – |        – |           2 | 1.2 MB |  12.3 |\n"
        "|   20 |     1 |       1.5 |  1.5 |   1.5 |  0.02 | 0.01 | found |        1 |           2 |  999 B | 500.0 |\n"
        "|   25 |     1 |         – |    – |     – | 0.025 | 0.01 |     – |        – |           0 |    0 B |  12.3 |\n"
        "\n"
        "- step 20: halved"
    )


def test_table_of_an_empty_history_has_a_header_alone() -> None:
    header, rule = report.table([]).split("\n")
    assert "mean loss" in header
    assert set(rule) <= set("|-: ")


def test_summary_adds_up() -> None:
    assert report.summary(HISTORY) == {
        "syncs": 3,
        "steps": 25,
        "collectives": 4,
        "bytes": 1_234_567 + 999,
        "seconds": pytest.approx(0.52468),
        "excluded": 1,
        "undone": 0,
        "lost": 0,
        "events": [{"step": 20, "why": "step 20: halved"}],
        "peaks": {},
        "first_loss": 2.5,
        "last_loss": None,
        "base": {
            "lr/0": {"first": 0.01, "last": 0.025, "peak": 0.025},
            "wd/0": {"first": 0.01, "last": 0.01, "peak": 0.01},
        },
    }


def test_summary_of_an_empty_history_is_zero() -> None:
    totals = report.summary([])
    assert (totals["syncs"], totals["bytes"], totals["first_loss"], totals["base"]) == (0, 0, None, {})


def test_a_history_that_went_through_json_gives_the_same() -> None:
    text = json.dumps([entry.to_dict() for entry in HISTORY]).replace("NaN", "null")
    assert report.table(json.loads(text)) == report.table(HISTORY)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (548_864, "548.9 kB"), (2.5e15, "2500.0 TB")]
)
def test_bytes_read_well(count: float, text: str) -> None:
    assert report.format_bytes(count) == text


def test_plots_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # another test may have imported it
    report.plot_losses(HISTORY, tmp_path / "losses.png")
    report.plot_values(HISTORY, str(tmp_path / "lr.png"))
    report.plot_values(HISTORY, tmp_path / "decay.png", name="wd/0")
    for name in ("losses", "lr", "decay"):
        assert png_size(tmp_path / f"{name}.png") == (1350, 750)
    assert "matplotlib.pyplot" not in sys.modules  # pyplot's global state belongs to the user


def test_plot_of_a_run_resumed_with_another_number_of_replicas(tmp_path: Path) -> None:
    wider = record(30, [1.0] * 12, values={"lr/0": [0.03] * 12})
    report.plot_values([*HISTORY, wider], tmp_path / "lr.png")
    report.plot_values([wider], tmp_path / "many.png")
    assert png_size(tmp_path / "lr.png") == png_size(tmp_path / "many.png") == (1350, 750)


def test_plots_refuse_what_they_cannot_show(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no hyperparameter 'lr'.*choose from lr/0, wd/0"):
        report.plot_values(HISTORY, tmp_path / "lr.png", name="lr")
    with pytest.raises(ValueError, match="history is empty"):
        report.plot_losses([], tmp_path / "losses.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'hdet_kernels\[demo\]'"):
        report.plot_losses(HISTORY, tmp_path / "losses.png")
