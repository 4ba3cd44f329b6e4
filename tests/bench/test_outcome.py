"""Reading pytest's JUnit file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bench.outcome import Outcome, read_ends

ENDS = """<testsuites><testsuite>
<testcase name="good"/><testcase name="other"/>
<testcase name="here-not"><skipped type="pytest.skip" message="cuda: torch finds no usable NVIDIA GPU"/></testcase>
<testcase name="bad"><failure message="RuntimeError: out&#10;of memory"/></testcase>
<testcase name="broken"><error message="failed on setup"/></testcase>
</testsuite></testsuites>"""


def test_cases_are_counted_by_their_end(tmp_path: Path) -> None:
    (tmp_path / "ends.xml").write_text(ENDS)
    outcome = Outcome("reduce")
    read_ends(tmp_path / "ends.xml", outcome)
    assert outcome.passed == 2
    assert outcome.skipped == Counter({"cuda: torch finds no usable NVIDIA GPU": 1})
    assert outcome.failed == {"bad": "RuntimeError: out of memory", "broken": "failed on setup"}
    assert outcome.line == "2 failed, 2 measured"
