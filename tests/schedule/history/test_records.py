"""The records of syncs."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
import torch

import hdet_kernels as hk
from hdet_kernels.controller.protocol import Findings
from hdet_kernels.converge import Outcome
from hdet_kernels.schedule.history import POINTS, WINDOW, History, SyncRecord
from tests.schedule.cases import Place, adam, advance
from tests.training import same


def test_a_record_has_losses_values_and_costs() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=4, auto_lr=False)
    rates = []
    for step in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        advance(optimizer, scheduler, float(step))
    (record,) = scheduler.history
    assert (record.step, record.cycle, record.losses, record.excluded) == (4, 0, [1.5], [])
    assert record.base == {"lr/0": rates[-1]}
    assert record.values == {"lr/0": [rates[-1]]}
    assert (record.bytes, record.collectives) == (0, 0)


def test_a_record_becomes_plain_values_and_back() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(
        optimizer, 0.1, 8, sync_every=4, auto_lr=False, explore=[hk.Explore("eps")], ensemble=Place(3, 1)
    )
    for step in range(8):
        advance(optimizer, scheduler, float(step))
    scheduler.converge()
    assert [(record.step, record.kind, record.landed) for record in scheduler.history] == [
        (4, "sync", 4),
        (8, "sync", 8),
        (8, "manual", 8),
    ]
    for record in scheduler.history:
        plain = json.loads(json.dumps(record.to_dict()))
        assert same(SyncRecord(**plain).to_dict(), record.to_dict())
        assert plain["gradients"] == "shared"
        assert (plain["taken"], plain["excluded"]) == (None, [])
        assert [len(values) for values in plain["values"].values()] == [3, 3]


@pytest.mark.parametrize(("shared", "gradients"), [(None, "unknown"), (True, "shared"), (False, "local")])
def test_the_record_of_an_outcome(shared: bool | None, gradients: str) -> None:
    outcome = Outcome(
        losses=np.array([1.0, math.nan]), probes=np.full(2, math.nan), healthy=np.array([True, False]), shared=shared,
        bytes=12, collectives=2, seconds=0.5, distance=0.25,
    )  # fmt: skip
    placed = hk.frontend.Placement(np.array([0.1, 3.0]), np.array([[0.1, 0.2], [3.0, 3.0]]), np.ones((2, 2)))
    found = Findings(np.array([-1.5, math.nan]), np.array([0.5, math.nan]))
    made = SyncRecord.of(outcome, placed, ["lr/0", "x"], step=8, cycle=1, kind="sync", findings=found)
    expected = {
        "step": 8, "cycle": 1, "kind": "sync", "losses": [1.0, math.nan], "probes": None,
        "base": {"lr/0": 0.1, "x": 3.0}, "values": {"lr/0": [0.1, 0.2], "x": [3.0, 3.0]}, "excluded": [1],
        "gradients": gradients, "bytes": 12, "collectives": 2, "seconds": 0.5, "landed": 8, "taken": None,
        "undone": None, "slopes": {"lr/0": -1.5}, "errors": {"lr/0": 0.5}, "posterior": None, "distance": 0.25,
    }  # fmt: skip
    assert same(made.to_dict(), expected)
    later = SyncRecord.of(
        outcome, placed, ["lr/0", "x"], step=8, cycle=1, kind="last", gradients="local", landed=9, undone=4
    )
    assert (later.gradients, later.landed, later.undone, later.slopes) == ("local", 9, 4, None)


def record(step: int, loss: float = 1.0) -> SyncRecord:
    return SyncRecord(
        step, step, "sync", [loss, loss], None, {"lr/0": 1 / step}, {"lr/0": [1.0, 2.0]}, [1], "local", 10, 2, 0.5
    )


@pytest.mark.parametrize("syncs", [3_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_more_syncs_take_no_more_memory(syncs: int) -> None:
    """By count: records, points and extremes are bounded, and the summary has all syncs."""
    history = History()
    sizes = []
    for step in range(1, syncs + 1):
        history.add(record(step, math.nan if step == 1 else float(step)))
        if step in (2_000, syncs):
            sizes.append(len(pickle.dumps([history.records, history.summary])))
    assert [kept.step for kept in history.records] == list(range(syncs - WINDOW + 1, syncs + 1))
    summary = history.summary
    assert (summary.syncs, summary.excluded, summary.bytes, summary.collectives) == (
        syncs,
        syncs,
        10 * syncs,
        2 * syncs,
    )
    assert summary.seconds == 0.5 * syncs
    assert summary.base == {"lr/0": {"first": 1.0, "lowest": 1 / syncs, "highest": 1.0, "last": 1 / syncs}}
    assert summary.loss == {"first": 2.0, "lowest": 2.0, "highest": float(syncs), "last": float(syncs)}
    assert POINTS <= len(summary.points) < 2 * POINTS
    assert [point["step"] for point in summary.points] == list(range(1, syncs + 1, summary.every))
    assert summary.points[0]["loss"] is None
    assert sizes[1] < 1.2 * sizes[0]


def test_a_run_keeps_a_window_and_resumes_with_its_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("history", "checkpoint_checks"):
        monkeypatch.setattr(f"hdet_kernels.schedule.{module}.WINDOW", 10)

    def run() -> tuple[torch.optim.Adam, hk.HDETOneCycleLR]:
        optimizer = adam()
        return optimizer, hk.HDETOneCycleLR(optimizer, 0.1, 100, sync_every=1, auto_lr=False)

    optimizer, scheduler = run()
    for _ in range(15):
        advance(optimizer, scheduler, 1.0)
    assert [record.step for record in scheduler.history] == list(range(6, 16))
    state = scheduler.state_dict()
    assert len(state["hdet"][0]["history"]) == 10
    assert scheduler.history_summary.syncs == 15
    optimizer, other = run()
    other.load_state_dict(state)
    assert same(other.state_dict(), state)
    advance(optimizer, other, 1.0)
    assert other.history_summary.syncs == 16
    assert len(other.history) == 10
    assert state["hdet"][0]["summary"]["syncs"] == 15, "loading leaves the checkpoint as it is"
