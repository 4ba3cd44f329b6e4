"""Every act of the controller is said once: in the log of the first process, in the record, and in the summary."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import hdet_kernels as hk
from tests.ranks import run_ranks
from tests.schedule.undo_runs import SYNC, TOTAL, Scripted, Undoable

STEPS = 160


def too_high(max_lr: float, **options: Any) -> hk.HDETOneCycleLR:
    """Train a stack on a regression at a learning rate, and return its scheduler."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=generator)
    y = torch.tanh(x @ torch.randn(8, 4, generator=generator))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    stack = hk.ReplicaStack(model, replicas=4)
    optimizer = hk.FusedSGD(stack.parameters(), lr=0.1, momentum=0.9)
    scheduler = hk.HDETOneCycleLR(optimizer, max_lr, STEPS, ensemble=stack.ensemble, **options)
    for _ in range(STEPS):
        rows = torch.randint(0, len(x), (64,), generator=generator)
        losses = stack.backward(lambda m, a, b: torch.nn.functional.mse_loss(m(a), b), x[rows], y[rows])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses)
    return scheduler


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_a_run_that_is_rescued_says_what_it_did_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hdet_kernels"):
        scheduler = too_high(30.0)
    summary, events = scheduler.history_summary, [record for record in scheduler.history if record.why]
    assert summary.undone >= 1
    assert sum(record.act in ("return", "trial") for record in events) == summary.undone
    assert messages(caplog, logging.WARNING) == [record.why for record in events]
    info = messages(caplog, logging.INFO)
    for record in events:
        given, now = (record.peaks or {})["lr/0"]
        assert f"step {record.step}: " in (record.why or "")
        assert (f"{now:.3g} used" if record.act == "won" else f"→ {now:.3g}") in (record.why or "")
        assert record.event == record.why
        assert given == 30.0
    first = events[0]
    assert first.judgement is not None
    assert f"mean loss {first.judgement['level']:.4g} after {first.judgement['last']:.4g}" in (first.why or "")
    assert f"lowest {first.judgement['lowest']:.4g}" in (first.why or "")
    assert "3 of 4 returns left" in (first.why or "")
    lost = sum(record.step - record.undone for record in events if record.undone is not None)
    used = scheduler.cycle.spread.base(0) / scheduler.cycle.spread.scheduled[0] * 30.0
    ended = f"peak of lr/0 30 given, {used:.3g} used; {summary.outcome().split('; ')[1]}"
    assert f"{lost} steps lost" in ended
    assert info[-1] == f"the run ended: {ended}"
    printed = str(summary).splitlines()
    assert len(printed) < 20
    assert printed[3] == ended
    assert [line[2:] for line in printed[4:]] == [record.why for record in events]


def test_a_good_run_says_that_nothing_was_moved(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hdet_kernels"):
        scheduler = too_high(0.02)
    assert all(record.why is None and record.act is None for record in scheduler.history)
    assert any(record.judgement is not None for record in scheduler.history)
    assert messages(caplog, logging.WARNING) == []
    assert messages(caplog, logging.INFO) == ["the run ended: peak of lr/0 0.02 as given; no return"]


def test_values_that_move_little_by_little_have_a_reason_and_are_no_event(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "hdet_kernels"):
        scheduler = too_high(0.002, trust=10)
    moved = [record for record in scheduler.history if record.act == "move"]
    assert moved
    assert messages(caplog, logging.DEBUG) == [record.why for record in moved]
    assert all("the signs of the slopes put the right peak" in (record.why or "") for record in moved)
    assert all(record.event is None for record in moved)
    others = too_high(0.02, auto_lr=hk.SoftmaxController(warmup_steps=8))
    assert "by SoftmaxController: lr/0 " in (others.history[-2].why or "")
    assert others.history[-1].peaks is None


def _two_ranks(rank: int) -> tuple[list[str], list[str | None], list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hdet_kernels")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    judged = {"auto_lr": Scripted((8, 12), undo=1)}
    run = Undoable("ranks shared", "FusedAdamW", rank, **judged).train(2 * SYNC)
    resumed = Undoable("ranks shared", "FusedAdamW", rank, **judged).load(run.saved()).train(TOTAL - 2 * SYNC)
    events = [event["why"] for event in resumed.scheduler.history_summary.events]
    return said, [record["why"] for record in resumed.history()], events


def test_only_the_first_process_logs_and_all_of_them_record() -> None:
    first, second = run_ranks(2, _two_ranks)
    assert second[0] == []
    assert first[1] == second[1]
    assert first[0][0] == first[1][1]
    assert "all replicas return to the start, and the run begins anew over the 8 steps that remain" in first[0][0]
    assert sum("is not undone" in line for line in first[0]) == 1
    assert first[0][-1].startswith("the run ended: 1 return, 8 steps lost")
    assert first[2] == second[2] == [first[1][1]], "the events of a run that was resumed"
