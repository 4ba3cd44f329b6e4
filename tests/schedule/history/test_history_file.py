"""The file that has every record of a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet_kernels as hk
from tests.ranks import run_ranks
from tests.schedule.cases import adam, advance
from tests.training import Trainer


def run(path: Path, **options: Any) -> tuple[Any, hk.HDETOneCycleLR]:
    optimizer = adam()
    options = {"sync_every": 2, "auto_lr": False, "history_file": path, **options}
    return optimizer, hk.HDETOneCycleLR(optimizer, 0.1, 12, **options)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def train(parts: tuple[Any, hk.HDETOneCycleLR], until: int) -> hk.HDETOneCycleLR:
    optimizer, scheduler = parts
    while scheduler.last_epoch < until:
        advance(optimizer, scheduler, 1.0)
    return scheduler


def test_every_record_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    optimizer, scheduler = run(path)
    advance(optimizer, scheduler)  # no loss: NaN, which JSON does not have
    advance(optimizer, scheduler)
    train((optimizer, scheduler), 6)
    records = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert records[0]["losses"] == [None]
    assert records[1:] == [record.to_dict() for record in scheduler.history[1:]]
    assert len(hk.report.table(records).splitlines()) == 5


def test_a_resumed_run_continues_its_file_without_repeating(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    parts = run(path)
    state = train(parts, 4).state_dict()
    parts[1].converge()
    saved = parts[1].state_dict()
    train(parts, 8)
    with path.open("a") as file:
        file.write('{"step": 9, "ki')  # the process died here
    resumed = run(path)
    resumed[1].load_state_dict(saved)
    train(resumed, 12)
    assert steps_in(path) == [2, 4, 4, 6, 8, 10, 12]
    earlier = run(path)
    earlier[1].load_state_dict(state)
    train(earlier, 6)
    assert steps_in(path) == [2, 4, 6]


def test_the_file_of_another_run_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "history.jsonl"
    for number in range(3):
        with caplog.at_level(logging.WARNING, logger="hdet_kernels"):
            train(run(path), 2 + 2 * number)
    assert steps_in(path) == [2, 4, 6]
    assert steps_in(tmp_path / "history.jsonl.1") == [2]
    assert steps_in(tmp_path / "history.jsonl.2") == [2, 4]
    assert "has the history of another run" in caplog.text


def test_a_file_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    parts = run(folder / "history.jsonl")
    folder.rmdir()
    train(parts, 4)
    assert "cannot be written" in caplog.text
    folder.mkdir()
    train(parts, 6)
    assert steps_in(folder / "history.jsonl") == [2, 4, 6]


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [(3, TypeError, "history_file must be a path, got 3"), ("no/such/folder/x", ValueError, "make the folder first")],
)
def test_a_path_that_cannot_be_is_refused(path: Any, error: type[Exception], message: str) -> None:
    optimizer = adam()
    with pytest.raises(error, match=message):
        hk.HDETOneCycleLR(optimizer, 0.1, 12, auto_lr=False, history_file=path)
    assert optimizer.param_groups[0]["lr"] == 0.1


def _ranks(rank: int, path: Path) -> int:
    trainer = Trainer(rank, ddp=False, auto_lr=False, history_file=path).train(8)
    torch.distributed.barrier()
    return len(trainer.scheduler.history)


@pytest.mark.full
def test_one_process_writes(tmp_path: Path) -> None:
    assert run_ranks(2, _ranks, tmp_path / "history.jsonl") == [2, 2]
    assert steps_in(tmp_path / "history.jsonl") == [4, 8]
