"""The build of the extension: what setup.py builds, and its messages where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def _setup(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py after ``command``, with a setup() that only prints the names of its arguments."""
    setup = f"import setuptools; setuptools.setup = lambda **given: print(sorted(given))\n{command}\nimport setup"
    return subprocess.run(
        [sys.executable, "-c", setup],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        check=False,
    )


def test_the_build_can_be_pure_python() -> None:
    done = _setup("", HDET_NATIVE="0")
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert "HDET_NATIVE=0: building pure Python" in done.stderr


def test_the_build_without_a_compiler_says_so() -> None:
    done = _setup("", CXX="/nowhere/c++")
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert "no C++ compiler (/nowhere/c++): building pure Python" in done.stderr


def test_the_build_without_torch_names_the_remedy() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler: the build does not need torch")
    done = _setup("import sys; sys.modules['torch'] = None", CXX="c++")
    assert done.returncode != 0
    assert "--no-build-isolation" in done.stderr


@pytest.mark.full
def test_a_cuda_build_that_cannot_be_is_an_error() -> None:
    if torch.version.cuda is not None and shutil.which("nvcc") is not None:
        pytest.skip("CUDA can be built here")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler: the build is pure Python")
    done = _setup("", HDET_CUDA="1", CXX="c++")
    assert done.returncode != 0
    assert "HDET_CUDA=1, but the CUDA part cannot be built:" in done.stderr
