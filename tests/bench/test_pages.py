"""Generated documentation: it is up to date with the records, and its links stay within docs/."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from bench import pages


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: str(path.relative_to(pages.ROOT)))
def test_page_is_up_to_date(path: Path) -> None:
    present = path.read_text()
    assert pages.PAGES[path](present) == present, "run: python -m bench.pages"


@pytest.mark.parametrize("name", ["benchmarks.md", "cost.md", "quality.md"])
def test_links_of_a_page_are_files_of_the_docs(name: str) -> None:
    links = re.findall(r"\]\(([^)]+)\)", (pages.DOCS / name).read_text())
    assert links
    assert [link for link in links if "/" in link or not (pages.DOCS / link).exists()] == []


def test_text_between_markers_is_replaced() -> None:
    text = "before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n"
    assert pages.between(text, "speed", "new") == "before\n<!-- speed -->\nnew\n<!-- /speed -->\nafter\n"
    assert pages.between(text.replace("old\n", ""), "speed", "new") == pages.between(text, "speed", "new")


@pytest.mark.parametrize("text", ["", "<!-- speed -->\n", "<!-- /speed -->\n<!-- speed -->\n"])
def test_missing_markers_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="expected one line <!-- speed --> and, after it, one line <!-- /speed -->"):
        pages.between(text, "speed", "new")


def test_plots_that_cannot_be_drawn_replace_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "roofline.png").write_bytes(b"as it was")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if matplotlib were not installed
    with pytest.raises(SystemExit, match="nothing was written"):
        pages.draw_plots(tmp_path)
    assert (tmp_path / "roofline.png").read_bytes() == b"as it was"


@pytest.mark.full
def test_all_plots_are_drawn(tmp_path: Path) -> None:
    pages.draw_plots(tmp_path)
    linked = {
        link
        for name in ("benchmarks.md", "cost.md", "quality.md")
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", (pages.DOCS / name).read_text())
    }
    assert {path.name for path in tmp_path.iterdir()} == linked
