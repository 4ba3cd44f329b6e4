"""The records of syncs: what is in them, their metrics, their file, and callbacks."""

from __future__ import annotations

import copy
import json
import logging
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hdet_kernels as hk
from hdet_kernels.controller.protocol import Findings
from hdet_kernels.converge import Outcome
from hdet_kernels.schedule.acts import Act
from hdet_kernels.schedule.history import POINTS, WINDOW, History, SyncRecord, flat, short_names
from tests.ranks import run_ranks
from tests.schedule.cases import Place, adam, advance
from tests.schedule.scout_runs import PHASE, REPLICAS, ROUNDS, StackRun
from tests.schedule.undo_runs import Scripted
from tests.training import Trainer, same


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
    judgement = {"level": 1.0, "cost": math.nan}
    found = Findings(np.array([-1.5, math.nan]), np.array([0.5, math.nan]), judgement=judgement)
    said = {"findings": found, "act": Act("move", "step 8: halved"), "peaks": {"lr/0": [0.2, 0.1]}}
    made = SyncRecord.of(outcome, placed, ["lr/0", "x"], step=8, cycle=1, kind="sync", **said)
    expected = {
        "step": 8, "cycle": 1, "kind": "sync", "losses": [1.0, math.nan], "probes": None,
        "base": {"lr/0": 0.1, "x": 3.0}, "values": {"lr/0": [0.1, 0.2], "x": [3.0, 3.0]}, "excluded": [1],
        "gradients": gradients, "bytes": 12, "collectives": 2, "seconds": 0.5, "landed": 8, "taken": None,
        "undone": None, "slopes": {"lr/0": -1.5}, "errors": {"lr/0": 0.5}, "posterior": None, "distance": 0.25,
        "act": "move", "why": "step 8: halved", "judgement": {"level": 1.0}, "peaks": {"lr/0": [0.2, 0.1]},
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


RECORD = SyncRecord(
    step=8,
    cycle=1,
    kind="sync",
    losses=[1.0, math.nan, 3.0],
    probes=[0.5, math.inf, 0.7],
    base={"lr/0": 0.1, "betas[0]/0": 0.9},
    values={"lr/0": [0.07, 0.1, 0.13], "betas[0]/0": [0.9, 0.9, 0.9]},
    excluded=[1],
    gradients="shared",
    bytes=1000,
    collectives=2,
    seconds=0.5,
    undone=4,
    slopes={"lr/0": -2.0},
    errors={"lr/0": 0.25},
    posterior={"lr/0": [0.5, 1.0]},
    distance=0.01,
)


def test_a_record_has_all_of_its_numbers() -> None:
    assert RECORD.metrics() == {
        "hdet/step": 8,
        "hdet/cycle": 1,
        "hdet/base/lr": 0.1,
        "hdet/base/betas_0": 0.9,
        "hdet/replica0/lr": 0.07,
        "hdet/replica1/lr": 0.1,
        "hdet/replica2/lr": 0.13,
        **{f"hdet/replica{replica}/betas_0": 0.9 for replica in range(3)},
        "hdet/loss": 2.0,
        "hdet/replica0/loss": 1.0,
        "hdet/replica2/loss": 3.0,
        "hdet/probe": pytest.approx(0.6),
        "hdet/replica0/probe": 0.5,
        "hdet/replica2/probe": 0.7,
        "hdet/slope/lr": -2.0,
        "hdet/slope_error/lr": 0.25,
        "hdet/log_peak/lr": 0.5,
        "hdet/log_peak_deviation/lr": 1.0,
        "hdet/distance": 0.01,
        "hdet/excluded": 1,
        "hdet/returned": 1,
        "hdet/seconds": 0.5,
        "hdet/bytes": 1000,
        "hdet/collectives": 2,
    }
    assert all(type(value) is float for value in RECORD.metrics().values())
    few = RECORD.metrics(replicas=False)
    assert few == {name: value for name, value in RECORD.metrics().items() if "replica" not in name}


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["lr/0"], ["lr"]),
        (["lr/0", "lr/1", "weight_decay/1"], ["lr/0", "lr/1", "weight_decay"]),
        (["lr/0", "betas[0]/0", "betas[1]/0"], ["lr", "betas_0", "betas_1"]),
        (["lr/0", "drop rate, §"], ["lr", "drop_rate"]),
    ],
)
def test_names_are_short_and_safe(names: list[str], short: list[str]) -> None:
    assert list(short_names(names).values()) == short


