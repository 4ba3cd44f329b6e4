"""The section on operations in a stack has a column for each device and precision, and says what is not equal."""

from __future__ import annotations

from typing import Any

from bench.stack_operations_section import stack_operations_section


def entry(operation: str, precision: str, result: str = "equal", **more: Any) -> dict[str, Any]:
    return {"operation": operation, "precision": precision, "result": result, "loops": [], "one by one": "", **more}


def record(machine: str, *entries: dict[str, Any]) -> dict[str, Any]:
    return {"machine": machine, "torch": "2.13", "date": "2026-01-02", "command": "python", "operations": list(entries)}


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
    assert "H200, torch 2.13, 2026-01-02. `python`" in lines
