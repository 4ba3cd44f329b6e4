"""The keys that docs/checkpoint-format.md lists are those of real checkpoints."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import hdet_kernels as hk
from tests.docs.pages import ROOT
from tests.ranks import run_ranks
from tests.schedule.scout_runs import StackRun
from tests.schedule.undo_runs import Scripted
from tests.training import Trainer

TEXT = (ROOT / "docs" / "checkpoint-format.md").read_text()


def listed(heading: str) -> set[str]:
    """Return the keys in the table under a heading."""
    section = re.search(rf"^### {heading}\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S)
    assert section is not None, heading
    return set(re.findall(r"^\| `(\w+)` \|", section[1], re.M))


def _trained(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a scheduler after one or more syncs."""
    trainer = Trainer(rank, ddp=options.get("auto_lr") is not False, **options).train(9)
    return dict(trainer.scheduler.state_dict()["hdet"][0])


def _all(rank: int) -> dict[str, dict[str, Any]]:
    """Return states that together have every entry."""
    return {
        "probe": _trained(rank, {"total_steps": 40, "probe": lambda: 1.0 + rank}),
        "hypergradient": _trained(rank, {"total_steps": 40, "auto_lr": hk.HypergradientController()}),
        "softmax": _trained(rank, {"auto_lr": hk.SoftmaxController(warmup_steps=0)}),
        "compressed": _trained(rank, {"auto_lr": False, "compress": "int8", "outer": hk.Outer()}),
        "undo": _trained(rank, {"auto_lr": Scripted()}),
        "overlapped": _trained(rank, {"auto_lr": False, "overlap_steps": 3}),
    }


@pytest.fixture(scope="module")
def states() -> dict[str, dict[str, Any]]:
    return dict(run_ranks(2, _all)[0])


def test_the_scheduler(states: dict[str, dict[str, Any]]) -> None:
    for state in states.values():
        assert set(state) == listed("hdet")
        assert set(state["config"]) == listed("config")
        assert set(state["spread"]) == listed("spread")
        assert set(state["window"]) == listed("window")
        assert set(state["history"][0]) == listed("history")


@pytest.mark.parametrize(
    ("entry", "of"),
    [
        ("displacement", "hypergradient"),
        ("pending", "overlapped"),
        ("compression", "compressed"),
        ("outer", "compressed"),
    ],
)
def test_an_entry_that_only_some_runs_have(states: dict[str, dict[str, Any]], entry: str, of: str) -> None:
    assert set(states[of][entry]) == listed(entry)
    assert states["softmax"][entry] is None


def test_the_start(states: dict[str, dict[str, Any]]) -> None:
    assert set(states["undo"]["undo"]) == listed("undo")
    assert set(states["undo"]["undo"]["kept"]) == listed("kept")
    assert states["overlapped"]["undo"] is None


def test_a_run_without_a_learning_rate() -> None:
    run = StackRun()
    run.train(1)
    scout = run.scheduler.state_dict()["scout"][0]
    assert set(scout) == listed("scout")
    assert set(scout["phase"]) == listed("phase")
    assert set(scout["phase"]["start"]) == listed("kept")


@pytest.mark.parametrize(
    ("controller", "of"),
    [
        ("RegressionController", "probe"),
        ("HypergradientController", "hypergradient"),
        ("SoftmaxController", "softmax"),
    ],
)
def test_a_controller(states: dict[str, dict[str, Any]], controller: str, of: str) -> None:
    assert set(states[of]["spread"]["controller"]) == listed(controller)


def test_the_course_of_the_losses(states: dict[str, dict[str, Any]]) -> None:
    assert set(states["probe"]["spread"]["controller"]["soundness"]) == listed("soundness")


def test_the_optimizers() -> None:
    found: set[str] = set()
    groups: set[str] = set()
    cases: list[tuple[Any, torch.dtype, dict[str, Any]]] = [
        (hk.FusedAdamW, torch.bfloat16, {"amsgrad": True}),
        (hk.FusedAdagrad, torch.float32, {}),
        (hk.FusedLion, torch.bfloat16, {"master_weights": "split"}),
        (hk.FusedMuon, torch.float32, {"normuon": True}),
        (hk.FusedSGD, torch.bfloat16, {"momentum": 0.9, "stochastic_rounding": True, "master_weights": False}),
    ]
    for make, dtype, options in cases:
        param = torch.nn.Parameter(torch.ones((3, 1) if make is hk.FusedMuon else 3, dtype=dtype))
        param.grad = torch.ones_like(param)
        optimizer = make([param], lr=0.1, **options)
        optimizer.step()
        found |= set(optimizer.state[param])
        groups |= set(optimizer.param_groups[0])
    stack = hk.ReplicaStack(torch.nn.Linear(2, 1), 2)
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.1)
    hk.HDETOneCycleLR(optimizer, 0.1, 10, ensemble=stack.ensemble)
    groups |= set(optimizer.param_groups[0])
    assert found == listed("state")
    assert listed("param_groups") <= groups
