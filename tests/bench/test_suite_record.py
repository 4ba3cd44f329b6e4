"""``python -m bench.suite_record``: counts by folder, from a real run of pytest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import suite_record

TESTS = """
import pytest

def test_good():
    pass

def test_bad():
    assert False

@pytest.mark.skip(reason="no device")
def test_skipped():
    pass
"""


def test_outcomes_are_counted_by_folder(tmp_path: Path) -> None:
    for folder in ("tests", "tests/part"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "tests" / "part" / "test_some.py").write_text(TESTS)
    (tmp_path / "tests" / "test_top.py").write_text("def test_top():\n    pass\n")
    out = tmp_path / "record.json"
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(tmp_path), str(tmp_path / "tests")]
    assert suite_record.main(["--out", str(out), *arguments]) == 1
    record = json.loads(out.read_text())
    assert record["tests"] == {"": {"passed": 1}, "part": {"passed": 1, "failed": 1, "skipped": 1}}
    assert [name.endswith("tests/part/test_some.py::test_bad") for name in record["failed"]] == [True]
    assert record["exit code"] == 1
    assert record["command"].startswith("python -m pytest -q")


def test_a_run_without_a_report_is_not_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    assert suite_record.main(["--out", str(out), "--no-such-option"]) != 0
    assert not out.exists()
    assert "nothing was recorded" in capfd.readouterr().err
