"""Finding and preparing the data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.quality import data
from bench.quality.tasks import TASKS


@pytest.mark.parametrize("name", sorted({task.data for task in TASKS.values()} - {"digits"}))
def test_missing_data_says_what_to_install(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    source = data.SOURCES[name]._replace(installed=lambda: None)
    monkeypatch.setitem(data.SOURCES, name, source)
    with pytest.raises(FileNotFoundError, match=r"is missing: .*install.*; or run `python -m bench.quality fetch`"):
        data.load(name, tmp_path)
    assert data.missing(name, tmp_path) == source.install


def test_data_is_prepared_once(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    first = data.load("digits", tmp_path)
    assert (tmp_path / "digits.npz").exists()
    again = data.load("digits", tmp_path)
    assert all(np.array_equal(first[key], again[key]) for key in first)
