"""Run tests and record how many passed, by folder, and which failed, with the command, machine and date.

    python -m bench.suite_record --out bench/results/h200_tests.json -m gpu -n 8 --dist loadfile tests

Everything after ``--out FILE`` is passed to pytest. The exit code is pytest's.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from bench.records import provenance

#: How pytest marks the outcome of a test in its report, and the name of it in the record.
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def counts(report: Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return what a JUnit report says: how many tests passed, failed and were skipped, by folder, and who failed."""
    found: dict[str, Counter[str]] = {}
    failed = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        parts = case.get("classname", "").split(".")
        folder = parts[1] if len(parts) > 2 and not parts[1].startswith("test_") else ""
        marks = [OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES]
        outcome = marks[0] if marks else "passed"
        found.setdefault(folder, Counter())[outcome] += 1
        if outcome == "failed":
            failed.append(f"{'/'.join(parts)}.py::{case.get('name')}")
    return {folder: dict(found[folder]) for folder in sorted(found)}, sorted(failed)


def summary(
    arguments: list[str], exit_code: int, found: dict[str, dict[str, int]], failed: list[str]
) -> dict[str, Any]:
    """Return the record."""
    return {
        **provenance(f"python -m pytest {' '.join(arguments)}"),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "exit code": exit_code,
        "failed": failed,
        "tests": found,
    }


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    options, arguments = parser.parse_known_args(given)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}"]
        exit_code = subprocess.run(command, check=False).returncode
        if not report.exists():
            print(f"pytest wrote no report (exit code {exit_code}): nothing was recorded", file=sys.stderr)
            return exit_code or 1
        record = summary(arguments, exit_code, *counts(report))
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
