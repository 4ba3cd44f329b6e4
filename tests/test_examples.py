"""The examples run as their docstrings say, from a folder of their own, and resume where they were interrupted.

``make test`` runs a few steps, on real processes that have the environment of torchrun; ``make test-full`` runs the
commands themselves.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests import ranks
from tests.training import same

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

#: Example, processes, arguments of a short run, and whether its checkpoint is a folder.
SHORT: list[tuple[str, int, list[str], bool]] = [
    ("torchrun_onecycle", 2, [], False),
    ("accumulation_amp", 2, ["--steps", "20", "--accumulate", "2"], False),
    ("sharded", 2, ["--shard", "1", "--gradients", "local"], True),
    ("sharded", 4, ["--shard", "2"], True),
]


def loaded(name: str) -> ModuleType:
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def as_a_rank(rank: int, name: str, folder: Path, commands: list[list[str]]) -> list[str]:
    """Run the main function of an example for each command, and return what it printed."""
    os.chdir(folder)
    example = loaded(name)
    printed = []
    with ranks.environment_of_torchrun(rank) as next_group:
        for command in commands:
            next_group()
            sys.argv = [f"{name}.py", *command]
            with contextlib.redirect_stdout(io.StringIO()) as out:
                example.main()
            printed.append(out.getvalue())
    return printed


def trained(folder: Path, checkpoint: str, in_a_folder: bool) -> dict[str, Any]:
    """Return model and optimizer of the last checkpoint."""
    path = folder / checkpoint
    if in_a_folder:
        path, source = folder / f"{checkpoint}.pt", path / f"step-{(path / 'latest').read_text()}"
        dcp_to_torch_save(source, path)
    saved = torch.load(path, weights_only=True)
    return {name: saved[name] for name in ("model", "optimizer")}


@pytest.mark.parametrize(
    ("name", "size", "arguments", "in_a_folder"),
    [
        # Sharded runs take long, and tests/converge/test_topologies.py trains sharded replicas in make test.
        pytest.param(*case, marks=[pytest.mark.full] if case[0] == "sharded" else [], id=f"{case[0]}-{case[1]}")
        for case in SHORT
    ],
)
def test_an_example_resumes_bit_for_bit(
    name: str, size: int, arguments: list[str], in_a_folder: bool, tmp_path: Path
) -> None:
    steps = arguments if "--steps" in arguments else ["--steps", "8", *arguments]
    stop = "13" if "--steps" in arguments else "5"
    commands = [
        [*steps, "--checkpoint", "whole"],
        [*steps, "--checkpoint", "parts", "--stop-after", stop],
        [*steps, "--checkpoint", "parts"],
    ]
    whole, stopped, resumed = ranks.run_ranks(size, as_a_rank, name, tmp_path, commands)[0]
    assert re.search(r"of the averaged model.*: \d\.\d+", whole)
    assert whole.splitlines()[-1] == resumed.splitlines()[-1] != stopped.splitlines()[-1]
    assert same(trained(tmp_path, "whole", in_a_folder), trained(tmp_path, "parts", in_a_folder))


def test_every_example_is_listed_and_short() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"[`{path.name}`]({path.name})" in listed
        assert len(path.read_text().splitlines()) < 125


def test_one_device_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plots")
    example = loaded("one_device")
    monkeypatch.chdir(tmp_path)

    def run(*more: str) -> str:
        arguments = ["--replicas", "2", "--steps", "4", "--device", "cpu", *more]
        monkeypatch.setattr(sys, "argv", ["one_device.py", *arguments])
        example.main()
        return capsys.readouterr().out.splitlines()[-2]

    whole = run("--out", "whole")
    run("--out", "parts", "--stop-after", "3")
    assert whole == run("--out", "parts")
    check_one_device(whole, tmp_path / "whole")
    states = [torch.load(tmp_path / folder / "checkpoint.pt", weights_only=True) for folder in ("whole", "parts")]
    assert same(states[0]["stack"], states[1]["stack"])


def check_one_device(printed: str, folder: Path) -> None:
    assert "held-out loss of the averaged model: " in printed
    for name in ("losses.png", "learning_rates.png"):
        assert (folder / name).stat().st_size > 10_000


def run_command(command: list[str], folder: Path) -> str:
    """Run a command of the examples' docstrings in a folder, and return what it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_one_device_with_local_gradients(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plots")
    command = [sys.executable, str(EXAMPLES / "one_device.py"), "--replicas", "3", "--steps", "20"]
    command += ["--gradients", "local", "--out", str(tmp_path), "--device", "cpu"]
    check_one_device(run_command(command, tmp_path), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "size", "arguments"),
    [
        ("torchrun_onecycle", 2, []),
        ("accumulation_amp", 2, ["--dtype", "fp16"]),
        ("sharded", 2, ["--shard", "1"]),
        ("sharded", 4, ["--shard", "2", "--gradients", "local"]),
    ],
)
def test_the_command_itself(name: str, size: int, arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    # 60 steps in cycles of 3: accumulation_amp.py saves in the middle of one.
    command += [str(EXAMPLES / f"{name}.py"), "--steps", "60", *arguments]
    printed = run_command(command, tmp_path)
    assert len(re.findall(r"^\| +\d+ \|", printed, re.M)) == 20, "a row for every sync"
    assert re.search(r"of the averaged model.*: \d\.\d+", printed)


@pytest.mark.full
def test_accelerate_launch_twice(tmp_path: Path) -> None:
    """The second start continues after the last epoch that the first saved."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += [str(EXAMPLES / "accelerate_loop.py"), "--epochs", "3"]
    printed = run_command(command, tmp_path)
    found = re.findall(r"epoch (\d)/3  accuracy of the averaged model: (\d\.\d+)", printed)
    assert [epoch for epoch, _ in found] == ["1", "2", "3"]
    assert float(found[-1][1]) > 0.8
    shutil.rmtree(tmp_path / "accelerate-checkpoint" / "epoch-0002")
    again = re.findall(r"epoch (\d)/3  accuracy of the averaged model: (\d\.\d+)", run_command(command, tmp_path))
    assert again == found[2:], "resumed, and the same run"
