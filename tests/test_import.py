"""``import hdet_kernels``: what it brings along, and what it offers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hdet_kernels

ROOT = Path(hdet_kernels.__file__).parents[1]

OPTIONAL = [
    "accelerate",
    "lightning",
    "matplotlib",
    "pytorch_lightning",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torch.utils.tensorboard",
    "transformers",
    "triton",
]

PUBLIC = [
    "Buckets",
    "Converger",
    "Explore",
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamW",
    "FusedLion",
    "FusedSGD",
    "HDETOneCycleLR",
    "HDETScheduler",
    "HypergradientController",
    "ProcessEnsemble",
    "RegressionController",
    "ReplicaStack",
    "SoftmaxController",
    "backends",
    "multipliers",
    "paper_settings",
    "permutation",
    "use_backend",
    "warm_noisy_init_",
]


@pytest.fixture(scope="module")
def imported() -> subprocess.CompletedProcess[str]:
    """A fresh process that prints the modules after ``import numpy, torch``, and those that the package adds."""
    code = (
        "import json, sys, warnings\nimport numpy, torch\nbefore = set(sys.modules)\n"
        "warnings.simplefilter('error')\nimport hdet_kernels\n"
        "print(json.dumps([sorted(before), sorted(set(sys.modules) - before)]))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)


@pytest.mark.parametrize("name", OPTIONAL)
def test_the_optional_is_not_imported(imported: subprocess.CompletedProcess[str], name: str) -> None:
    before, added = json.loads(imported.stdout.splitlines()[-1])
    assert not {m for m in before + added if m == name or m.startswith(name + ".")}


def test_adds_only_itself_the_standard_library_and_numpy(imported: subprocess.CompletedProcess[str]) -> None:
    _, added = json.loads(imported.stdout.splitlines()[-1])
    assert "hdet_kernels" in added
    allowed = {"hdet_kernels", "numpy"} | sys.stdlib_module_names
    assert sorted(m for m in added if m.split(".")[0] not in allowed) == []


def test_neither_prints_nor_warns(imported: subprocess.CompletedProcess[str]) -> None:
    assert imported.stdout.count("\n") == 1
    assert imported.stderr == ""


@pytest.mark.parametrize("name", sorted({*PUBLIC, *hdet_kernels.__all__}))
def test_a_public_name(name: str) -> None:
    assert name in hdet_kernels.__all__
    assert getattr(hdet_kernels, name) is not None


def test_the_published_class_is_in_compat() -> None:
    assert callable(hdet_kernels.compat.OneCycleAutoLR)


def test_star_import_gives_the_public_names_once() -> None:
    names: dict[str, object] = {}
    exec("from hdet_kernels import *", names)
    assert set(hdet_kernels.__all__) <= set(names)
    assert len(set(hdet_kernels.__all__)) == len(hdet_kernels.__all__)


def test_is_typed_and_has_a_version() -> None:
    assert (ROOT / "hdet_kernels" / "py.typed").is_file()
    assert hdet_kernels.__version__.count(".") == 2
