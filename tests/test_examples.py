"""The examples run as their docstrings say.

``make test`` runs a few steps in this process; ``make test-full`` runs the commands themselves.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run(command: list[str]) -> str:
    """Run a command of the examples' docstrings, and return what it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_one_device(printed: str, folder: Path) -> None:
    assert "held-out loss of the averaged model: " in printed
    for name in ("losses.png", "learning_rates.png"):
        assert (folder / name).stat().st_size > 10_000


def test_one_device_for_a_few_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plots")
    spec = importlib.util.spec_from_file_location("one_device", EXAMPLES / "one_device.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    arguments = ["--replicas", "2", "--steps", "4", "--out", str(tmp_path), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["one_device.py", *arguments])
    example.main()
    check_one_device(capsys.readouterr().out, tmp_path)


@pytest.mark.full
def test_one_device_with_local_gradients(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plots")
    command = [sys.executable, str(EXAMPLES / "one_device.py"), "--replicas", "3", "--steps", "20"]
    command += ["--gradients", "local", "--out", str(tmp_path), "--device", "cpu"]
    check_one_device(run(command), tmp_path)


@pytest.mark.full
def test_torchrun_onecycle(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "torchrun_onecycle.py"), "--steps", "6", "--checkpoint", str(checkpoint)]
    assert "step 6/6" in run(command)
    assert torch.load(checkpoint, weights_only=True)["step"] == 6
