"""The examples run as their docstrings say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_one_device(gradients: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plots")
    command = [sys.executable, str(ROOT / "examples" / "one_device.py"), "--replicas", "3", "--steps", "20"]
    command += ["--gradients", gradients, "--out", str(tmp_path), "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "held-out loss of the averaged model: " in done.stdout
    for name in ("losses.png", "learning_rates.png"):
        assert (tmp_path / name).stat().st_size > 10_000
