"""Checkpoints of earlier versions load; those of later ones are refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hdet_kernels as hk
from hdet_kernels.schedule.checkpoint.formats import FORMAT
from tests.schedule.checkpoints import single
from tests.training import same

# A checkpoint of version 0.1 (format 1). It was made with that version on the CPU by this run: parts() below, trained
# for 61 of its 120 steps, in the middle of a cycle. The file has the state_dict() of the stack, the optimizer and the
# scheduler there, and under "end" the parameters, the learning rates after every later step, the base learning rate and
# the controller's state after the last step, as version 0.1 computed them.
OLD = Path(__file__).parents[1] / "data" / "version_0_1.pt"

#: Entries that format 4 added.
ADDED = ("part", "averaged", "optimizer_state")


def old_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.sin(torch.arange(32, dtype=torch.float32).reshape(8, 4) * 0.7 + step)
    return x, x.sum(dim=1, keepdim=True).div(4).tanh()


def old_loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def parts(**options: Any) -> tuple[hk.ReplicaStack, hk.FusedAdamW, hk.HDETOneCycleLR]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    stack = hk.ReplicaStack(module, 4, gradients="shared")
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.01, backend="torch")
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        0.02,
        120,
        pct_start=0.6,
        sync_every=4,
        ensemble=stack.ensemble,
        explore=[hk.Explore("weight_decay", spread=0.5)],
        probe=lambda: stack.losses(old_loss, *old_batch(1000), same_batch=True),
        **options,
    )
    return stack, optimizer, scheduler


def test_a_checkpoint_of_version_0_1_resumes() -> None:
    """The learning rates are those of version 0.1 to the next sync. Later ones are today's."""
    saved = torch.load(OLD, weights_only=True)
    assert "format" not in saved["scheduler"]["hdet"]
    stack, optimizer, scheduler = parts()
    for part, name in ((stack, "stack"), (optimizer, "optimizer"), (scheduler, "scheduler")):
        part.load_state_dict(saved[name])
    rates = []
    for step in range(scheduler.last_epoch, 120):
        losses = stack.backward(old_loss, *old_batch(step))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses)
        rates.append(scheduler.get_last_lr())
    assert len(rates) == 59
    np.testing.assert_allclose(rates[:2], saved["end"]["rates"][:2], rtol=1e-6)
    assert scheduler.cycle.spread.controller_state["soundness"]["initial"] > 0
    assert all(bool(param.isfinite().all()) for param in stack.parameters())


def test_factors_of_version_0_1_go_on_and_evidence_begins_anew() -> None:
    saved = torch.load(OLD, weights_only=True)["scheduler"]
    before = copy.deepcopy(saved)
    scheduler = parts()[2]
    fresh = copy.deepcopy(scheduler.cycle.spread.controller_state)
    scheduler.load_state_dict(saved)
    assert same(saved, before), "loading leaves the checkpoint as it is"
    old, new = saved["hdet"]["spread"]["controller"], scheduler.cycle.spread.controller_state
    assert set(new) == set(fresh)
    assert old["mu"][0] > 1
    names = {"mu": "mu", "m": "m", "q": "q", "s": "s", "updates": "updates", "signs": "signs", "noise": "noise",
             "looks": "observations", "ceilings": "caps"}  # fmt: skip
    assert all(same(old[there], new[here]) for there, here in names.items())
    assert {name: new[name] for name in set(new) - set(names.values())} == {
        "log_likelihood": [[], []], "path_length": [0.0, 0.0], "ceiling": [None, None], "soundness": None
    }  # fmt: skip
    assert scheduler.state_dict()["hdet"][0]["format"] == FORMAT == 4


@pytest.mark.parametrize("version", [1, 2])
def test_settings_of_today_hold_for_older_checkpoints(version: int) -> None:
    """Version 0.1 did not save them, and those of format 2 were others. Arguments of the controller must be equal."""
    state = torch.load(OLD, weights_only=True)["scheduler"]
    if version == 2:
        constants = state["hdet"]["config"]["controller_constants"]
        state["hdet"] |= {"format": 2}
        constants["settings"] = {"early_syncs": [0.125], "quantile": 0.35}
    controller = hk.RegressionController(settings=hk.controller.RegressionSettings(quantile=0.5))
    scheduler = parts(auto_lr=controller)[2]
    scheduler.load_state_dict(state)
    constants = scheduler.state_dict()["hdet"][0]["config"]["controller_constants"]
    assert constants["settings"]["quantile"] == 0.5
    other = parts(auto_lr=hk.RegressionController(limit=2.0))[2]
    with pytest.raises(ValueError, match=r"made with controller_constants.limit=4.0, this .* has 2.0"):
        other.load_state_dict(state)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("measured", [[0.5], None], ids=["measured", "not yet"])
