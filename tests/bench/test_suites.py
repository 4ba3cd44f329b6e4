"""``python -m hdet_kernels bench`` records what it ran; ``make test-full`` runs every suite at its smallest size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hdet_kernels as hk
from bench import suites
from hdet_kernels.__main__ import main

ROOT = Path(__file__).parents[2]

#: The smallest case of each suite.
SMALLEST = {
    "optim_step": "test_optim_step[cpu-transformer-5M-adamw-fp32-hdet-cpp]",
    "host_time": "test_until_it_returns[cpu-one-tensor-hdet-cpp-new]",
    "end_to_end": "test_end_to_end[cpu-recsys-tiny-clip-1.0]",
    "in_backward": "test_in_backward[cpu-gpt2-tiny-bf16-int8]",
    "stack_step": "test_stack_step[cpu-large-fp32-shared-2-hdet-cpp]",
    "reduce": "test_reduce[cpu-transformer-5M-fp32-hdet-cpp-grad_norm]",
    "pack": "test_pack[cpu-transformer-5M-fp32-even-pack-hdet-cpp]",
    "wire": "test_wire[cpu-1M-bf16-hdet-cpp-encode]",
    "scaling": "test_scaling[cpu-parameters-10000-hdet-cpp-same]",
    "memory": "test_memory[cpu-adamw-fp32-hdet-cpp]",
    "cpp_step": "test_cpp_precision[sgd-fp32]",
    "scheduler_step": "test_step[hdet-1]",
    "stack_training": "test_stack_training[cpu-tiny]",
    "muon": "test_muon[cpu-gpt2-64-wide]",
    "rowwise": "test_rowwise[cpu-4-of-100k]",
    "overlap": "test_a_sync_on_a_cpu[cpu]",
    "sharded_step": "test_sharded_step[148-small-step]",
    "converge": "test_average[148 of GPT-2]",
}


def test_every_benchmark_file_is_a_suite_and_has_its_smallest_case() -> None:
    files = {path.stem.removeprefix("test_") for path in suites.HERE.glob("test_*.py")}
    assert files == set(suites.SUITES) == set(SMALLEST)


@pytest.mark.full
def test_smallest_cases_run(tmp_path: Path) -> None:
    if (reason := hk.backends()["cpp"]) != "ok":
        pytest.skip(f"cpp: {reason}")
    path = tmp_path / "record.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-only"]
    command += [f"--benchmark-json={path}", *(f"bench/test_{suite}.py::{case}" for suite, case in SMALLEST.items())]
    # Settings of the outer pytest must not apply: a worker of pytest-xdist switches benchmarks off.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"HDET_BENCH_QUICK": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    entries = json.loads(path.read_text())["benchmarks"]
    found = {suite: entry["extra_info"] for suite, entry in zip(SMALLEST, entries, strict=True)}
    assert all(found[suite]["share"] > 0 for suite in ("optim_step", "reduce", "pack", "wire"))
    # θ, g, m and v; tables and alignment are far below 0.01 byte a parameter.
    assert found["memory"]["held B a parameter"] == pytest.approx(16, abs=0.02)
    sync, parameters = found["end_to_end"]["sync"], found["end_to_end"]["parameters"]
    assert 4 * parameters <= sync["bytes"] < 4.5 * parameters, "a sync averages all parameters once"
    assert found["converge"]["ratios"]
    assert found["muon"]["stack ratio"]["ratio"] > 0


@pytest.mark.full
def test_a_run_writes_record_and_report_and_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "--suite", "reduce", "--quick", "--seconds", "0", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "reduce.json").read_text())
    assert len(record["benchmarks"]) == 1
    assert record["machine_info"]["quick"] is True
    assert record["yardsticks"]["cpu"]["copy B/s"] > 0
    report = (tmp_path / "REPORT.md").read_text()
    assert "1 measured, 0 skipped, then stopped" in report
    assert str(tmp_path) not in report


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--suite", "speed"], "speed"),
        (["--seconds", "-1"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--suite", "reduce", "--out", "/dev/null/out"], "--out"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert main(["bench", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_installed_package_without_benchmarks_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hdet_kernels.__main__.__file__", str(tmp_path / "hdet_kernels" / "__main__.py"))
    assert main(["bench", "--list"]) == 2
    assert str(tmp_path / "bench") in capsys.readouterr().err
