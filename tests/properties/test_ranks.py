"""Sequences of operations that two processes make together leave the schedulers equal to the equations."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tests.properties.reference import GROUPS, Setup
from tests.properties.scheduler_twins import SchedulerTwins
from tests.ranks import run_ranks

ORDERS = list(itertools.permutations(("model", "optimizer", "scheduler")))
RUNS, OPERATIONS = 24, 30


def _setup(draw: random.Random) -> Setup:
    return Setup(
        kind="rank",
        replicas=2,
        shared=draw.random() < 0.5,
        fused=draw.random() < 0.5,
        schedule=draw.choice(("one-cycle", "cosine")),
        spread=draw.choice((0.0, 0.3, 0.3)),
        log_spacing=draw.random() < 0.5,
        every=draw.choice((1, 3, 7)),
        warmup=draw.choice((None, 0, 8)),
        momentum=draw.choice((0.0, 0.9)),
    )


def _operate(twins: SchedulerTwins, draw: random.Random, saved: list[Any]) -> str:
    """Apply one operation, which both ranks draw from the same seed, and return its name."""
    kind = draw.choice(
        ("train", "train", "train", "skipped", "frozen", "converge", "consensus", "edit", "save", "load")
    )
    seed, group = draw.randrange(1000), draw.randrange(GROUPS)
    records, order = draw.randrange(3), draw.choice(ORDERS)
    if twins.over and kind in ("train", "skipped", "frozen"):
        kind = "load"
    if kind == "train":
        twins.train(seed, records=records)
    elif kind == "skipped":
        twins.train(seed, skipped=True)
    elif kind == "frozen":
        twins.train(seed, frozen=group)
    elif kind == "converge":
        twins.converge()
    elif kind == "consensus":
        twins.consensus()
    elif kind == "edit":
        twins.edit("weight_decay", draw.choice((0.0, 0.1)), group)
    elif kind == "save":
        saved.append(twins.save())
    elif saved:
        twins.load(saved[-1], order)
    return kind


def _sequences(rank: int) -> int:
    count = 0
    for seed in range(RUNS):
        draw = random.Random(seed)
        twins, saved, made = SchedulerTwins(_setup(draw), rank), [], []  # type: ignore[var-annotated]
        for _ in range(OPERATIONS):
            try:
                made.append(_operate(twins, draw, saved))
                twins.check()
            except Exception as error:
                raise AssertionError(f"seed {seed}, {twins.setup}, after {made}: {error}") from error
            count += 1
    return count


@pytest.mark.full
def test_sequences_on_two_ranks_follow_the_equations() -> None:
    assert run_ranks(2, _sequences) == [RUNS * OPERATIONS] * 2
