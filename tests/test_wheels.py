"""Wheels and the source distribution: what is in them, and that they work in a fresh environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("csrc", "hdet_kernels")
FILES = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "constraints.txt", "pyproject.toml", "setup.py")

# A two-step training, from a directory that is not the source tree. The first argument is a backend that must be there.
TRAIN = """
import sys, torch, hdet_kernels as hk
available = hk.backends()
assert available[sys.argv[1]] == "ok", available
model = torch.nn.Linear(3, 1)
before = model.weight.detach().clone()
optimizer = hk.FusedAdamW(model.parameters(), lr=0.1, backend=sys.argv[1])
scheduler = hk.HDETOneCycleLR(optimizer, max_lr=0.1, total_steps=10)
for _ in range(2):
    loss = model(torch.ones(4, 3)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step(loss)
assert not torch.equal(before, model.weight)
print(hk.__file__)
"""

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the source tree, without anything that was built in it."""
    copy = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    return copy


def quick_compiler(folder: Path) -> str:
    """Return the C++ compiler as a script that optimises nothing, which would take most of the time of a build.

    Its last argument counts: the flags of setup.py come after those of the environment. ``make setup`` optimises.
    """
    script = folder / "quick-c++"
    script.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O0\n')
    script.chmod(0o755)
    return str(script)


def build_wheel(source: Path, out: Path, *, native: bool) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    environment = os.environ | {"HDET_NATIVE": "1" if native else "0", "HDET_CUDA": "0"}
    if native:
        environment["CXX"] = quick_compiler(out.parent)
    done = subprocess.run(
        [*command, "--wheel-dir", str(out), str(source)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def run_in_a_fresh_environment(wheel: Path, folder: Path, backend: str) -> None:
    """Install ``wheel`` alone and train with it; torch and numpy come from the running environment."""
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # A .pth file adds the folder without reading the .pth files in it: the editable install there stays out of sight.
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    (packages / "running_environment.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HDET_BACKEND")}
    done = subprocess.run(
        [str(python), "-c", TRAIN, backend], cwd=folder, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(done.stdout.strip()).is_relative_to(packages)


def test_a_pure_wheel_has_no_binary_and_works(source: Path, tmp_path: Path) -> None:
    wheel = build_wheel(source, tmp_path / "dist", native=False)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith((".so", ".cpp", ".cu"))]
    assert "hdet_kernels/py.typed" in names
    assert "hdet_kernels/controller/__init__.py" in names
    run_in_a_fresh_environment(wheel, tmp_path, "torch")


def test_a_wheel_with_the_extension_works(source: Path, tmp_path: Path) -> None:
    if shutil.which(os.environ.get("CXX", "c++").split()[0]) is None:
        pytest.skip("there is no C++ compiler")
    wheel = build_wheel(source, tmp_path / "dist", native=True)
    assert "-cp311-abi3-" in wheel.name
    assert "hdet_kernels/_native.abi3.so" in zipfile.ZipFile(wheel).namelist()
    run_in_a_fresh_environment(wheel, tmp_path, "cpp")


def test_the_source_distribution_has_the_sources_of_the_extension(source: Path, tmp_path: Path) -> None:
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    environment = os.environ | {"HDET_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {Path(*Path(name).parts[1:]).as_posix() for name in opened.getnames()}
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").iterdir()} <= names
    assert {"setup.py", "pyproject.toml", "constraints.txt", "LICENSE", "README.md"} <= names
    assert not [name for name in names if name.startswith(("tests/", "bench/"))]
