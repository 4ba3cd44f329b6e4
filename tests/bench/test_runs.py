"""The benchmarks of scaling, memory and whole training steps run on a CPU, and record what their sections need."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hdet_kernels as hk

ROOT = Path(__file__).parents[2]
#: All trainings, and a few of the many cases of the others.
CASES = [
    *(f"test_end_to_end.py::test_end_to_end[cpu-{m}-tiny-clip-1.0]" for m in ("gpt2", "llama", "recsys", "resnet")),
    *(f"test_scaling.py::test_scaling[cpu-parameters-{n}-hdet-cpp-same]" for n in (10**4, 10**5, 10**6)),
    *(f"test_scaling.py::test_scaling[cpu-tensors-{n}-hdet-cpp-fixed]" for n in (1, 10, 100)),
    *(f"test_memory.py::test_memory[cpu-adamw-fp32-{way}]" for way in ("torch-foreach", "torch-fused", "hdet-cpp")),
    "test_memory.py::test_memory[cpu-adamw-bf16-stochastic-bf16-state-hdet-cpp]",
]


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if (reason := hk.backends()["cpp"]) != "ok":
        pytest.skip(f"cpp: {reason}")
    path = tmp_path_factory.mktemp("bench") / "record.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-only"]
    command += [f"--benchmark-json={path}", *(f"bench/{case}" for case in CASES)]
    # Not those of pytest around this one: in a worker of pytest-xdist, benchmarks are switched off.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"HDET_BENCH_QUICK": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    record = json.loads(path.read_text())
    return [entry | {"record": record} for entry in record["benchmarks"]]


def info_of(entries: list[dict[str, Any]], case: str) -> dict[str, Any]:
    return next(entry["extra_info"] for entry in entries if entry["name"].endswith(f"[cpu-{case}]"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("end_to_end", ["T = 1000", "T = 100", "forward", "zero_grad", "resnet-tiny"]),
        ("scaling", ["10⁶", "slope"]),
        ("memory", ["adamw-fp32", "`cpp`", "torch fused"]),
    ],
)
def test_what_is_recorded_makes_its_section(
    entries: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, name: str, told: list[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")  # as for a script there
    records = importlib.import_module("records")
    text = importlib.import_module(f"{name}_section").section(records.of(entries, name))
    assert [word for word in told if word not in text] == []


@pytest.mark.parametrize(
    ("case", "held"),
    [
        ("adamw-fp32-torch-fused", 16),  # θ, g, m, v
        ("adamw-fp32-hdet-cpp", 16),
        ("adamw-bf16-stochastic-bf16-state-hdet-cpp", 8),
    ],
)
def test_a_step_takes_parameters_gradients_and_state(entries: list[dict[str, Any]], case: str, held: int) -> None:
    """Tables and tensors' starts at 128 bytes are 5 kB in 5.3 M parameters: far below a hundredth of a byte each."""
    found = info_of(entries, case)
    assert found["held B a parameter"] == pytest.approx(held, abs=0.02)
    for phase in ("first step", "step", "step after it"):
        assert found["peak B a parameter"][phase] == pytest.approx(held, abs=0.02), phase
    assert found["peak B a parameter"]["built"] < held


def test_a_temporary_is_seen(entries: list[dict[str, Any]]) -> None:
    """torch's foreach step makes a copy of the second moments."""
    assert info_of(entries, "adamw-fp32-torch-foreach")["peak B a parameter"]["step"] == pytest.approx(20, abs=0.02)


@pytest.mark.parametrize("model", ["gpt2", "llama", "recsys", "resnet"])
def test_a_sync_averages_all_parameters_once(entries: list[dict[str, Any]], model: str) -> None:
    found = info_of(entries, f"{model}-tiny-clip-1.0")
    assert found["sync"]["bytes"] >= 4 * found["parameters"]
    assert found["sync"]["bytes"] < 4.5 * found["parameters"]  # gaps, BatchNorm statistics and the control row
    ways = found["ways"]
    # The backup of the parameters is there with the gradients.
    assert ways["a sync every step"]["peak MiB"] >= ways["hdet-cpp"]["peak MiB"]
    assert [part for part in found["parts"]["torch-fused"] if part not in found["parts"]["hdet-cpp"]] == ["clip"]
