"""Reading recorded benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import records
from tests.bench.entries import CPU_RECORD, GPU_RECORD, step_entry, turns_entry, write_record


def test_entries_of_a_folder_know_their_record(tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", step_entry("hdet-cpp", 1.0))
    write_record(tmp_path / "b.json", step_entry("torch-fused", 2.0), turns_entry(1.0, 2.0, 0.4, 0.6))
    entries = records.entries([tmp_path])
    assert [records.suite(entry) for entry in entries] == ["optim_step", "optim_step", "cpp_step"]
    assert [records.device_of(entry) for entry in entries] == ["cpu", "cpu", "cpu"]
    assert len(records.records(entries)) == 2
    assert [entry["params"]["way"] for entry in records.of(entries, "optim_step")] == ["hdet-cpp", "torch-fused"]


def test_missing_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no record at .*nowhere: give the JSON file"):
        records.entries([tmp_path / "nowhere"])


def test_machine_is_described() -> None:
    assert records.machine(CPU_RECORD, "cpu") == (
        "a CPU, load 0.0 before the run, torch 2.11, 2026-11-15; copy of 64 MiB: 1 GB/s"
    )
    assert records.machine(GPU_RECORD, "cuda").startswith("a GPU, torch 2.11, 2026-11-15; copy of 4096 MiB: 4000 GB/s")
