"""The command that compares operations in a stack writes a record and ends with 1 if something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor

from bench import stack_operations


def run(names: list[str], random: list[str], out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(stack_operations, "OPERATIONS", names)
    monkeypatch.setattr(stack_operations, "RANDOM_OPERATIONS", random)
    monkeypatch.setattr("sys.argv", ["stack_operations", "--device", "cpu", "--out", str(out)])
    return stack_operations.main()


def test_a_record_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["linear", "interpolate, antialiased"], ["dropout"], tmp_path / "found.json", monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "| linear | equal | equal |" in printed
    assert "| interpolate, antialiased | equal | – |" in printed
    assert "| dropout | equal | equal |" in printed
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["command"] == "python -m bench.stack_operations --device cpu"
    assert [entry["operation"] for entry in record["operations"][::2]] == [
        "linear",
        "interpolate, antialiased",
        "dropout",
    ]


def test_equal_random_numbers_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_random(h: Tensor, x: Tensor) -> Tensor:
        return h

    monkeypatch.setitem(stack_operations.RANDOM, "dropout", not_random)
    assert run([], ["dropout"], tmp_path / "found.json", monkeypatch) == 1
