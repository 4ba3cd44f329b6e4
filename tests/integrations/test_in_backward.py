"""Trainers with optimizers that step in the backward pass: they accumulate, wrap and clip as they always do."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import FRAMEWORKS, run_ranks

TRAINERS = ("lightning", "accelerate", "transformers")

for _name in (*TRAINERS[:2], "transformers"):
    pytest.importorskip(_name)


def in_rank(rank: int, trainer: str) -> Any:
    from tests.integrations import in_backward_runs

    with tempfile.TemporaryDirectory() as folder:
        return in_backward_runs.both(rank, trainer, Path(folder))


def check(trainer: str, processes: int) -> None:
    for same, stepped, message in run_ranks(processes, in_rank, trainer, imported=FRAMEWORKS):
        assert same, "the bits are those of step()"
        assert stepped > 5, "parameters are stepped in the backward pass of the last micro-batch"
        assert trainer == "accelerate" or "clips gradients after the backward pass" in message


@pytest.mark.parametrize(
    "trainer", [pytest.param(each, marks=() if each == "accelerate" else pytest.mark.full) for each in TRAINERS]
)
def test_two_processes_accumulate_and_average(trainer: str) -> None:
    check(trainer, 2)


@pytest.mark.full
@pytest.mark.parametrize("trainer", TRAINERS)
def test_one_process_accumulates(trainer: str) -> None:
    """Without DDP's ``no_sync``, only the trainer knows which micro-batch is the last."""
    check(trainer, 1)


def resumed_in_rank(rank: int, trainer: str, folder: Path) -> Any:
    from tests.integrations import in_backward_runs

    return in_backward_runs.resumed(rank, trainer, folder)


@pytest.mark.full
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_run_that_its_trainer_saved_and_resumed_ends_as_the_uninterrupted_run(trainer: str, tmp_path: Path) -> None:
    """Also the norm of the step before, by which gradients are clipped, is in the checkpoint."""
    for same, stepped, files in run_ranks(2, resumed_in_rank, trainer, tmp_path, imported=FRAMEWORKS):
        assert same
        assert stepped > 5, "parameters are stepped in the backward pass"
        assert trainer == "lightning" or "model.safetensors" in files
