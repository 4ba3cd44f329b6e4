"""docs/reliability.md: figures of the records, and what is said without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import reliability_page

FROM = {"machine": "x86_64", "torch": "2.13.0", "date": "2026-01-02", "command": "python -m some"}


def chaos() -> dict[str, Any]:
    kinds = {"a rank dies": {"expected": "raises", "runs": 3, "broken": 1}}
    totals = {
        "faults": 3,
        "kinds": 1,
        "configurations": 2,
        "seconds": 12.3,
        "violations": [{"case": "x/ddp/1", "violations": ["rank 0 changed"]}],
    }
    return {**FROM, **totals, "by kind": kinds}


def test_faults_are_counted_by_kind() -> None:
    text = reliability_page.faults_section([chaos()])
    assert "**3 faults** of 1 kinds in 2 configurations, 12 s: **1 violations**" in text
    assert "- x86_64, x/ddp/1: rank 0 changed" in text
    assert "| a rank dies | raises | 2 of 3 |" in text
    assert "x86_64, torch 2.13.0, 2026-01-02. `python -m some`" in text


def test_a_kind_that_one_machine_did_not_run_has_a_dash() -> None:
    other = {**chaos(), "machine": "GPU", "by kind": {}}
    assert "| a rank dies | raises | 2 of 3 | – |" in reliability_page.faults_section([chaos(), other])


def test_errors_have_a_row_for_each_rule_and_a_line_for_the_extremes() -> None:
    record = {
        **FROM,
        "steps": 100_000,
        "errors": {"AdamW": {"fp32": {"rms": 1.25e-7, "max": 1.0}, "torch fp32": {"rms": 1.5e-7, "max": 1.0}}},
        "learning rates": {"cpp": {"AdamW": {"ours": 1.5, "torch": 2.5}}},
        "subnormals": {
            "cpp": {"AdamW": {"results": 8, "flushed": 1, "units from truth": 0.5, "torch from truth": 0.75}}
        },
    }
    text = reliability_page.numerics_section([record])
    assert "| rule | fp32 | torch fp32 |" in text
    assert "| AdamW | 1.2e-07 | 1.5e-07 |" in text
    assert "at most 1.5 roundings of float32 from float64, torch at most 2.5" in text
    assert "1 of 8 results are flushed" in text
    assert "loss in float64" not in text
    reached = {"fp64": {"loss": 2.5e-3, "runs": 16}, "int8": {"ratio": 1.01, "low": 0.99, "high": 1.03}}
    text = reliability_page.numerics_section([record | {"losses": {"AdamW": {"10": reached}}}])
    assert "geometric mean of 16 runs" in text
    assert "| AdamW | 10 | 2.50e-03 | 1.0100 (0.9900 to 1.0300) |" in text


def test_losses_of_8_bit_state_are_differences_to_float32() -> None:
    entries = {
        "float32": {"mean": 0.125, "difference": 0.0, "standard error": 0.0},
        "int8": {"mean": 0.126, "difference": 0.001, "standard error": 0.002},
        "float32, another order": {"mean": 0.123, "difference": -0.002, "standard error": 0.003},
    }
    text = reliability_page.state_section([{**FROM, "tasks": {"digits": {"lr 0.03": entries}}}])
    assert "| task | learning rate | loss in float32 | int8 | another order |" in text
    assert "| digits | 0.03 | 0.1250 | +0.0010 ± 0.0040 | -0.0020 ± 0.0060 |" in text


def test_outcomes_have_a_row_for_each_folder() -> None:
    record = {
        **FROM,
        "exit code": 1,
        "failed": ["tests/ops/test_a.py::test_b"],
        "tests": {"": {"passed": 2}, "ops": {"passed": 5, "skipped": 1}},
    }
    text = reliability_page.gpu_section([record])
    assert "- `tests/ops/test_a.py::test_b`" in text
    assert "| (top) | 2 | 0 | 0 |" in text
    assert "| ops | 5 | 0 | 1 |" in text


def test_without_records_the_page_says_what_is_tested_and_what_is_not(tmp_path: Path) -> None:
    text = reliability_page.text(tmp_path)
    assert "## Not covered" in text
    assert "Silent data corruption" in text
    assert "## Injected faults" not in text
