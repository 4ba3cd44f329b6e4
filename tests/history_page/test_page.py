"""The whole page: complete, small, well-formed, and without anything from outside."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import pytest

from hdet_kernels.history_page import history_page, write_page
from tests.history_page.histories import BROKEN, HISTORIES, run

_VOID = ("meta",)
#: Elements whose end tag HTML lets one leave out.
_OPEN_ENDED = ("td", "th", "tr")


class Parser(html.parser.HTMLParser):
    """Checks that elements are nested, and collects what could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.outside += [
            f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data", "xlink:href")
        ]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in _VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.stack[-1] in _OPEN_ENDED and self.stack[-1] != tag:
            self.stack.pop()
        assert self.stack.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)


@pytest.mark.parametrize("name", HISTORIES)
def test_a_page_of_every_kind_of_history(name: str) -> None:
    page = history_page(HISTORIES[name], f"run <{name}>")
    parser = Parser()
    parser.feed(page)
    assert parser.stack == []
    assert parser.outside == [], "nothing is loaded"
    assert not parser.seen & {"script", "link", "img", "iframe", "object"}
    assert "url(" not in page
    assert "@import" not in page
    assert len(parser.ids) == len(set(parser.ids))
    assert not re.search(r"\b(nan|inf)\b", page.split("</style>")[1].lower()), "numbers only"
    assert f"<title>run &lt;{name}&gt;</title>" in page
    assert "<b>" not in page, "names of the user are escaped"
    assert "prefers-color-scheme:dark" in page


@pytest.mark.parametrize("groups", [1, 8])
def test_a_thousand_syncs_stay_small(groups: int) -> None:
    assert len(history_page(run(1000, replicas=8, groups=groups)).encode()) < 1_000_000


def test_dicts_are_taken_too_and_an_empty_history_is_refused() -> None:
    plain = [record.to_dict() for record in BROKEN]
    assert history_page(plain) == history_page(BROKEN)
    with pytest.raises(ValueError, match="the history is empty"):
        history_page([])


def test_nothing_is_written_for_a_wrong_argument(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="path must be that of a page"):
        write_page(BROKEN, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        write_page([], tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []
    write_page(BROKEN, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