def test_what_is_not_finite_is_left_out() -> None:
    assert flat({"a": math.nan, "b": math.inf, "c": None, "d": 0}) == {"hdet/d": 0.0}


TOTALS = ("syncs", "excluded", "returns", "lost", "seconds", "bytes", "collectives")


def test_a_scheduler_has_the_values_of_now_and_totals_before_the_first_sync_too() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=4, auto_lr=False, ensemble=Place(3, 1), spread=0.3)
    totals = {f"hdet/total/{n}": 0.0 for n in TOTALS}
    base = float(scheduler.get_base_lr()[0])
    own = {f"hdet/replica{r}/lr": scheduler.metrics()[f"hdet/replica{r}/lr"] for r in range(3)}
    assert scheduler.metrics() == {"hdet/base/lr": base, **own, **totals}
    assert sorted(own.values()) == pytest.approx([0.7 * base, base, 1.3 * base])
    assert own["hdet/replica1/lr"] == optimizer.param_groups[0]["lr"]
    for _ in range(5):
        advance(optimizer, scheduler, 2.0)
    now = scheduler.metrics()
    assert now["hdet/step"] == 4
    assert now["hdet/loss"] == 2.0
    assert now["hdet/total/syncs"] == 1
    assert now["hdet/base/lr"] == scheduler.get_base_lr()[0]
    assert now["hdet/base/lr"] != scheduler.history[-1].base["lr/0"]
    assert now["hdet/replica1/lr"] == optimizer.param_groups[0]["lr"]
    assert "hdet/replica1/lr" not in scheduler.metrics(replicas=False)


def test_a_run_without_a_learning_rate_has_metrics_of_its_candidates() -> None:
    run = StackRun()
    first: dict[str, Any] = run.scheduler.metrics()
    rates = [first[f"hdet/replica{replica}/lr/0"] for replica in range(REPLICAS)]
    assert rates == sorted(rates)
    assert rates[-1] > 100 * rates[0]
    run.train(PHASE)
    assert run.scheduler.metrics()["hdet/total/syncs"] == 2


def filed(path: Path, **options: Any) -> tuple[Any, hk.HDETOneCycleLR]:
    optimizer = adam()
    options = {"sync_every": 2, "auto_lr": False, "history_file": path, **options}
    return optimizer, hk.HDETOneCycleLR(optimizer, 0.1, 12, **options)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def train_to(parts: tuple[Any, hk.HDETOneCycleLR], until: int) -> hk.HDETOneCycleLR:
    optimizer, scheduler = parts
    while scheduler.last_epoch < until:
        advance(optimizer, scheduler, 1.0)
    return scheduler


def test_every_record_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    optimizer, scheduler = filed(path)
    advance(optimizer, scheduler)  # no loss: NaN, which JSON does not have
    advance(optimizer, scheduler)
    train_to((optimizer, scheduler), 6)
    records = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert records[0]["losses"] == [None]
    assert records[1:] == [record.to_dict() for record in scheduler.history[1:]]
    assert len(hk.report.table(records).splitlines()) == 5


