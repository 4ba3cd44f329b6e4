"""Flat names for the numbers of a sync."""

from __future__ import annotations

import math
from typing import Any

import pytest

import hdet_kernels as hk
from hdet_kernels.schedule.history import SyncRecord, flat, short_names
from tests.schedule.cases import Place, adam, advance
from tests.schedule.scout_runs import PHASE, REPLICAS, StackRun

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


def test_a_scheduler_has_the_values_of_now_and_totals_before_the_first_sync_too() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=4, auto_lr=False, ensemble=Place(3, 1), spread=0.3)
    totals = {f"hdet/total/{n}": 0.0 for n in ("syncs", "excluded", "returns", "seconds", "bytes", "collectives")}
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
