"""Find and download the packages of the peers.

They are pure Python, so that a folder with them is enough where nothing can be installed: ``fetch_packages`` fills
``FOLDER``, and importing this module makes what it holds importable, in the worker processes too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

# The folder of downloaded packages; HDET_QUALITY_PEERS chooses another.
FOLDER = Path(os.environ.get("HDET_QUALITY_PEERS", "build/peers"))

if FOLDER.is_dir() and str(FOLDER.resolve()) not in sys.path:
    sys.path.append(str(FOLDER.resolve()))  # at the end: what is installed comes first


def is_installed(requirement: str) -> bool:
    """Return whether a distribution is importable, in the version of a requirement "name>=version" or a newer one."""
    name, _, least = requirement.partition(">=")
    try:
        return _numbers(metadata.version(name)) >= _numbers(least)
    except metadata.PackageNotFoundError:
        return False


def fetch_packages(requirements: Sequence[str], folder: Path = FOLDER) -> None:
    """Download packages into ``folder``, without their dependencies: torch is here already."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    subprocess.run([*command, *requirements], check=True)
    print(f"{folder}: {', '.join(requirements)}")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
