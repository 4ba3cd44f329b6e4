"""The version is written in the package and in its build settings."""

from __future__ import annotations

import tomllib
from pathlib import Path

import hdet_kernels as hk
from hdet_kernels.version import __version__


def test_package_and_build_settings_have_one_version() -> None:
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert hk.__version__ == __version__ == settings["project"]["version"]
