"""Syncs in one process: what they report, what the controller sees, and errors that change nothing."""

from __future__ import annotations

import math

import pytest
import torch

import hdet_kernels as hk
from tests.schedule.cases import Place, adam, advance, groups_of


def test_a_nan_loss_raises_at_the_sync_and_changes_nothing() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, sync_every=2)
    advance(optimizer, scheduler, 1.0)
    optimizer.step()
    params = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    before = groups_of(optimizer), scheduler.state_dict()
    with pytest.raises(RuntimeError, match=r"no replica is sound at step 2; not finite: the loss on rank 0"):
        scheduler.step(math.nan)
    assert (groups_of(optimizer), scheduler.state_dict()) == before
    for now, then in zip(optimizer.param_groups[0]["params"], params, strict=True):
        assert torch.equal(now, then)
    scheduler.step(1.0)
    assert scheduler.last_epoch == 2


def test_a_probe_that_raises_is_the_cause_of_the_error() -> None:
    optimizer = adam()
    controller = hk.RegressionController(start_at=0.01)
    scheduler = hk.HDETOneCycleLR(
        optimizer, 0.1, 40, sync_every=2, probe=lambda: 1 / 0, auto_lr=controller, ensemble=Place(4, 0)
    )
    advance(optimizer, scheduler)
    with pytest.raises(RuntimeError) as error:
        advance(optimizer, scheduler)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert scheduler.last_epoch == 1


def test_a_controller_that_acts_from_a_later_sync_on_has_slopes_then() -> None:
    """The hypergradient controller begins at 5 % of the run, four cycles of the default length."""
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 1e-4, 160, auto_lr=hk.HypergradientController())
    for _ in range(60):
        advance(optimizer, scheduler)
    displacement = scheduler.cycle.displacement
    assert displacement is not None
    assert displacement.ended, "nothing is measured after the last sync at which it acts"
    assert scheduler.cycle.spread.controller_state["updates"][0] > 10
