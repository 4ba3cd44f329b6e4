"""The README shows what was recorded, and names what exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import hdet_kernels as hk

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_table_is_the_recorded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")  # as for a script there
    spec = importlib.util.spec_from_file_location("table", ROOT / "bench" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.in_readme(README) == README, "run: python bench/table.py --write"


def test_every_name_of_the_package_exists() -> None:
    used = set(re.findall(r"\bhk\.(\w+)", README)) - {"Fused"}  # hk.Fused*
    assert "HDETOneCycleLR" in used
    assert sorted(name for name in used if not hasattr(hk, name)) == []


def test_every_file_that_is_linked_exists() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README + (ROOT / "CONTRIBUTING.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_no_placeholder_is_left() -> None:
    assert not re.findall(r"@@\w+@@|TODO|FIXME", README + (ROOT / "CONTRIBUTING.md").read_text())
