"""Data sets of images."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
from pathlib import Path

import numpy as np

from bench.quality.data.source import PIP, Arrays, Files, Source, in_folder


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

SOURCES: dict[str, Source] = {
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
