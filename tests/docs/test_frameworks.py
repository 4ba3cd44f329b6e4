"""The tests that docs/frameworks.md names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/frameworks.md").read_text()


def _tests() -> set[str]:
    """Return the names of all tests, those in classes as ``Class::name`` too."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found |= {node.name, f"{path.relative_to(ROOT)}::{node.name}"}
            elif isinstance(node, ast.ClassDef):
                names = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                found |= {f"{node.name}::{name}" for name in names}
    return found


def test_every_test_and_file_of_the_page_exists() -> None:
    quoted = re.findall(r"`((?:tests/[\w/.]+::|\w+::)?test_[a-z]\w*|tests/[\w/.]+\.py(?:::\w+)?)`", PAGE)
    named = [name for name in quoted if not name.endswith(".py")]
    tests = _tests()
    assert len(named) > 40
    assert [name for name in named if name not in tests] == []
    assert [name for name in quoted if name.endswith(".py") and not (ROOT / name).exists()] == []
