"""``python -m hdet_kernels bench``: its arguments, the files that it writes, and its exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from bench import command, suites
from bench.outcome import Outcome
from hdet_kernels.__main__ import main
from tests import ranks

ROOT = Path(__file__).parents[2]

# Seconds after which a test that waits for an event gives up; far more than a busy machine needs.
PATIENCE = 300


@pytest.fixture(autouse=True)
def _unchanged_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the command's change of ``sys.path``."""
    monkeypatch.setattr(sys, "path", sys.path[:])


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_list_names_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(suites.SUITES)


@pytest.mark.usefixtures("on_the_cpu")
def test_run_writes_record_plot_and_report_and_ends_in_time(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["bench", "--suite", "reduce", "--quick", "--seconds", "0", "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"reduce.json", "REPORT.md", "roofline.png"}
    record = json.loads((out / "reduce.json").read_text())
    assert len(record["benchmarks"]) == 1
    assert record["machine_info"]["quick"] is True
    assert record["machine_info"]["peers"]["torch-compiled"]
    assert record["yardsticks"]["cpu"]["copy B/s"] > 0
    report = (out / "REPORT.md").read_text()
    for part in (
        "1 measured, 0 skipped, then stopped",
        "A quick run",
        "copy bandwidth",
        "kernel launch",
        "| apex |",
        "`grad_norm`",
        "(roofline.png)",
    ):
        assert part in report
    assert str(tmp_path) not in report


@pytest.mark.full
@pytest.mark.usefixtures("on_the_cpu")
def test_run_measures_all_cases_of_a_suite(tmp_path: Path) -> None:
    assert main(["bench", "--suite", "reduce", "--quick", "--out", str(tmp_path)]) == 0
    entries = json.loads((tmp_path / "reduce.json").read_text())["benchmarks"]
    assert {entry["params"]["operation"] for entry in entries} == {"grad_norm"}
    assert f"| {len(entries)} measured, 0 skipped |" in (tmp_path / "REPORT.md").read_text()


# The first case is measured at once, the second waits for the interrupt.
WAITING_SUITE = """
import time

def test_quick(benchmark):
    benchmark.pedantic(lambda: None, rounds=3)

def test_waiting(benchmark):
    def wait():
        print("waiting for the interrupt", flush=True)
        time.sleep(3600)

    benchmark.pedantic(wait, rounds=1)
"""


def _run_waiting_suites(folder: Path, output: Connection) -> None:
    """Run two suites that wait, in a process group of their own, with standard output to ``output``."""
    os.setsid()
    os.dup2(output.fileno(), 1)
    output.close()
    suite = ["-m", "pytest", "-q", "-s", "-p", "bench.conftest", "--benchmark-only", str(folder / "test_waiting.py")]
    command.command = lambda name, device: suite
    sys.exit(command.run(["reduce", "wire"], folder, quick=True))


@pytest.mark.full
def test_interrupted_run_keeps_its_finished_cases(tmp_path: Path) -> None:
    """Ctrl-C in the second case: the first is recorded, the report is written, and the second suite is not begun."""
    (tmp_path / "test_waiting.py").write_text(WAITING_SUITE)
    reader, writer = ranks._context.Pipe(duplex=False)
    process = ranks._context.Process(target=_run_waiting_suites, args=(tmp_path, writer))
    process.start()
    writer.close()
    printed = []
    with open(reader.fileno(), closefd=False) as lines:
        for line in lines:  # until all processes have closed their standard output
            printed.append(line)
            if "waiting for the interrupt" in line:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole process group
    process.join(PATIENCE)
    assert process.exitcode == 1, "".join(printed)
    assert "waiting for the interrupt" in "".join(printed)
    assert not [line for line in printed if line.startswith("[2/2]")]
    (entry,) = json.loads((tmp_path / "reduce.json").read_text())["benchmarks"]
    assert entry["name"] == "test_quick"
    assert "| 1 measured, 0 skipped, then stopped |" in (tmp_path / "REPORT.md").read_text()


def test_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "--suite", "speed", "--out", str(tmp_path)]) == 2
    assert "--suite: unknown speed; choose from optim_step" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_invalid_seconds_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, seconds: str) -> None:
    assert main(["bench", "--suite", "reduce", "--seconds", seconds, "--out", str(tmp_path / "out")]) == 2
    assert f"--seconds must be at least 0, got {float(seconds)}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_unwritable_folder_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "--suite", "reduce", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "cannot write to --out" in capsys.readouterr().err


def test_installed_package_without_benchmarks_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hdet_kernels.__main__.__file__", str(tmp_path / "hdet_kernels" / "__main__.py"))
    assert main(["bench", "--list"]) == 2
    errors = capsys.readouterr().err
    assert f"{tmp_path / 'bench'} does not exist" in errors
    assert "source tree" in errors


@pytest.mark.parametrize(
    ("outcome", "code", "text"),
    [
        (Outcome("reduce", passed=1), 0, "1 measured, 0 skipped"),
        (Outcome("reduce"), 0, "skipped: no case for this device"),
        (Outcome("reduce", skipped=Counter({"no compiler": 2})), 0, "skipped: no compiler"),
        (Outcome("reduce", passed=1, failed={"case": "it broke"}), 1, "- `case` of reduce: it broke"),
    ],
    ids=["measured", "no-case", "all-skipped", "failed"],
)
def test_exit_code_and_report_of_each_outcome(
    outcome: Any, code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "one", lambda *_: outcome)
    assert command.run(["reduce"], tmp_path, quick=True) == code
    assert text in (tmp_path / "REPORT.md").read_text()


def test_suite_whose_process_dies_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "command", lambda *_: ["-c", "import os; os._exit(7)"])
    outcome = command.one("reduce", "cpu", tmp_path, quick=True)
    assert outcome.failed == {"reduce": "pytest ended with exit code 7; see its output above"}
