"""The demo on two replicas: its output, its files, and its end on an interrupt."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hdet_kernels.__main__ import main
from hdet_kernels.demo.tasks import TextTask
from tests import ranks
from tests.png import png_size

STEPS = 40
# Seconds after which a test that waits for an event gives up; far more than a busy machine needs.
PATIENCE = 300


def _options(out: Path) -> list[str]:
    return ["demo", "--replicas", "2", "--steps", str(STEPS), "--out", str(out)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and the standard output of one small run, whose ranks are forked from a server."""
    out = tmp_path_factory.mktemp("demo") / "made" / "by the demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.multiprocessing.get_context", lambda _: ranks._context)
        patch.setattr("torch.cuda.device_count", lambda: 0)
        output, errors = tmp_path_factory.mktemp("output") / "stdout", tmp_path_factory.mktemp("errors") / "stderr"
        with output.open("w") as stdout, errors.open("w") as stderr:
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "stderr", stderr)
            assert main(_options(out)) == 0
    assert len(errors.read_text().splitlines()) == 8, errors.read_text()  # not a terminal: four lines for each run
    return out, output.read_text()


def test_table_and_file_names_are_printed(demo: tuple[Path, str]) -> None:
    out, text = demo
    for row in (
        "held-out loss",
        "mean of the last 10 %",
        "used (base)",
        "wall time",
        "collectives",
        "sent by a replica",
    ):
        assert re.search(rf"^\| .*{re.escape(row)}.* \|$", text, re.MULTILINE), row
    for name in ("results.json", "syncs.md", "training_loss.png", "learning_rates.png"):
        assert str(out / name) in text


def test_plots_are_written(demo: tuple[Path, str]) -> None:
    for name in ("training_loss.png", "learning_rates.png"):
        assert png_size(demo[0] / name) == (1350, 750)


def test_numbers_of_both_runs(demo: tuple[Path, str]) -> None:
    content = json.loads((demo[0] / "results.json").read_text(encoding="utf-8"))
    assert content["options"]["replicas"] == 2
    plain, hdet = content["runs"]["plain"], content["runs"]["hdet"]
    for run in (plain, hdet):
        rates = np.array(run["replica_lr"])
        assert rates.shape == (2, STEPS)
        assert np.isfinite(rates).all()
        np.testing.assert_allclose(rates.mean(axis=0), run["base_lr"], rtol=1e-6)
        assert np.isfinite(run["losses"]).all()
        assert np.isfinite([run["held_out_loss"], run["training_loss_last_tenth"], run["seconds"]]).all()
    spread, same = np.array(hdet["replica_lr"]), np.array(plain["replica_lr"])
    assert (same[0] == same[1]).all()
    assert (spread[0] != spread[1]).tolist() == [step < 0.3 * STEPS for step in range(STEPS)]
    assert plain["losses"][0] == hdet["losses"][0]  # the same initial model and the same first batch
    assert (plain["collectives"], plain["bytes"], plain["history"]) == (0, 0, [])
    for record in hdet["history"]:
        assert hdet["base_lr"][record["step"] - 1] == pytest.approx(record["base"]["lr/0"])
    assert len(hdet["history"]) == hdet["syncs"] == STEPS
    assert hdet["history"][-1]["gradients"] == "shared"
    assert 0 < hdet["converge_share"] < 1


@pytest.mark.full
def test_hdet_wins_from_a_poor_learning_rate(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["demo", "--replicas", "2", "--steps", "160", "--out", str(out)]) == 0
    runs = json.loads((out / "results.json").read_text(encoding="utf-8"))["runs"]
    assert runs["plain"]["peak_base_lr"] == pytest.approx(TextTask.poor_lr, rel=1e-3)
    assert runs["hdet"]["base_lr"][-1] < runs["plain"]["base_lr"][-1] / 1.9
    assert runs["hdet"]["held_out_loss"] < runs["plain"]["held_out_loss"]


def test_without_matplotlib_the_table_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hdet_kernels.demo import command, training

    runs = [training.ReplicaRun([2.0] * 40, [0.1 + r] * 40, [0.6] * 40, 2.0, 1.0, 1000) for r in range(2)]
    monkeypatch.setattr(command, "run_ranks", lambda *_, **__: [[runs[0], runs[0]], [runs[1], runs[1]]])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["demo", "--replicas", "2", "--steps", "40", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "held-out loss" in text
    assert "pip install 'hdet_kernels[demo]'" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "syncs.md"]


@pytest.mark.full
def test_demo_as_a_command(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "hdet_kernels", *_options(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "held-out loss" in done.stdout
    assert len(list(tmp_path.iterdir())) == 4


# Run by every Python process of the demo at its start: the processes of the replicas leave a file.
MARK_REPLICAS = """
import os, sys
if "spawn_main" in " ".join(sys.orig_argv):
    open(os.path.join(os.environ["HDET_TEST_MARKS"], str(os.getpid())), "w").close()
"""


@pytest.mark.full
def test_interrupt_ends_all_processes(tmp_path: Path) -> None:
    """Ctrl-C while the replicas import their modules: no tracebacks, no files, no process left."""
    marks, out, site = (tmp_path / name for name in ("marks", "out", "site"))
    for folder in (marks, out, site):
        folder.mkdir()
    (site / "sitecustomize.py").write_text(MARK_REPLICAS)
    environment = os.environ | {"HDET_TEST_MARKS": str(marks), "PYTHONPATH": str(site)}
    process = subprocess.Popen(
        [sys.executable, "-m", "hdet_kernels", *_options(out)],
        text=True,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _wait_until(lambda: len(list(marks.iterdir())) == 2 or process.poll() is not None)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole process group
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "\ninterrupted; all replicas have ended\n")
    assert list(out.iterdir()) == []
    _wait_until(lambda: not _group_exists(process.pid))


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
