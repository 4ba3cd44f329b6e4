"""docs/cost.md: formatting, the numbers of the check, and the plot."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import cost_page
from tests.bench.entries import RESULTS


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (1e-6, "< 0.01 %"),
        (1e-4, "0.01 %"),
        (0.0123, "1.2 %"),
        (0.5, "50 %"),
        (9.9, "990 %"),
        (1234, "1 234 ×"),
    ],
)
def test_shares_are_readable(value: float, shown: str) -> None:
    assert cost_page.share(value) == shown


def test_table_covers_all_networks_up_to_16384_replicas() -> None:
    header, _, *rows = cost_page.cost_table()
    assert "16 384" in header
    assert len(rows) == 3 * 4


def test_page_has_the_model_and_its_check() -> None:
    text = cost_page.text(RESULTS)
    for part in ("## The model", "## Check against measured links", "| 100 Mb/s, 2 ms | 8 | 64 000 000 |"):
        assert part in text


def test_plot_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(cost_page, "REPLICAS", (8, 64))
    cost_page.plot(tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
