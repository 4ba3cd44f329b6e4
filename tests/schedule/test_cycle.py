"""Steps and syncs of a cycle in one process: losses, the end of the run, and errors that change nothing."""

from __future__ import annotations

import gc
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import Adam

import hdet_kernels as hk
from hdet_kernels.converge import Correction, Outcome, OverlappedAverage
from hdet_kernels.fanout.spread import Placement
from hdet_kernels.schedule.cycle import Overlapping
from tests.schedule.cases import Place, adam, advance, groups_of, parameters
from tests.training import same


def test_the_last_step_averages_and_no_step_follows() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, sync_every=4)
    for _ in range(10):
        advance(optimizer, scheduler, 1.0)
    assert [(r.step, r.kind) for r in scheduler.history] == [(4, "sync"), (8, "sync"), (10, "last")]
    before = groups_of(optimizer), scheduler.last_epoch
    with pytest.raises(ValueError, match="step 11 is past the end: total_steps is 10"):
        scheduler.step(1.0)
    assert (groups_of(optimizer), scheduler.last_epoch) == before


def test_recorded_losses_are_averaged_over_the_cycle() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, sync_every=2)
    for losses in [
        (1.0, 2.0),
        (torch.tensor(3.0), torch.tensor([4.0], requires_grad=True)),
        (10.0,),
        (np.float32(20.0),),
    ]:
        for loss in losses:
            scheduler.record_loss(loss)
        advance(optimizer, scheduler)
    assert [r.losses for r in scheduler.history] == [[2.5], [15.0]]


def test_a_missing_loss_raises_and_changes_nothing() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10)
    before = groups_of(optimizer)
    with pytest.raises(RuntimeError, match=r"scheduler\.step\(loss\).*record_loss.*auto_lr=False"):
        advance(optimizer, scheduler)
    assert groups_of(optimizer) == before
    assert scheduler.last_epoch == 0
    scheduler.step(1.0)
    assert scheduler.last_epoch == 1


@pytest.mark.parametrize(
    "options", [{"auto_lr": False}, {"spread": 0}, {"probe": lambda: 1.0}, {"auto_lr": hk.HypergradientController()}],
    ids=["off", "no-spread", "probe", "hypergradient"],
)  # fmt: skip
def test_no_loss_is_needed_if_nothing_reads_it(options: dict[str, Any]) -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, **options)
    for _ in range(10):
        advance(optimizer, scheduler)
    assert scheduler.last_epoch == 10