def test_a_resumed_run_continues_its_file_without_repeating(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    parts = filed(path)
    state = train_to(parts, 4).state_dict()
    parts[1].converge()
    saved = parts[1].state_dict()
    train_to(parts, 8)
    with path.open("a") as file:
        file.write('{"step": 9, "ki')  # the process died here
    resumed = filed(path)
    resumed[1].load_state_dict(saved)
    train_to(resumed, 12)
    assert steps_in(path) == [2, 4, 4, 6, 8, 10, 12]
    earlier = filed(path)
    earlier[1].load_state_dict(state)
    train_to(earlier, 6)
    assert steps_in(path) == [2, 4, 6]


def test_the_file_of_another_run_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "history.jsonl"
    for number in range(3):
        with caplog.at_level(logging.WARNING, logger="hdet_kernels"):
            train_to(filed(path), 2 + 2 * number)
    assert steps_in(path) == [2, 4, 6]
    assert steps_in(tmp_path / "history.jsonl.1") == [2]
    assert steps_in(tmp_path / "history.jsonl.2") == [2, 4]
    assert "has the history of another run" in caplog.text


def test_a_file_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    parts = filed(folder / "history.jsonl")
    folder.rmdir()
    train_to(parts, 4)
    assert "cannot be written" in caplog.text
    folder.mkdir()
    train_to(parts, 6)
    assert steps_in(folder / "history.jsonl") == [2, 4, 6]


@pytest.mark.parametrize(
    ("path", "error"), [(3, TypeError), ("no/such/folder/x", ValueError)], ids=["number", "no folder"]
)
def test_a_path_that_cannot_be_is_refused(path: Any, error: type[Exception]) -> None:
    optimizer = adam()
    with pytest.raises(error, match="history_file"):
        hk.HDETOneCycleLR(optimizer, 0.1, 12, auto_lr=False, history_file=path)
    assert optimizer.param_groups[0]["lr"] == 0.1


def _filed_ranks(rank: int, path: Path) -> int:
    trainer = Trainer(rank, ddp=False, auto_lr=False, history_file=path).train(8)
    torch.distributed.barrier()
    return len(trainer.scheduler.history)


@pytest.mark.full
def test_one_process_writes(tmp_path: Path) -> None:
    assert run_ranks(2, _filed_ranks, tmp_path / "history.jsonl") == [2, 2]
    assert steps_in(tmp_path / "history.jsonl") == [4, 8]


def _told(rank: int) -> dict[str, Any]:
    """Return the records that callbacks got in runs of every kind, and how the run looked then."""
    found: dict[str, Any] = {}
    kinds: dict[str, dict[str, Any]] = {
        "shared": {"total_steps": 40, "ddp": True},
        "local, ends between syncs": {"total_steps": 10, "auto_lr": False},
        "overlap": {"auto_lr": False, "overlap_steps": 3},
        "undone": {"auto_lr": Scripted((8,), last=99)},
    }
    for name, options in kinds.items():
        trainer = Trainer(rank, **{"ddp": False, **options})
        told: list[SyncRecord] = []
        states: list[tuple[Any, Any]] = []
        first: list[int] = []
        scheduler = trainer.scheduler
        scheduler.on_sync(told.append)
        scheduler.on_sync(lambda record, first=first: first.append(record.step), every_process=False)
        scheduler.on_sync(
            lambda record, states=states, scheduler=scheduler: states.append(copy.deepcopy(scheduler.state_dict()))
        )
        after: list[Any] = []
        for _ in range(10):
            trainer.train(1)
            after += [copy.deepcopy(scheduler.state_dict())] * (len(states) - len(after))
        scheduler.converge()
        found[name] = {
            "told": [record.to_dict() for record in told],
            "history": [record.to_dict() for record in scheduler.history],
            "first": first,
            "consistent": same(states[: len(after)], after),
        }
    return found


def test_every_sync_of_every_kind_is_told_in_every_process_once_the_state_is_consistent() -> None:
    results = run_ranks(2, _told)
    for found in results:
        for name, case in found.items():
            assert same(case["told"], case["history"]), name
            assert case["consistent"], f"{name}: the state in a callback is that after step()"
    for name, case in results[0].items():
        assert case["first"] == [record["step"] for record in case["told"]], name
        assert results[1][name]["first"] == [], "in the first process alone"
    first = results[0]
    assert [record["kind"] for record in first["local, ends between syncs"]["told"]] == [
        "sync",
        "sync",
        "last",
        "manual",
    ]
    assert [(r["step"], r["landed"]) for r in first["overlap"]["told"]] == [(4, 7), (8, 10), (10, 10)]
    assert [record["undone"] for record in first["undone"]["told"]] == [None, 0, None]


def test_scouting_rounds_are_told_and_callbacks_outlive_them() -> None:
    run = StackRun()
    told: list[SyncRecord] = []
    found: list[float | None] = []
    run.scheduler.on_sync(told.append)
    run.scheduler.on_sync(lambda _: found.append(run.scheduler.scouted))
    run.train(PHASE)
    assert [(record.kind, record.step) for record in told] == [("scout", ROUNDS[0]), ("scout", PHASE)]
    assert found == [None, run.scheduler.scouted], "when the last round is told, the run is in place"
    assert found[-1] is not None
    run.train(run.scheduler.sync_every)
    assert told == run.scheduler.history
    assert told[-1].kind == "sync"


@pytest.fixture
def run() -> tuple[torch.optim.Adam, hk.HDETOneCycleLR]:
    optimizer = adam()
    return optimizer, hk.HDETOneCycleLR(optimizer, 0.1, 20, sync_every=2, auto_lr=False)


def test_a_handle_removes_its_callback_alone(run: tuple[Any, hk.HDETOneCycleLR]) -> None:
    optimizer, scheduler = run
    steps: list[list[int]] = [[], []]
    handles = [scheduler.on_sync(lambda record, own=own: own.append(record.step)) for own in steps]
    for _ in range(2):
        advance(optimizer, scheduler, 1.0)
    handles[0].remove()
    handles[0].remove()
    for _ in range(2):
        advance(optimizer, scheduler, 1.0)
    assert steps == [[2], [2, 4]]


def test_an_exception_comes_after_the_sync_is_complete_and_training_can_go_on(
    run: tuple[Any, hk.HDETOneCycleLR],
) -> None:
    optimizer, scheduler = run
    calm = adam()
    other = hk.HDETOneCycleLR(calm, 0.1, 20, sync_every=2, auto_lr=False)
    later: list[int] = []

    def fails(record: SyncRecord) -> None:
        raise ZeroDivisionError(f"at {record.step}")

    handles = [scheduler.on_sync(fails), scheduler.on_sync(lambda record: later.append(record.step))]
    advance(optimizer, scheduler, 1.0)
    with pytest.raises(ZeroDivisionError, match="at 2"):
        advance(optimizer, scheduler, 1.0)
    assert later == [2], "those behind it are called too"
    with pytest.raises(ZeroDivisionError, match="at 2"):
        scheduler.converge()
    scheduler.on_sync(fails)
    advance(optimizer, scheduler, 1.0)
    with pytest.raises(ExceptionGroup, match="several callbacks") as several:
        advance(optimizer, scheduler, 1.0)
    assert len(several.value.exceptions) == 2
    handles[0].remove()
    for step in range(4):
        advance(calm, other, 1.0)
        if step == 1:
            other.converge()
    untimed = [[{**record.to_dict(), "seconds": 0} for record in each.history] for each in (scheduler, other)]
    assert same(*untimed), "the run is as if no callback had raised"
    assert scheduler.get_last_lr() == other.get_last_lr()
    assert same(optimizer.state_dict(), calm.state_dict())


@pytest.mark.parametrize("method", ["step", "converge"])
def test_a_callback_cannot_sync_again(run: tuple[Any, hk.HDETOneCycleLR], method: str) -> None:
    optimizer, scheduler = run
    scheduler.on_sync(lambda _: getattr(scheduler, method)())
    with pytest.raises(RuntimeError, match=rf"scheduler.{method}\(\) inside a callback of on_sync"):
        scheduler.converge()
    advance(optimizer, scheduler, 1.0)
    assert scheduler.last_epoch == 1


def test_callbacks_are_no_part_of_a_checkpoint(run: tuple[Any, hk.HDETOneCycleLR]) -> None:
    optimizer, scheduler = run
    before = scheduler.state_dict().keys()
    told: list[int] = []
    scheduler.on_sync(lambda record: told.append(record.step))
    assert scheduler.state_dict().keys() == before
    for _ in range(2):
        advance(optimizer, scheduler, 1.0)
    state = scheduler.state_dict()
    scheduler.load_state_dict(state)
    assert told == [2], "records of a checkpoint are not told again"
    for _ in range(2):
        advance(optimizer, scheduler, 1.0)
    assert told == [2, 4]


def test_a_wrapped_schedule_tells_too() -> None:
    optimizer = adam()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scheduler = hk.HDETScheduler(cosine, sync_every=5, auto_lr=False)
    told: list[SyncRecord] = []
    scheduler.on_sync(told.append)
    for _ in range(10):
        advance(optimizer, scheduler, 1.0)
    assert told == scheduler.history
    assert scheduler.metrics()["hdet/base/lr"] == pytest.approx(0.0, abs=1e-12)


def test_what_is_no_callback_is_refused(run: tuple[Any, hk.HDETOneCycleLR]) -> None:
    _, scheduler = run
    with pytest.raises(TypeError, match=r"callback must be callable as callback\(record\)"):
        scheduler.on_sync("print")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every_process must be True or False, got 'no'"):
        scheduler.on_sync(print, every_process="no")  # type: ignore[arg-type]
    assert not math.isnan(scheduler.metrics()["hdet/base/lr"])
