"""Losses that were averaged over the processes before they were recorded."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hdet_kernels as hk
from hdet_kernels.schedule.losses import EqualLosses
from tests.ranks import Cases
from tests.training import Trainer

APART, ALIKE = [[0.1, 0.2, 0.3]], [[0.2, 0.2, 0.2]]
NAN = float("nan")

#: (steps of syncs, losses and values at them): whether it is said.
TABLE: dict[str, tuple[list[int], list[list[float]], list[list[list[float]]], bool]] = {
    "twice": ([5, 10], [[1.0] * 3, [2.0] * 3], [APART] * 2, True),
    "once": ([5, 10], [[1.0] * 3, [2.0, 2.0, 2.0 + 1e-15]], [APART] * 2, False),
    "not in a row": ([5, 10, 15], [[1.0] * 3, [2.0, 2.5, 2.0], [1.0] * 3], [APART] * 3, False),
    "among finite ones": ([5, 10], [[1.0, NAN, 1.0], [2.0, 2.0, np.inf]], [APART] * 2, True),
    "one finite": ([5, 10], [[1.0, NAN, NAN]] * 2, [APART] * 2, False),
    "never recorded": ([5, 10], [[NAN] * 3] * 2, [APART] * 2, False),
    "values alike": ([5, 10, 15], [[1.0] * 3] * 3, [APART, ALIKE, ALIKE], False),
    "after single steps": ([1, 2, 3, 4], [[1.0] * 3] * 4, [APART] * 4, False),
    "one value apart": ([5, 10], [[1.0] * 3] * 2, [[*ALIKE, *APART]] * 2, True),
}


@pytest.mark.parametrize(("steps", "losses", "values", "said"), TABLE.values(), ids=TABLE)
def test_by_a_table(steps: Any, losses: Any, values: Any, said: bool, caplog: pytest.LogCaptureFixture) -> None:
    watch = EqualLosses()
    for step, loss, value in zip(steps, losses, values, strict=True):
        watch.check(step, np.array(loss), np.array(value), "the losses")
    assert ("averaged over the processes before it was recorded" in caplog.text) is said


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = EqualLosses()
    for step in range(5, 60, 5):
        watch.check(step, np.ones(3), np.array(APART), "the losses on the probe")
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith("step 10: the losses on the probe of all 3 replicas are equal")


def _warnings(rank: int, reduced: str, options: dict[str, Any]) -> list[str]:
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collect()
    logging.getLogger("hdet_kernels").addHandler(handler)
    trainer = Trainer(rank, total_steps=40, sync_every=4, spread=0.5, **options)
    for _ in range(16):
        trainer.optimizer.zero_grad()
        loss = trainer.loss()
        loss.backward()
        trainer.optimizer.step()
        loss = loss.detach()
        if reduced == "reduced":
            dist.all_reduce(loss)
        trainer.scheduler.step(loss / 2)
    logging.getLogger("hdet_kernels").removeHandler(handler)
    return [line for line in lines if "equal to the last bit" in line]


def _reduced_probe() -> torch.Tensor:
    loss = torch.rand(())
    dist.all_reduce(loss)
    return loss


CONTROLLED: dict[str, Any] = {"auto_lr": hk.RegressionController(start_at=0.0, stop_at=1.0)}
RUNS = Cases(
    2,
    _warnings,
    {
        "reduced": ("reduced", CONTROLLED),
        "own": ("own", CONTROLLED),
        "reduced, nothing reads it": ("reduced", {"auto_lr": False}),
        "reduced, best taken": ("reduced", {"auto_lr": False, "merge": "best"}),
        "reduced probe": ("own", {**CONTROLLED, "probe": _reduced_probe}),
    },
)


@pytest.mark.parametrize("case", RUNS.cases)
def test_an_all_reduced_loss_is_named(case: str) -> None:
    for lines in RUNS[case]:
        said = {"reduced": "the training losses", "reduced, best taken": "the training losses"}
        said["reduced probe"] = "the losses on the probe"
        assert [line.split(" of all")[0] for line in lines] == ([f"step 8: {said[case]}"] if case in said else [])
