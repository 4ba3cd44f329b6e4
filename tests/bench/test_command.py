"""``python -m hdet_kernels bench``: what it runs, what it leaves, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench import command, run_report, suites
from hdet_kernels.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command puts the benchmarks first, and tests of other files have their names."""
    monkeypatch.setattr(sys, "path", sys.path[:])


def bench(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hdet_kernels", "bench", *arguments],
        cwd=cwd,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_file_of_benchmarks_is_a_suite() -> None:
    files = {path.stem.removeprefix("test_") for path in (ROOT / "bench").glob("test_*.py")}
    assert files == set(suites.SUITES)


def test_the_list_names_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(suites.SUITES)


def test_every_suite_is_in_the_readme_of_the_benchmarks() -> None:
    text = (ROOT / "bench" / "README.md").read_text()
    assert table.in_bench_readme(text) == text, "run: python bench/table.py --write"


def test_a_run_leaves_results_plots_and_a_report(tmp_path: Path) -> None:
    run = bench("--suite", "reduce", "--quick", "--out", str(tmp_path / "out"))
    assert run.returncode == 0, run.stdout + run.stderr
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} >= {"reduce.json", "REPORT.md", "roofline.png"}
    record = json.loads((out / "reduce.json").read_text())
    assert record["machine_info"]["quick"] is True
    assert record["machine_info"]["peers"]["torch-compiled"]
    assert record["yardsticks"]["cpu"]["copy B/s"] > 0
    report = (out / "REPORT.md").read_text()
    for part in (
        "A quick run",
        "copy bandwidth",
        "launch of a kernel",
        "| apex |",
        "`grad_norm`",
        "(roofline.png)",
    ):
        assert part in report
    assert str(tmp_path) not in report


def test_an_interrupted_run_keeps_what_it_has_measured(tmp_path: Path) -> None:
    """Ctrl-C in the second case: the record of the first and a report are there, and the second suite is not begun."""
    arguments = ["bench", "--suite", "reduce", "noise", "--quick", "--out", str(tmp_path)]
    run = subprocess.Popen(
        [sys.executable, "-u", "-m", "hdet_kernels", *arguments],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal sends the signal to all processes of the group
    )
    assert run.stdout is not None
    cases = (line for line in run.stdout if "of a copy" in line)
    next(cases), next(cases)
    os.killpg(run.pid, signal.SIGINT)
    printed = run.stdout.read()
    assert run.wait(60) == 1
    assert "[2/2]" not in printed
    measured = len(json.loads((tmp_path / "reduce.json").read_text())["benchmarks"])
    assert 1 <= measured < 20  # the second too, if it ended before it heard the signal
    assert f"| {measured} measured, 0 skipped, then stopped |" in (tmp_path / "REPORT.md").read_text()


def test_a_suite_ends_when_its_seconds_are_over(tmp_path: Path) -> None:
    run = bench("--suite", "noise", "--quick", "--seconds", "0", "--out", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(json.loads((tmp_path / "noise.json").read_text())["benchmarks"]) == 1
    assert "1 measured, 0 skipped, then stopped" in (tmp_path / "REPORT.md").read_text()


def test_an_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "--suite", "speed", "--out", str(tmp_path)]) == 2
    assert "there is no suite speed; the suites are optim_step" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_seconds_that_are_none_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, seconds: str) -> None:
    assert main(["bench", "--suite", "reduce", "--seconds", seconds, "--out", str(tmp_path / "out")]) == 2
    assert f"--seconds must be a number of seconds, at least 0, got {float(seconds)}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_plots_that_cannot_be_drawn_leave_those_that_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "roofline.png").write_bytes(b"as it was")
    monkeypatch.setattr(table, "PLOTS", tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if there were no matplotlib
    with pytest.raises(SystemExit, match="nothing was written"):
        table.draw_plots()
    assert (tmp_path / "roofline.png").read_bytes() == b"as it was"


def test_a_folder_that_cannot_be_written_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "--suite", "reduce", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "cannot write to --out" in capsys.readouterr().err


def test_without_the_source_tree_it_says_where_the_benchmarks_are(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "hdet_kernels", tmp_path / "hdet_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    run = bench("--list", cwd=tmp_path)
    assert run.returncode == 2
    assert f"there is no {tmp_path / 'bench'}" in run.stderr
    assert "source tree" in run.stderr
    assert "Traceback" not in run.stderr


ENDS = """<testsuites><testsuite>
<testcase name="good"/><testcase name="other"/>
<testcase name="here-not"><skipped type="pytest.skip" message="cuda: torch finds no usable NVIDIA GPU"/></testcase>
<testcase name="bad"><failure message="RuntimeError: out&#10;of memory"/></testcase>
<testcase name="broken"><error message="failed on setup"/></testcase>
</testsuite></testsuites>"""


def test_how_cases_ended_is_read(tmp_path: Path) -> None:
    (tmp_path / "ends.xml").write_text(ENDS)
    outcome = command.Outcome("reduce")
    command.read_ends(tmp_path / "ends.xml", outcome)
    assert outcome.passed == 2
    assert outcome.skipped == Counter({"cuda: torch finds no usable NVIDIA GPU": 1})
    assert outcome.failed == {"bad": "RuntimeError: out of memory", "broken": "failed on setup"}
    assert outcome.line == "2 failed, 2 measured"


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (command.Outcome("reduce", passed=1), 0, "1 measured, 0 skipped"),
        (command.Outcome("reduce"), 0, "skipped: it has no case for this device"),
        (command.Outcome("reduce", skipped=Counter({"no compiler": 2})), 0, "skipped: no compiler"),
        (command.Outcome("reduce", passed=1, failed={"case": "it broke"}), 1, "- `case` of reduce: it broke"),
    ],
    ids=["measured", "no-case", "all-skipped", "failed"],
)
def test_the_exit_code_and_the_report_tell_how_suites_ended(
    outcome: Any, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "one", lambda *_: outcome)
    assert command.run(["reduce"], tmp_path, quick=True) == code
    assert said in (tmp_path / "REPORT.md").read_text()


def test_a_suite_that_ends_early_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies leaves no account of its cases."""
    monkeypatch.setattr(command, "command", lambda *_: ["-c", "import os; os._exit(7)"])
    outcome = command.one("reduce", "cpu", tmp_path, quick=True)
    assert outcome.failed == {"reduce": "pytest ended with code 7; what it printed stands above"}


def test_without_matplotlib_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    drawn = run_report.plots([ROOT / "bench" / "results" / "h200_reduce.json"], tmp_path)
    assert "plots need matplotlib" in drawn
    assert not list(tmp_path.iterdir())
