"""The site builds without a warning, and every link and every path of a file that a page names leads somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, name_of, prose_of

#: A path of the repository in backticks, and a name in it: `hdet_kernels/fanout/spread.py::Spread.move`.
_PATH = re.compile(r"`((?:hdet_kernels|csrc|tests|bench|examples|docs)/[\w./-]+)(?:::([\w.]+))?`")
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")

#: What a page may name though it is not in the repository: places that the reader fills.
_TO_BE_WRITTEN = re.compile(r"NAME|/a/")


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'hdet_kernels[docs]'")
    # Not --quiet: what is not logged does not count, and --strict then finds nothing.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        assert (tmp_path / "site" / page.relative_to(ROOT / "docs").with_suffix(".html")).stat().st_size > 1000


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    dead = []
    for link in _LINK.findall(prose_of(page)):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            dead.append(link)
    assert dead == []
    assert re.findall(r"\]\([^)\s]*\n", prose_of(page)) == [], "a link that a line break cuts"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = [found for found in _PATH.findall(page.read_text()) if not _TO_BE_WRITTEN.search(found[0])]
    assert sorted({path for path, _ in named if not (ROOT / path).exists()}) == []
    assert sorted(f"{path}::{name}" for path, name in named if name and name not in _names(ROOT / path)) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_placeholder_is_left(page: Path) -> None:
    assert not re.findall(r"@@\w+@@|TODO|FIXME|TBD", page.read_text())


def test_every_page_is_in_the_navigation_and_the_readme_is_short() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in navigation] == []
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def _names(module: Path) -> set[str]:
    """Return the functions and classes of a module, and the methods of the classes as ``Class.method``."""
    definitions = (ast.ClassDef, ast.FunctionDef)
    names = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, definitions):
            names.add(node.name)
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, definitions)}
    return names


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ +(.+?) *$", prose_of(page), re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}
