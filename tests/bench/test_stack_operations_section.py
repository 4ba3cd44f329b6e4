"""The section on operations in a stack has a column for each device and precision, and says what is not equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.stack_operations_section import read_records, stack_operations_section


def entry(operation: str, precision: str, result: str = "equal", **more: Any) -> dict[str, Any]:
    return {"operation": operation, "precision": precision, "result": result, "loops": [], "one by one": "", **more}


def record(device: str, *entries: dict[str, Any]) -> dict[str, Any]:
    where = {"device": device, "machine": f"a machine with {device}", "torch": "2.13", "date": "2026-01-02"}
    return {**where, "command": "python", "operations": list(entries)}


def test_a_column_for_each_device_and_precision() -> None:
    gpu = record(
        "H200",
        entry("linear", "fp32"),
        entry("linear", "bf16", "wrong"),
        entry("gru", "fp32", loops=["aten::gru_cell"]),
        entry("gru", "bf16", "unknown"),
    )
    cpu = record("x86", entry("linear", "fp32", "refused"), entry("lstm", "fp32", **{"one by one": "no rule"}))
    lines = stack_operations_section([gpu, cpu]).splitlines()
    assert "| operation | H200, fp32 | H200, bf16 | x86, fp32 |" in lines
    assert "| linear | equal | **wrong** | **refused** |" in lines
    assert "| gru | *loop* | – | – |" in lines
    assert "| lstm | – | – | *one by one* |" in lines
    assert "- H200, fp32: 1 equal, 1 loop, 0 one by one, 0 refused, 0 wrong of 2" in lines
    assert "- H200, bf16: 0 equal, 0 loop, 0 one by one, 0 refused, 1 wrong of 1" in lines
    assert "- x86, fp32: 0 equal, 0 loop, 1 one by one, 1 refused, 0 wrong of 2" in lines
    assert "a machine with H200, torch 2.13, 2026-01-02. `python`" in lines


def test_records_of_a_folder(tmp_path: Path) -> None:
    for device in ("CPU", "H200"):
        (tmp_path / f"{device.lower()}_stack_operations.json").write_text(json.dumps(record(device)))
    (tmp_path / "drift.json").write_text("{}")
    assert [found["device"] for found in read_records(tmp_path)] == ["H200", "CPU"]
