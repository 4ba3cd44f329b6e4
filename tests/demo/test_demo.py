"""The demo on two replicas, its launcher when things go wrong, and the torchrun example."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hdet_kernels.__main__ import main
from hdet_kernels.demo import launch
from hdet_kernels.demo.plots import smoothed
from hdet_kernels.demo.progress import Bar
from hdet_kernels.demo.tasks import TextTask
from tests import ranks
from tests.test_report import png_size

STEPS = 40


def _command(out: Path) -> list[str]:
    options = {"--replicas": "2", "--steps": str(STEPS), "--out": str(out)}
    return [sys.executable, "-m", "hdet_kernels", "demo", *(word for option in options.items() for word in option)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the standard output of one small run."""
    out = tmp_path_factory.mktemp("demo") / "made" / "by the demo"
    done = subprocess.run(_command(out), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 8, done.stderr  # not a terminal: four lines a run
    return out, done.stdout


def test_demo_prints_the_table_and_where_the_files_are(demo: tuple[Path, str]) -> None:
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


def test_demo_plots_can_be_read(demo: tuple[Path, str]) -> None:
    for name in ("training_loss.png", "learning_rates.png"):
        assert png_size(demo[0] / name) == (1350, 750)


def test_demo_numbers_are_sane(demo: tuple[Path, str]) -> None:
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
    assert plain["losses"][0] == hdet["losses"][0]  # the same first model and the same first batch
    assert (plain["collectives"], plain["bytes"], plain["history"]) == (0, 0, [])
    for record in hdet["history"]:
        assert hdet["base_lr"][record["step"] - 1] == pytest.approx(record["base"]["lr/0"])
    assert len(hdet["history"]) == hdet["syncs"] == STEPS
    assert hdet["history"][-1]["gradients"] == "shared"
    assert 0 < hdet["converge_share"] < 1


def test_demo_hdet_wins_from_a_poor_learning_rate(demo: tuple[Path, str]) -> None:
    runs = json.loads((demo[0] / "results.json").read_text(encoding="utf-8"))["runs"]
    assert runs["plain"]["peak_base_lr"] == pytest.approx(TextTask.poor_lr, rel=1e-3)
    assert runs["hdet"]["peak_base_lr"] > 2 * TextTask.poor_lr
    assert runs["hdet"]["held_out_loss"] < runs["plain"]["held_out_loss"]


def test_demo_ends_its_processes_on_an_interrupt(tmp_path: Path) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(_command(tmp_path), text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        while not process.stdout.readline().startswith("Two runs"):
            assert process.poll() is None
        time.sleep(1)  # now its ranks are importing, when an interrupt would make them print tracebacks
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "\nstopped; all replicas have ended\n")
    assert list(tmp_path.iterdir()) == []
    _wait_until(lambda: not _group_exists(process.pid))


def test_demo_without_matplotlib_still_has_its_table(
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


def _fail(rank: int, device: torch.device, send: Callable[[object], None], how: str) -> None:
    send(f"rank {rank} is here")
    dist.barrier()
    if rank == 1:
        if how == "raises":
            raise ValueError("this is rank 1's own fault")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # would wait for ever


@pytest.mark.parametrize(
    ("how", "complaint"),
    [("raises", r"rank 1 failed:(?s:.)*own fault"), ("is killed", r"rank 1 ended without a result \(exit code -9\)")],
)
def test_a_rank_that_fails_fails_all(how: str, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.multiprocessing.get_context", lambda _: ranks._context)  # these start in no time
    heard: list[Any] = []
    with pytest.raises(launch.RankFailed, match=complaint):
        launch.run_ranks(2, _fail, how, on_message=heard.append)
    assert sorted(heard) == ["rank 0 is here", "rank 1 is here"]


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


def test_bar_elsewhere_is_a_line_now_and_then() -> None:
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


def test_smoothing_keeps_a_constant_and_the_length() -> None:
    np.testing.assert_allclose(smoothed(np.full(100, 3.0)), np.full(100, 3.0))
    np.testing.assert_allclose(smoothed(np.array([1.0, 2.0, 3.0])), [1.5, 2.0, 2.5])


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


def _whole_and_halves(rank: int, folder: Path) -> tuple[float, float, float]:
    path = Path(__file__).parents[2] / "examples" / "torchrun_onecycle.py"
    spec = importlib.util.spec_from_file_location("torchrun_onecycle", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    whole = example.train(20, 2e-3, folder / "whole.pt")
    half = example.train(20, 2e-3, folder / "halves.pt", stop_after=10)
    dist.barrier()
    return whole, half, example.train(20, 2e-3, folder / "halves.pt")


def test_example_resumes_bit_for_bit(tmp_path: Path) -> None:
    for whole, half, resumed in ranks.run_ranks(2, _whole_and_halves, tmp_path):
        assert resumed == whole
        assert resumed != half


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_until(true: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
