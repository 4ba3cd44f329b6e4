"""compute-sanitizer on every kernel: no access out of bounds, no race, no read of uninitialised memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hdet_kernels.ops.backends import backends
from tests.ops import sanitize

WIRE = ("_encode", "_merge", "_decode")
# Parts of the names of our kernels.
PACK = ("_pack_chunk", "_unpack_chunk")
KERNELS = {"cuda": ("hdet",), "triton": ("_advance", "_walk", "_reduce", "_finish", *WIRE, *PACK)}


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    for condition, why in (
        (not torch.cuda.is_available(), "no CUDA device on this machine"),
        (shutil.which("compute-sanitizer") is None, "there is no compute-sanitizer on PATH"),
    ):
        test = pytest.mark.skipif(condition, reason=why)(test)
    return pytest.mark.gpu(test)


def sanitized(backend: str, tool: str, *options: str) -> str:
    if backends()[backend] != "ok":
        pytest.skip(f"{backend}: {backends()[backend]}")
    command = ["compute-sanitizer", "--tool", tool, *options, sys.executable, sanitize.__file__, backend]
    # Every tensor gets memory of its own, so that an access beyond its end is out of bounds.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " steps" in done.stdout
    return done.stdout


@on_gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("backend", KERNELS)
def test_no_access_is_out_of_bounds_and_none_races(backend: str, tool: str) -> None:
    ours = [option for name in KERNELS[backend] for option in ("--kernel-name", f"kernel_substring={name}")]
    found = sanitized(backend, tool, "--error-exitcode", "9", *ours)
    assert "ERROR SUMMARY: 0 errors" in found or "RACECHECK SUMMARY: 0 hazards" in found, found[-500:]


@on_gpu
@pytest.mark.parametrize("backend", KERNELS)
def test_no_uninitialised_memory_is_read(backend: str) -> None:
    # All kernels are watched, because memory that torch's kernels write counts as initialised only then.
    found = sanitized(backend, "initcheck", "--print-limit", "1000")
    where = re.findall(r"Uninitialized .*\n=+ +at ([^\n]*)", found)
    assert not [kernel for kernel in where if any(name in kernel for name in KERNELS[backend])], found[-3000:]


@pytest.mark.full
def test_the_program_runs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    sanitize.main("torch", "cpu", ["adamw-amsgrad"])
    assert capsys.readouterr().out.endswith(" steps\n")