def test_one_measured_slope_is_that_of_one_gradient(version: int, measured: list[float] | None) -> None:
    def made() -> hk.HDETOneCycleLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        controller = hk.HypergradientController()
        return hk.HDETOneCycleLR(optimizer, 0.1, 20, sync_every=4, auto_lr=controller, cycle_momentum=False)

    state = made().state_dict()
    (state["hdet"],) = state["hdet"]
    moved = {key: value for key, value in state["hdet"]["displacement"].items() if key != "slopes"}
    state["hdet"]["displacement"] = {**moved, "measured": measured}
    for name in ("version", "run", "summary", "undo", *ADDED):
        del state["hdet"][name]
    state["hdet"]["format"] = version
    if version == 1:
        del state["hdet"]["format"]
    scheduler = made()
    scheduler.load_state_dict(state)
    found = scheduler.state_dict()["hdet"][0]["displacement"]
    assert found["slopes"] == ([] if measured is None else [[0.5]])


@pytest.mark.parametrize("slopes", [[], [[0.5]], [[1.0], [-3.0]], [[1.0], [4.0], [2.0]], [[2.0]] * 3], ids=str)
def test_sums_of_slopes_become_slopes_of_the_same_mean_and_error(slopes: list[list[float]]) -> None:
    def made() -> hk.HDETOneCycleLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        controller = hk.HypergradientController()
        return hk.HDETOneCycleLR(optimizer, 0.1, 20, sync_every=4, auto_lr=controller, cycle_momentum=False)

    (hdet,) = made().state_dict()["hdet"]
    values = [value for (value,) in slopes]
    sums = [[sum(values)], [sum(value * value for value in values)]] if values else None
    moved = {key: value for key, value in hdet["displacement"].items() if key != "slopes"}
    old = {**{key: value for key, value in hdet.items() if key not in ADDED}, "format": 3}
    old["displacement"] = {**moved, "sums": sums, "count": len(values)}
    scheduler = made()
    scheduler.load_state_dict({**scheduler.state_dict(), "hdet": old})
    found = [value for (value,) in scheduler.state_dict()["hdet"][0]["displacement"]["slopes"]]
    assert len(found) == len(values)
    if values:
        np.testing.assert_allclose([np.mean(found), np.std(found)], [np.mean(values), np.std(values)], atol=1e-12)


def test_a_format_from_the_future_is_refused_and_changes_nothing() -> None:
    scheduler = single()
    state = scheduler.state_dict()
    state["hdet"][0]["format"] = FORMAT + 1
    before = copy.deepcopy(scheduler.state_dict())
    with pytest.raises(
        ValueError, match=r"has format 5 of hdet_kernels .*, this is version .*, which reads 1 to 4: load it with"
    ):
        scheduler.load_state_dict(state)
    assert same(scheduler.state_dict(), before)


def test_entries_of_a_newer_version_are_named() -> None:
    scheduler = single()
    before = copy.deepcopy(scheduler.state_dict())
    for version, words in (
        (FORMAT, r"entries that hdet_kernels \S+ does not know: hdet\.mood; it was saved by version '9\.9'"),
        (FORMAT + 1, r"has format 5 of hdet_kernels '9\.9', this is version \S+, .* does not know hdet\.mood"),
    ):
        state = copy.deepcopy(before)
        state["hdet"][0].update({"format": version, "version": "9.9", "mood": 1})
        with pytest.raises(ValueError, match=words):
            scheduler.load_state_dict(state)
    assert same(scheduler.state_dict(), before)


def test_a_checkpoint_of_format_2_loads() -> None:
    """It had every record, no summary, and no version."""
    scheduler = single()
    for _ in range(5):
        scheduler.optimizer.step()
        scheduler.step(1.0)
    state = scheduler.state_dict()
    without = ("version", "run", "summary", *ADDED)
    old = {**state, "hdet": {k: v for k, v in state["hdet"][0].items() if k not in without}}
    old["hdet"]["format"] = 2
    other = single()
    other.load_state_dict(old)
    assert same(other.state_dict(), state)
