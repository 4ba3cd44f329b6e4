"""Run a few cases of the suites on the CPU, and check what they record: bytes, phases, syncs and sections."""

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
from bench import records, sections

ROOT = Path(__file__).parents[2]
TRAININGS = ("gpt2", "llama", "recsys", "resnet")
FEW_CASES = [
    "test_end_to_end.py::test_end_to_end[cpu-recsys-tiny-clip-1.0]",
    *(f"test_memory.py::test_memory[cpu-adamw-fp32-{way}]" for way in ("torch-foreach", "hdet-cpp")),
]
MORE_CASES = [
    *(f"test_end_to_end.py::test_end_to_end[cpu-{name}-tiny-clip-1.0]" for name in TRAININGS),
    *(f"test_scaling.py::test_scaling[cpu-parameters-{n}-hdet-cpp-same]" for n in (10**4, 10**5, 10**6)),
    *(f"test_scaling.py::test_scaling[cpu-tensors-{n}-hdet-cpp-fixed]" for n in (1, 10, 100)),
    *(f"test_memory.py::test_memory[cpu-adamw-fp32-{way}]" for way in ("torch-fused", "hdet-cpp")),
    "test_memory.py::test_memory[cpu-adamw-bf16-stochastic-bf16-state-hdet-cpp]",
    "test_muon.py::test_muon[cpu-gpt2-64-wide]",
    "test_rowwise.py::test_rowwise[cpu-4-of-100k]",
]


def run(cases: list[str], folder: Path) -> list[dict[str, Any]]:
    """Run cases in a process of their own and return their recorded entries."""
    if (reason := hk.backends()["cpp"]) != "ok":
        pytest.skip(f"cpp: {reason}")
    path = folder / "record.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-only"]
    command += [f"--benchmark-json={path}", *(f"bench/{case}" for case in cases)]
    # Settings of the outer pytest must not apply: a worker of pytest-xdist switches benchmarks off.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"HDET_BENCH_QUICK": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    record = json.loads(path.read_text())
    return [entry | {"record": record} for entry in record["benchmarks"]]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(FEW_CASES, tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(MORE_CASES, tmp_path_factory.mktemp("more"))


def info_of(entries: list[dict[str, Any]], case: str) -> dict[str, Any]:
    return next(entry["extra_info"] for entry in entries if entry["name"].endswith(f"[cpu-{case}]"))


def check_section(entries: list[dict[str, Any]], name: str, words: list[str]) -> None:
    """Check that the section of a suite has all ``words``."""
    section = importlib.import_module(f"bench.{name}_section").section(records.of(entries, name))
    assert [word for word in words if word not in section] == []


def check_memory(entries: list[dict[str, Any]], case: str, held: int) -> None:
    """Check held and peak bytes. Tables and alignment are 5 kB of 5.3 M parameters, far below 0.01 byte each."""
    found = info_of(entries, case)
    assert found["held B a parameter"] == pytest.approx(held, abs=0.02)
    for phase in ("first step", "step", "step after it"):
        assert found["peak B a parameter"][phase] == pytest.approx(held, abs=0.02), phase
    assert found["peak B a parameter"]["built"] < held


def check_sync(entries: list[dict[str, Any]], model: str) -> None:
    """Check that a sync averages all parameters once."""
    found = info_of(entries, f"{model}-tiny-clip-1.0")
    assert found["sync"]["bytes"] >= 4 * found["parameters"]
    assert found["sync"]["bytes"] < 4.5 * found["parameters"]  # alignment, BatchNorm statistics and the control row
    ways = found["ways"]
    # The backup of the parameters exists together with the gradients.
    assert ways["a sync every step"]["peak MiB"] >= ways["hdet-cpp"]["peak MiB"]
    assert [part for part in found["parts"]["torch-fused"] if part not in found["parts"]["hdet-cpp"]] == ["clip"]


def test_recorded_entries_make_their_sections(few: list[dict[str, Any]]) -> None:
    check_section(few, "end_to_end", ["T = 1000", "T = 100", "forward", "zero_grad", "recsys-tiny"])
    check_section(few, "memory", ["adamw-fp32", "`cpp`", "torch foreach"])


def test_step_holds_parameters_gradients_and_state(few: list[dict[str, Any]]) -> None:
    check_memory(few, "adamw-fp32-hdet-cpp", 16)  # θ, g, m, v


def test_temporary_is_counted(few: list[dict[str, Any]]) -> None:
    """torch's foreach step copies the second moments."""
    assert info_of(few, "adamw-fp32-torch-foreach")["peak B a parameter"]["step"] == pytest.approx(20, abs=0.02)


def test_sync_averages_all_parameters_once(few: list[dict[str, Any]]) -> None:
    check_sync(few, "recsys")


@pytest.mark.full
def test_more_recorded_entries_make_their_sections(more: list[dict[str, Any]]) -> None:
    check_section(more, "end_to_end", ["gpt2-tiny", "resnet-tiny"])
    check_section(more, "scaling", ["10⁶", "slope"])
    check_section(more, "memory", ["torch fused"])
    assert "gpt2-64-wide, 8 matrices" in sections.text(records.of(more, "muon"))
    assert "4-of-100k, 400 k rows" in sections.text(records.of(more, "rowwise"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "held"), [("adamw-fp32-torch-fused", 16), ("adamw-bf16-stochastic-bf16-state-hdet-cpp", 8)]
)
def test_memory_of_other_precisions(more: list[dict[str, Any]], case: str, held: int) -> None:
    check_memory(more, case, held)


@pytest.mark.full
@pytest.mark.parametrize("model", TRAININGS)
def test_sync_of_other_models(more: list[dict[str, Any]], model: str) -> None:
    check_sync(more, model)
