"""compute-sanitizer over every kernel: no access out of bounds, no race, nothing read that nobody wrote."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hdet_kernels.ops.backends import backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="there is no compute-sanitizer on PATH"),
]

#: Our kernels by a part of their names: torch's own are not watched.
KERNELS = {"cuda": ("hdet",), "triton": ("_advance", "_walk", "_reduce", "_finish")}


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
@pytest.mark.parametrize("backend", KERNELS)
def test_the_sanitizer_finds_nothing(backend: str, tool: str) -> None:
    if backends()[backend] != "ok":
        pytest.skip(f"{backend}: {backends()[backend]}")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += [argument for name in KERNELS[backend] for argument in ("--kernel-name", f"kernel_substring={name}")]
    command += [sys.executable, str(Path(__file__).with_name("sanitize.py")), backend]
    # Every tensor in memory of its own, so that a step beyond its end is one out of bounds.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " steps" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout, done.stdout[-500:]
