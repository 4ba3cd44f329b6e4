"""The part of a checkpoint that a run without a learning rate has."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdet_kernels as hk
from tests.schedule.scout_runs import PHASE, StackRun
from tests.training import same


def test_a_checkpoint_is_plain_values_and_tensors() -> None:
    run = StackRun()
    run.train(3)
    file = io.BytesIO()
    torch.save(run.scheduler.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["scout"][0].keys() == {"config", "ratios", "found", "phase"}
    other = StackRun()
    other.scheduler.load_state_dict(loaded)
    assert same(other.scheduler.state_dict()["scout"], run.scheduler.state_dict()["scout"])


def change(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def changed(state: Any) -> None:
        for name in path[:-1]:
            state = state[name]
        state[path[-1]] = value

    return changed


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (change("scout", value=None), "made with a learning rate, this scheduler has max_lr=None"),
        (change("scout", 0, "config", "total_steps", value=51), "made with total_steps=51, this scheduler has 50"),
        (change("scout", 0, "config", value=None), "made with scout=None"),
        (change("scout", 0, "found", value=0.1), "scout.found and scout.phase exclude each other"),
        (change("scout", 0, "ratios", value=[1.0]), "scout.ratios"),
        (change("scout", 0, "phase", "round", value=2), "scout.phase.round"),
        (change("scout", 0, "phase", "step", value=5), "scout.phase.step"),
        (change("scout", 0, "phase", "bracket", value=[0.0]), "scout.phase.bracket"),
        (change("scout", 0, "phase", "start", value=None), "scout.phase.start"),
        (change("scout", 0, "phase", "start", "params", value=[torch.zeros(3)]), "resume with the model"),
        (
            change("scout", 0, "phase", "start", "state", value={"0/step": torch.zeros(3)}),
            "start.state.0/step has 3 elements",
        ),
        (change("scout", 0, "phase", "losses", "tail", "count", value=-1), "scout.phase.losses.tail.count"),
        (change("scout", 0, "phase", "replicas", value=[2, 0, 2, 0]), "load on every process its own file"),
        (change("scout", 0, "phase", "more", value=1), "scout.phase.more"),
        (change("last_epoch", value=2), "scheduler.last_epoch"),
        (change("total_steps", value=50), "scheduler.total_steps"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(damage: Any, text: str) -> None:
    run = StackRun()
    run.train(3)
    state = run.saved()["scheduler"]
    damage(state)
    other = StackRun()
    other.train(1)
    before = other.saved()
    with pytest.raises(ValueError, match=text.replace("[", r"\[")):
        other.scheduler.load_state_dict(state)
    assert same(other.saved(), before)


def test_runs_with_and_without_a_learning_rate_do_not_load_each_other() -> None:
    found, given = StackRun(), StackRun(0.01)
    found.train(PHASE)
    with pytest.raises(ValueError, match="made with max_lr=None, this scheduler has max_lr=one"):
        given.scheduler.load_state_dict(found.scheduler.state_dict())
    other = StackRun(scout=hk.ScoutSettings(share=0.4, fewest=4, shift=0.5))
    with pytest.raises(ValueError, match=r"made with scout\.highest=1.0, this scheduler has 10.0"):
        other.scheduler.load_state_dict(found.scheduler.state_dict())
