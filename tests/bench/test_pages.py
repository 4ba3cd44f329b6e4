"""Generated documentation is up to date with the records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import pages


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: str(path.relative_to(pages.ROOT)))
def test_page_is_up_to_date(path: Path) -> None:
    present = path.read_text()
    assert pages.PAGES[path](present) == present, "run: python -m bench.pages"


@pytest.mark.parametrize("text", ["", "<!-- speed -->\n", "<!-- /speed -->\n<!-- speed -->\n"])
def test_missing_markers_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="<!-- speed -->"):
        pages.between(text, "speed", "new")


@pytest.mark.full
def test_all_linked_plots_are_drawn(tmp_path: Path) -> None:
    pages.draw_plots(tmp_path)
    linked = {
        link
        for path in pages.PAGES
        if path.parent == pages.DOCS
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", path.read_text())
    }
    assert {path.name for path in tmp_path.iterdir()} == linked
