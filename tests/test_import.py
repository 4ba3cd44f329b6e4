"""``import hdet_kernels``: the modules that it loads, and the names that it offers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hdet_kernels

ROOT = Path(hdet_kernels.__file__).parents[1]

OPTIONAL = {
    "accelerate",
    "lightning",
    "matplotlib",
    "pytorch_lightning",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "transformers",
    "triton",
}


@pytest.fixture(scope="module")
def imported() -> subprocess.CompletedProcess[str]:
    """Import the package in a fresh process, which prints the modules before and those that were added.

    Nearly all of its time is ``import torch``, so there is one process for all tests.
    """
    code = (
        "import json, sys, warnings\nimport numpy, torch\nbefore = set(sys.modules)\n"
        "warnings.simplefilter('error')\nimport hdet_kernels\n"
        "print(json.dumps([sorted(before), sorted(set(sys.modules) - before)]))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)


def test_optional_packages_are_not_imported(imported: subprocess.CompletedProcess[str]) -> None:
    before, added = json.loads(imported.stdout.splitlines()[-1])
    loaded = {".".join(module.split(".")[:depth]) for module in before + added for depth in (1, 2, 3)}
    assert "torch" in loaded
    assert loaded & OPTIONAL == set()


def test_only_the_package_the_standard_library_and_numpy_are_added(imported: subprocess.CompletedProcess[str]) -> None:
    _, added = json.loads(imported.stdout.splitlines()[-1])
    assert "hdet_kernels" in added
    allowed = {"hdet_kernels", "numpy"} | sys.stdlib_module_names
    assert sorted(module for module in added if module.split(".")[0] not in allowed) == []


def test_nothing_is_printed_and_nothing_warns(imported: subprocess.CompletedProcess[str]) -> None:
    assert imported.stdout.count("\n") == 1
    assert imported.stderr == ""


def test_public_names() -> None:
    assert len(hdet_kernels.__all__) <= 34, "what users write; parts for other frontends are in hdet_kernels.frontend"
    assert sorted(hdet_kernels.__all__) == hdet_kernels.__all__
    assert len(set(hdet_kernels.__all__)) == len(hdet_kernels.__all__)
    assert [name for name in hdet_kernels.__all__ if getattr(hdet_kernels, name, None) is None] == []


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from hdet_kernels import *", names)
    assert set(hdet_kernels.__all__) <= set(names)


def test_the_package_is_typed_and_its_version_is_that_of_the_project() -> None:
    assert (ROOT / "hdet_kernels" / "py.typed").is_file()
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    assert hdet_kernels.__version__ == version[1]
    assert f"\n## {version[1]}\n" in (ROOT / "CHANGELOG.md").read_text()
