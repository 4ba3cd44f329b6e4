"""Writers: TensorBoard's event files read back, and dict loggers with the signatures that W&B and MLflow have.

These two are not installed here. The recording objects below have the documented signatures of their functions.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

import hdet_kernels as hk
from hdet_kernels.integrations.loggers import DictWriter, TensorBoardWriter
from tests.ranks import run_ranks
from tests.schedule.cases import adam, advance
from tests.schedule.undo_runs import Scripted, Undoable
from tests.training import Trainer


class WandbRun:
    """A run of W&B, as far as ``log`` goes; it drops what comes with a lower step than the last, as W&B does."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.next = 0

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if step is None:
            step = self.next
        if step >= self.next:
            self.rows.append((step, data))
            self.next = step + 1


def mlflow() -> Any:
    """Return a module like ``mlflow``, which refuses names with other characters than its own do."""
    module: Any = ModuleType("mlflow")
    module.rows = []

    def log_metrics(
        metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None, run_id: str | None = None
    ) -> None:
        allowed = set("/_-.: ")
        bad = [name for name in metrics if not all(c.isalnum() or c in allowed for c in name)]
        if bad:
            raise ValueError(f"Invalid value {bad} for parameter name")
        module.rows.append((step, metrics))

    module.log_metrics = log_metrics
    return module


class Plain:
    """A logger that takes nothing but a dict."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], /) -> None:
        self.rows.append((int(values["hdet/step"]), values))


def trained(*callbacks: Any, steps: int = 8) -> hk.HDETOneCycleLR:
    optimizer = adam()
    explored = [hk.Explore("betas[1]", spread=0.01, bounds=(0.9, 0.9999))]
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=4, auto_lr=False, explore=explored)
    for callback in callbacks:
        scheduler.on_sync(callback)
    for step in range(steps):
        advance(optimizer, scheduler, float(step))
    return scheduler


def expected(scheduler: hk.HDETOneCycleLR) -> list[tuple[int, dict[str, float]]]:
    return [(record.step, record.metrics()) for record in scheduler.history]


@pytest.mark.parametrize("make", [WandbRun, mlflow, Plain])
def test_a_logger_gets_every_sync_at_its_step(make: Any) -> None:
    logger = make()
    scheduler = trained(DictWriter(logger))
    assert logger.rows == expected(scheduler)
    assert [step for step, _ in logger.rows] == [4, 8]
    assert "hdet/base/betas_1" in logger.rows[0][1]


def test_a_function_is_a_logger_too() -> None:
    module = mlflow()
    named, placed = [], []
    scheduler = trained(
        DictWriter(module.log_metrics),
        DictWriter(lambda values, step: named.append((step, values))),
        DictWriter(lambda values, number: placed.append((number, values))),
    )
    assert module.rows == named == placed == expected(scheduler)


def test_without_step_a_logger_counts_for_itself() -> None:
    run = WandbRun()
    for _ in range(100):
        run.log({"loss": 1.0})  # the user's own, without a step: two or more to a step of the run
    lost = WandbRun()
    lost.next = 100
    trained(DictWriter(lost))
    assert lost.rows == [], "W&B drops lower steps, so that this option is needed"
    trained(DictWriter(run, with_step=False))
    assert [(step, row["hdet/step"]) for step, row in run.rows[100:]] == [(100, 4.0), (101, 8.0)]


def test_few_metrics_for_very_many_replicas() -> None:
    run = WandbRun()
    trained(DictWriter(run, replicas=False))
    assert not any("replica" in name for _, row in run.rows for name in row)


def test_a_logger_that_fails_does_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    def fails(values: dict[str, float], step: int) -> None:
        raise ConnectionError("no route")

    with caplog.at_level(logging.ERROR, "hdet_kernels"):
        scheduler = trained(DictWriter(fails))
    assert scheduler.last_epoch == 8
    assert caplog.messages == [
        f"step {step}: DictWriter could not write its metrics: ConnectionError('no route')" for step in (4, 8)
    ]


@pytest.mark.parametrize("target", [None, 3, object(), logging.getLogger("x"), lambda: None, lambda a, b, c: None])
def test_what_takes_no_dict_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match=r"target must have log\(dict\) or log_metrics\(dict\)"):
        DictWriter(target)


@pytest.mark.parametrize(
    "make", [lambda flag: DictWriter(print, replicas=flag), lambda flag: DictWriter(print, with_step=flag)]
)
def test_flags_are_flags(make: Any) -> None:
    with pytest.raises(ValueError, match="must be True or False, got 1"):
        make(1)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of every point of every scalar in the event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_number_of_every_sync(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    own, given = tmp_path / "own", tmp_path / "given"
    writer = TensorBoardWriter(own)
    assert not own.exists(), "the folder is made at the first sync"
    with SummaryWriter(str(given)) as summary:
        scheduler = trained(writer, TensorBoardWriter(summary))
        flushed = scalars(own)
    writer.close()
    writer.close()
    rows = expected(scheduler)
    names = {name for _, row in rows for name in row}
    points = {name: [(step, pytest.approx(row[name], rel=1e-6)) for step, row in rows if name in row] for name in names}
    assert flushed == points, "also while the file is open"
    assert scalars(given) == scalars(own) == points
    assert {"hdet/base/lr", "hdet/replica0/lr", "hdet/loss", "hdet/seconds"} <= names


def test_tensorboard_has_the_reason_of_an_act_at_its_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Undoable("stack shared", "FusedAdamW", auto_lr=Scripted((8,)))
    run.scheduler.on_sync(TensorBoardWriter(tmp_path))
    run.train(12)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (said,) = events.Tensors("hdet/why/text_summary")
    assert said.step == 8
    assert said.tensor_proto.string_val[0].decode() == run.scheduler.history[1].why


def _two_ranks(rank: int, folder: Path) -> bool:
    imported = "tensorboard" in sys.modules
    trainer = Trainer(rank)
    trainer.scheduler.on_sync(TensorBoardWriter(folder / "first"))
    trainer.scheduler.on_sync(TensorBoardWriter(folder / str(rank), every_process=True))
    trainer.train(8)
    dist.barrier()
    dist.destroy_process_group()
    late = Trainer(rank, ddp=False, auto_lr=False)
    late.scheduler.on_sync(TensorBoardWriter(folder / "late"))
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    late.train(4)
    return imported


@pytest.mark.full
def test_the_first_process_writes_or_all_do(tmp_path: Path) -> None:
    assert run_ranks(2, _two_ranks, tmp_path) == [False, False], "the module itself needs no tensorboard"
    assert len(list((tmp_path / "first").iterdir())) == 1
    first = scalars(tmp_path / "first")
    assert [step for step, _ in first["hdet/distance"]] == [4, 8]
    assert all(value > 0 for _, value in first["hdet/distance"])
    zero, one = scalars(tmp_path / "0"), scalars(tmp_path / "1")
    assert len(list((tmp_path / "late").iterdir())) == 1, "also where the group comes after the writer"
    del first["hdet/seconds"], zero["hdet/seconds"], one["hdet/seconds"]
    assert first == zero == one


def test_what_is_no_place_for_tensorboard_is_refused() -> None:
    with pytest.raises(TypeError, match="target must be a folder or a SummaryWriter"):
        TensorBoardWriter(3)  # type: ignore[arg-type]


def test_without_tensorboard_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'hdet_kernels\[tensorboard\]'"):
        TensorBoardWriter(tmp_path)
