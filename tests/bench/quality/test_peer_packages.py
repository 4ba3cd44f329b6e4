"""Packages of the peers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.quality.peer_packages import is_installed

ROOT = Path(__file__).parents[3]


def test_installed_in_the_version_or_newer() -> None:
    assert is_installed("numpy>=1.26")
    assert not is_installed("numpy>=999.0")
    assert not is_installed("no-such-package>=0.1")


def test_packages_of_the_folder_are_found(tmp_path: Path) -> None:
    """A process that imports the suite finds what was downloaded, after what is installed."""
    (tmp_path / "some_peer.py").write_text("")
    code = (
        "import runpy, sys; runpy.run_path('bench/quality/peer_packages.py');"
        f"import some_peer; assert sys.path[-1] == {str(tmp_path)!r}"
    )
    environment = {**os.environ, "HDET_QUALITY_PEERS": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)
