"""The demo: its output, its files, its parts, and its end on a failure or an interrupt."""

from __future__ import annotations

import io
import json
import math
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
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from hdet_kernels.__main__ import main
from hdet_kernels.demo import command, training
from hdet_kernels.demo.command import Bar
from hdet_kernels.demo.outcome import Run, acts, comparison, gathered, verdict, write_json
from hdet_kernels.demo.tasks import TextTask
from hdet_kernels.demo.training import Options, ReplicaRun, RunName, checked_options
from tests.png import png_size
from tests.ranks import preloaded

STEPS = 40
# Seconds after which a test that waits for an event gives up; far more than a busy machine needs.
PATIENCE = 300


def _options(out: Path, steps: int = STEPS) -> list[str]:
    return ["demo", "--replicas", "2", "--steps", str(steps), "--out", str(out)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and the standard output of one small run, whose ranks are forked from a server."""
    out = tmp_path_factory.mktemp("demo") / "made" / "by the demo"
    with pytest.MonkeyPatch.context() as patch, preloaded():
        patch.setattr(training, "START_METHOD", "forkserver")
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


def test_without_matplotlib_the_table_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [ReplicaRun([2.0] * 40, [0.1 + r] * 40, [0.6] * 40, 2.0, 1.0, 1000) for r in range(2)]
    monkeypatch.setattr(command, "run_replicas", lambda *_, **__: [[runs[0], runs[0]], [runs[1], runs[1]]])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["demo", "--replicas", "2", "--steps", "40", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "held-out loss" in text
    assert "pip install 'hdet_kernels[demo]'" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "syncs.md"]


@pytest.mark.full
def test_the_command_wins_from_a_poor_learning_rate(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hdet_kernels", *_options(tmp_path, 160)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "\n- step " in done.stdout, "why the learning rate fell"
    assert len(list(tmp_path.iterdir())) == 4
    runs = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["runs"]
    assert runs["plain"]["peak_base_lr"] == pytest.approx(TextTask.poor_lr, rel=1e-3)
    assert runs["hdet"]["base_lr"][-1] < runs["plain"]["base_lr"][-1] / 1.9
    assert runs["hdet"]["held_out_loss"] < runs["plain"]["held_out_loss"]


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


@pytest.mark.parametrize(("gpus", "expected"), [(0, ("gloo", "cpu")), (1, ("gloo", "cuda")), (2, ("nccl", "cuda"))])
def test_backend_and_device(gpus: int, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert training.place(2) == expected


def _fail(rank: int, device: torch.device, send: Callable[[object], None], how: str) -> None:
    send(f"rank {rank} is here")
    dist.barrier()
    if rank == 1:
        if how == "raises":
            raise ValueError("this is rank 1's own fault")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # would wait forever


@pytest.mark.parametrize(("how", "message"), [("raises", "own fault"), ("is killed", "process 1 .*SIGKILL")])
def test_a_replica_that_fails_ends_all(how: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "START_METHOD", "forkserver")
    messages: list[object] = []
    with pytest.raises(ProcessException, match=message), preloaded():
        training.run_replicas(2, _fail, how, on_message=messages.append)
    assert sorted(map(str, messages)) == ["rank 0 is here", "rank 1 is here"]


def test_defaults_come_from_the_task(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    options = checked_options(replicas=2, steps=None, out=out, seed=0, max_lr=None)
    assert (options.steps, options.max_lr) == (TextTask.steps, TextTask.poor_lr)
    assert out.is_dir()


OPTIONS = Options(replicas=2, steps=40, out=Path("out"), seed=0, max_lr=0.3)


def two_runs(plain: float = 2.0, hdet: float = 1.5) -> dict[RunName, Run]:
    """Return both runs with the given held-out losses; HDET doubles the peak learning rate."""
    replicas = [
        [
            ReplicaRun([2.0 + replica] * 40, [0.3] * 40, [0.3] * 40, plain, 1.0, 1000),
            ReplicaRun([1.0 + replica] * 40, [0.4 + 0.4 * replica] * 40, [0.6] * 40, hdet, 2.0, 1000),
        ]
        for replica in range(2)
    ]
    return gathered(replicas)


def test_replicas_are_merged() -> None:
    run = two_runs()["hdet"]
    assert run.losses.tolist() == [1.5] * 40
    assert run.rates.shape == (2, 40)
    assert (run.peak, run.last_losses, run.seconds) == (0.6, 1.5, 2.0)


def test_a_peak_that_was_lowered_during_the_warm_up_does_not_count() -> None:
    run = two_runs()["hdet"]
    run.base[:5], run.base[11] = 9.0, 0.7
    assert run.peak == 0.7


def test_table_has_both_held_out_losses() -> None:
    row = next(line for line in comparison(two_runs(), OPTIONS).splitlines() if "held-out loss" in line)
    assert [cell.strip() for cell in row.split("|")[2:4]] == ["2.0000", "1.5000"]


@pytest.mark.parametrize(
    ("hdet", "text"),
    [(1.5, "ended 0.500 below"), (2.25, "ended 0.250 ABOVE"), (math.nan, "is not finite: try a lower --max-lr")],
)
def test_verdict(hdet: float, text: str) -> None:
    assert text in verdict(two_runs(hdet=hdet))
    assert "by a factor of 2" in verdict(two_runs(hdet=hdet))


def test_what_the_controller_did_is_listed() -> None:
    run = two_runs()["hdet"]
    kinds = {None: None, "move": "by little", "return": "it broke"}
    run.history.extend({"act": act, "why": why} for act, why in kinds.items())
    assert acts(run) == ["- it broke"]


def test_json_has_null_for_nan(tmp_path: Path) -> None:
    write_json(two_runs(hdet=math.nan), OPTIONS, "gloo", tmp_path / "results.json")
    content = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert content["runs"]["hdet"]["held_out_loss"] is None
    assert content["runs"]["plain"]["held_out_loss"] == 2.0


def test_text_is_split_by_file_and_drawn_reproducibly(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"m{index:02}.py").write_bytes(bytes([index]) * 100)
    task = TextTask(tmp_path)
    assert set(task.unseen.tolist()) == {0, 10}
    assert set(task.train.tolist()) == set(range(20)) - {0, 10}
    inputs, targets = task.batch(torch.Generator().manual_seed(3))
    again, _ = task.batch(torch.Generator().manual_seed(3))
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = _Terminal()
    bar = Bar("HDET", 10, stream)
    for step in range(1, 11):
        bar.update(step, "loss 1.000")
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert all(len(line) <= 60 for line in text.replace("\x1b[K", "").strip().split("\r"))


def test_bar_elsewhere_is_a_line_every_quarter() -> None:
    stream = io.StringIO()
    bar = Bar("HDET", 1000, stream)
    for step in range(1, 1001):
        bar.update(step, "loss 1.000")
    assert [re.search(r"(\d+)/1000", line)[1] for line in stream.getvalue().splitlines()] == [  # type: ignore[index]
        "250",
        "500",
        "750",
        "1000",
    ]
