"""States of other runs, other replicas and other controllers: refused before anything changes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import hdet_kernels as hk
from hdet_kernels.schedule.checkpoint import to_plain
from hdet_kernels.schedule.checkpoint_checks import checked
from tests.ranks import run_ranks
from tests.schedule.checkpoints import single
from tests.training import Trainer, network, same


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 3}, "made with sync_every=1, this scheduler has 3"),
        ({"seed": 5}, "made with seed=0, this scheduler has 5"),
        ({"total_steps": 21}, "made with total_steps=20, this scheduler has 21"),
        ({"spread": 0.1}, "made with hyperparameters="),
        ({"auto_lr": False}, "made with controller='RegressionController', this scheduler has None"),
    ],
    ids=["sync_every", "seed", "total_steps", "spread", "controller"],
)
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(options: dict[str, Any], message: str) -> None:
    saved = single()
    for _ in range(3):
        saved.optimizer.step()
        saved.step(1.0)
    other = single(**options)
    before = other.state_dict()
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved.state_dict())
    assert same(other.state_dict(), before)


def test_a_checkpoint_of_another_kind_of_scheduler_is_refused() -> None:
    one_cycle = single()
    wrapped = hk.HDETScheduler(torch.optim.lr_scheduler.CosineAnnealingLR(single().optimizer, 20))
    with pytest.raises(ValueError, match="made with schedule='HDETScheduler around CosineAnnealingLR', this scheduler"):
        one_cycle.load_state_dict(wrapped.state_dict())
    with pytest.raises(ValueError, match="made with schedule='OneCycleLR', this scheduler"):
        wrapped.load_state_dict(one_cycle.state_dict())
    with pytest.raises(ValueError, match="not a checkpoint of an HDET scheduler"):
        one_cycle.load_state_dict({"hdet": {}})


def test_a_plain_torch_checkpoint_is_refused() -> None:
    scheduler = single()
    torch_scheduler = torch.optim.lr_scheduler.OneCycleLR(scheduler.optimizer, 0.1, 20)
    with pytest.raises(ValueError, match="not a checkpoint of an HDET scheduler"):
        scheduler.load_state_dict(torch_scheduler.state_dict())


def _under_way(rank: int) -> list[str]:
    """A checkpoint at a sync, with an overlapped average under way, for a stack of two rows: refused, then allowed."""
    options: dict[str, Any] = {"total_steps": 12, "sync_every": 4, "auto_lr": False}
    trainer = Trainer(rank, overlap_steps=2, ddp=False, **options).train(4)
    found = []
    for _ in range(2):
        stack = hk.ReplicaStack(network(), 2)
        optimizer = hk.FusedAdamW(stack.parameters(), lr=0.01)
        scheduler = hk.HDETOneCycleLR(optimizer, 0.01, ensemble=stack.ensemble, **options)
        before = copy.deepcopy(scheduler.state_dict())
        try:
            scheduler.load_state_dict(trainer.scheduler.state_dict())
            found.append("")
        except ValueError as error:
            assert same(scheduler.state_dict(), before)
            found.append(str(error))
        trainer.scheduler.converge()
    return found


def test_an_overlapped_average_under_way_needs_as_many_rows() -> None:
    for refused, allowed in run_ranks(2, _under_way):
        assert "has 2 replicas, 1 in a process, and an overlapped average under way, this run has" in refused
        assert "2 in a process" in refused
        assert "call scheduler.converge() before saving, which applies it" in refused
        assert allowed == ""


class Forgetful(hk.SoftmaxController):
    """A controller from outside whose state needs an entry of a type."""

    def base(self, state: dict[str, Any], index: int, scheduled: Any) -> Any:
        return super().base(state, index, scheduled) * (1 + state["velocity"][index])


def test_the_state_of_a_controller_from_outside_is_tried_first() -> None:
    def build() -> hk.HDETOneCycleLR:
        return single(auto_lr=Forgetful(warmup_steps=0))

    scheduler = build()
    before = copy.deepcopy(scheduler.state_dict())
    for velocity in ([], ["x"], [float("nan")], None):
        state = copy.deepcopy(before)
        state["hdet"][0]["spread"]["controller"]["velocity"] = velocity
        with pytest.raises(ValueError, match=r"hdet\.spread\.controller"):
            scheduler.load_state_dict(state)
        assert same(scheduler.state_dict(), before)


def test_other_formats_and_entries_of_newer_versions_are_refused_by_name() -> None:
    scheduler = single()
    before = copy.deepcopy(scheduler.state_dict())
    own = before["hdet"][0]
    for state, words in (
        ({**own, "format": 5, "version": "9.9", "mood": 1}, r"format 5 of hdet_kernels '9\.9', .* not know hdet\.mood"),
        ({**own, "format": 2}, "format 2 of hdet_kernels"),
        (
            {k: v for k, v in own.items() if k not in ("format", "version")},
            r"format 1 of hdet_kernels 'before 0\.2\.0'",
        ),
        ({k: v for k, v in own.items() if k != "format"}, r"no hdet\.format"),
        ({**own, "mood": 1}, r"does not know: hdet\.mood"),
    ):
        with pytest.raises(ValueError, match=words):
            scheduler.load_state_dict({**before, "hdet": (state,)})
        assert same(scheduler.state_dict(), before)


@pytest.mark.parametrize("slopes", [[], [[0.5]], [[1.0], [-3.0]], [[1.0], [4.0], [2.0]], [[2.0]] * 3], ids=str)
def test_sums_of_slopes_of_format_3_become_slopes_of_the_same_mean_and_error(slopes: list[list[float]]) -> None:
    def made() -> hk.HDETOneCycleLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        controller = hk.HypergradientController()
        return hk.HDETOneCycleLR(optimizer, 0.1, 20, sync_every=4, auto_lr=controller, cycle_momentum=False)

    (hdet,) = made().state_dict()["hdet"]
    values = [value for (value,) in slopes]
    sums = [[sum(values)], [sum(value * value for value in values)]] if values else None
    moved = {key: value for key, value in hdet["displacement"].items() if key != "slopes"}
    added = ("part", "averaged", "optimizer_state")
    old = {**{key: value for key, value in hdet.items() if key not in added}, "format": 3}
    old["displacement"] = {**moved, "sums": sums, "count": len(values)}
    scheduler = made()
    scheduler.load_state_dict({**scheduler.state_dict(), "hdet": old})
    found = [value for (value,) in scheduler.state_dict()["hdet"][0]["displacement"]["slopes"]]
    assert len(found) == len(values)
    if values:
        np.testing.assert_allclose([np.mean(found), np.std(found)], [np.mean(values), np.std(values)], atol=1e-12)


def test_what_is_read_turns_into_what_was_saved() -> None:
    scheduler = single()
    for _ in range(3):
        scheduler.optimizer.step()
        scheduler.step(1.0)
    state = scheduler.state_dict()
    assert same(to_plain(checked(scheduler.cycle, state)), state["hdet"][0])
