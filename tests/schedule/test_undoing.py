"""Returns to the last sound average: bit for bit, counted, recorded and resumable."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.ranks import Cases
from tests.schedule.undo_runs import OPTIMIZERS, SOUND_THEN_BROKEN, SYNC, TOTAL, Kind, Scripted, Undoable
from tests.training import same

KINDS: tuple[Kind, ...] = ("stack shared", "stack local", "ranks shared", "ranks local")


def _returned(rank: int, kind: Kind, optimizer: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train to a sound sync and on to a broken one; return both states, and the runs after it, of this one and of one
    that was interrupted between them."""
    options = {"auto_lr": Scripted(SOUND_THEN_BROKEN), **options}
    run = Undoable(kind, optimizer, rank, **options).train(SYNC)
    sound = run.everything()
    saved = run.train(SYNC - 1).saved()
    before, base = run.everything(), run.scheduler.get_base_lr()
    broken = run.train(1).everything()
    history = run.history()
    resumed = Undoable(kind, optimizer, rank, **options).load(saved).train(TOTAL - 2 * SYNC + 1)
    run.train(TOTAL - 2 * SYNC)
    ends = [{**each.everything(), "history": each.history()} for each in (run, resumed)]
    base = [base, run.scheduler.get_base_lr()]
    return {"sound": sound, "before": before, "broken": broken, "history": history, "ends": ends, "base": base}


def check_return(found: dict[str, Any]) -> None:
    assert not same(found["sound"], found["before"])
    assert same(found["sound"], found["broken"])
    assert same(*found["ends"])
    assert [record["undone"] for record in found["history"]] == [None, 4]


#: (kind, optimizer, options); those in the first list are quick.
STACKS = [("stack shared", "FusedAdamW"), ("stack local", "FusedSGD")]
RANKS = Cases(
    2,
    _returned,
    {
        ("ranks shared", "torch AdamW"): ("ranks shared", "torch AdamW", {}),
        ("ranks local", "FusedAdamW"): ("ranks local", "FusedAdamW", {}),
    },
    full={
        (kind, optimizer): (kind, optimizer, {})
        for kind, optimizer in itertools.product(KINDS[2:], OPTIMIZERS)
        if (kind, optimizer) not in [("ranks shared", "torch AdamW"), ("ranks local", "FusedAdamW")]
    },
)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        pytest.param(kind, optimizer, marks=() if (kind, optimizer) in STACKS else pytest.mark.full)
        for kind, optimizer in itertools.product(KINDS[:2], list(OPTIMIZERS)[:2])
    ],
)
def test_a_stack_returns_bit_for_bit_and_resumes_between(kind: Kind, optimizer: str) -> None:
    check_return(_returned(0, kind, optimizer, {}))


@pytest.mark.parametrize(("kind", "optimizer"), RANKS.params())
def test_ranks_return_bit_for_bit_and_resume_between(kind: Kind, optimizer: str) -> None:
    for found in RANKS[kind, optimizer]:
        check_return(found)