def test_gradient_accumulation_and_gradscaler() -> None:
    """A skipped optimizer step is still a step of the schedule, as with torch's schedulers."""
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    param = optimizer.param_groups[0]["params"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(8):
            optimizer.zero_grad()
            for micro in range(3):
                loss = (param * (math.inf if step == 5 else 1.0)).sum()
                scaler.scale(loss / 3).backward()
                scheduler.record_loss(float(micro))
            before = param.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            assert torch.equal(param, before) == (step == 5)
    assert [(r.step, r.losses) for r in scheduler.history] == [(s, [1.0]) for s in (2, 4, 6, 8)]


def test_losses_stay_on_their_device_until_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between syncs no value of a tensor is read: .item(), .tolist(), bool() and float() would wait for a GPU."""
    optimizer = Adam(parameters(), lr=torch.tensor(0.1))
    without_early_syncs = hk.RegressionController(start_at=0.01)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 20, sync_every=10, auto_lr=without_early_syncs, ensemble=Place(4, 1))

    def forbidden(*_: Any) -> Any:
        raise AssertionError("a host sync between syncs")

    for _ in range(9):
        optimizer.step()
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
                patch.setattr(Tensor, name, forbidden)
            scheduler.step(torch.tensor(1.0))
    assert scheduler.cycle.window.count == 9


def test_schedule_and_cycle_stay_in_step_if_a_setter_raises() -> None:
    calls: list[float] = []

    def setter(value: float) -> None:
        calls.append(value)
        if len(calls) == 2:
            raise OSError("disk full")

    optimizer = adam()
    explore = [hk.Explore("x", base=1.0, apply=setter)]
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, sync_every=3, auto_lr=False, explore=explore)
    for step in range(1, 7):
        if step == 3:
            with pytest.raises(OSError, match="disk full"):
                advance(optimizer, scheduler)
        else:
            advance(optimizer, scheduler)
        assert (scheduler.last_epoch, scheduler.cycle.step) == (step, step)
    assert [r.step for r in scheduler.history] == [3, 6]


def test_a_deleted_scheduler_leaves_the_optimizer_alone() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10)
    state = optimizer.state_dict()
    del scheduler
    gc.collect()
    state["param_groups"][0]["lr"] = 0.77
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.77


def test_the_first_step_of_the_optimizer_starts_the_cycle() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, auto_lr=False)
    assert not scheduler.cycle.started
    optimizer.step()
    assert scheduler.cycle.started


def test_best_of_replicas_needs_losses() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 10, auto_lr=False, averaging=hk.Averaging(merge="best"))
    with pytest.raises(RuntimeError, match=r"merge='best' .* none was recorded: .*scheduler.step\(loss\).*probe="):
        advance(optimizer, scheduler)


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


CORRECTION = Correction(
    sound=(True,),
    heal=False,
    has_state=False,
    params=[torch.tensor([3.0, -1.0])],
    buffers=[],
    buffers_before=[],
    state={},
    state_before={},
    integers=[],
    counts=None,
)
OUTCOME = Outcome(
    losses=np.array([1.5, np.nan]),
    probes=np.array([0.5, 0.25]),
    healthy=np.array([True, False]),
    shared=None,
    bytes=400,
    collectives=2,
    seconds=0.125,
    distance=0.25,
)


def finished() -> tuple[Correction, Outcome]:
    return CORRECTION, OUTCOME


def failed() -> tuple[Correction, Outcome]:
    raise RuntimeError("a peer died")


def under_way(average: OverlappedAverage[Outcome]) -> Overlapping:
    base = np.array([0.1, 0.2])
    placed = Placement(base, base[:, None] * [[0.7, 1.3], [1.0, 1.0]], np.array([[0.7, 1.3], [1.0, 1.0]]))
    return Overlapping(12, 15, placed, True, average)


def test_it_is_saved_with_its_result_as_plain_values() -> None:
    state = under_way(OverlappedAverage(finished, None)).state_dict(in_consensus=False)
    assert state is not None
    assert (state["step"], state["due"], state["acting"]) == (12, 15, True)
    assert same(state["correction"], CORRECTION.state_dict())
    assert state["placed"]["values"] == [pytest.approx([0.07, 0.13]), [0.2, 0.2]]
    expected = {"shared": None, "bytes": 400, "collectives": 2, "seconds": 0.125, "kept": None, "distance": 0.25}
    expected |= {"losses": [1.5, float("nan")], "probes": [0.5, 0.25], "healthy": [True, False]}
    assert same(state["outcome"], expected)


def test_parameters_that_are_the_average_already_need_no_correction() -> None:
    state = under_way(OverlappedAverage(finished, None)).state_dict(in_consensus=True)
    assert state is not None
    assert state["correction"]["params"][0].tolist() == [0.0, 0.0]


def test_a_failed_average_is_not_saved() -> None:
    assert under_way(OverlappedAverage(failed, None)).state_dict(in_consensus=False) is None


def test_it_is_restored_as_it_was() -> None:
    state = under_way(OverlappedAverage(finished, None)).state_dict(in_consensus=False)
    assert state is not None
    again = Overlapping.of(state)
    assert same(again.state_dict(in_consensus=False), state)
    assert again.average.wait()[1].healthy.dtype == bool
    assert again.placed.applied.shape == (2, 2)
