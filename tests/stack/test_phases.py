"""Phases of a run with a stack: the end of fan-out, and scalars explored after the learning rate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import hdet_kernels as hk
from tests.stack.trainer import DECAY, SHORT, StackTrainer, data, departures, probed_trainer, two_groups
from tests.training import loss_of


@pytest.mark.parametrize(
    "options",
    [
        {"probe": None},
        {"auto_lr": True},
        {"auto_lr": False},
        {"spread": 0.0},
        {"auto_lr": hk.HypergradientController()},
        {"auto_lr": hk.SoftmaxController(warmup_steps=20)},
    ],
    ids=["no probe", "probe", "no controller", "no spread", "hypergradient", "softmax"],
)
def test_no_controller_of_ours_has_early_syncs(options: dict[str, Any]) -> None:
    make = StackTrainer if "probe" in options else probed_trainer
    trainer = make(**{"total_steps": 80, "sync_every": 8, **options}).train(10)
    assert [record.step for record in trainer.scheduler.history] == [8]


def test_with_a_probe_a_replica_departs_in_at_most_one_group_and_two_in_none() -> None:
    """Those two stay equal bit for bit, from which the controller concludes that losses have no noise."""
    trainer = probed_trainer(replicas=8, make_optimizer=two_groups, tie_groups=False)
    for _ in range(20):
        departing = departures(trainer)
        assert departing.sum(axis=0).tolist().count(0) == 2
        assert departing.sum() == 6
        assert set(departing.sum(axis=1).tolist()) == {2, 4}
        trainer.train(1)
    for record in trainer.scheduler.history:
        values = np.array([record.values["lr/0"], record.values["lr/1"]])
        equal = np.flatnonzero((values == np.median(values, axis=1, keepdims=True)).all(axis=0))
        assert record.probes is not None
        assert len({record.probes[replica] for replica in equal}) == 1
    squares, spare = trainer.scheduler.cycle.spread.controller_state["noise"]
    assert squares == 0
    assert spare > 0


@pytest.mark.parametrize(
    "options",
    [{"probe": None}, {"gradients": "local"}, {"auto_lr": hk.SoftmaxController(warmup_steps=40)}, {"auto_lr": False}],
    ids=["no probe", "local gradients", "softmax", "no controller"],
)
def test_otherwise_all_replicas_depart_in_all_groups(options: dict[str, Any]) -> None:
    make = StackTrainer if "probe" in options else probed_trainer
    long: dict[str, Any] = {"total_steps": 160, "sync_every": 16, "tie_groups": False}
    trainer = make(**{"replicas": 8, "make_optimizer": two_groups, **long, **options})
    assert departures(trainer).all()


@pytest.mark.parametrize(
    "options",
    [{}, {"gradients": "local"}, pytest.param({"probe": None}, marks=pytest.mark.full)],
    ids=["probe", "local", "no probe"],
)
def test_replicas_depart_until_the_controller_stops(options: dict[str, Any]) -> None:
    """At 30 % of 40 steps there is a sync; from then on all replicas have the base values."""
    make = StackTrainer if "probe" in options else probed_trainer
    trainer = make(**{"replicas": 8, **SHORT, **options})
    for step in range(25):
        assert departures(trainer).any() == (step < 12)
        trainer.train(1)


@pytest.mark.parametrize(
    "options",
    [
        {"auto_lr": False},
        {"auto_lr": hk.SoftmaxController(warmup_steps=5)},
        {"auto_lr": hk.RegressionController(stop_at=1.0)},
        {"sync_every": 12},
    ],
    ids=["no controller", "softmax", "to the end", "never acts"],
)
def test_replicas_depart_to_the_end_unless_a_controller_stops(options: dict[str, Any]) -> None:
    trainer = StackTrainer(**{"total_steps": 20, "sync_every": 2, **options}).train(19)
    assert departures(trainer).any()


def test_replicas_stay_equal_after_the_controller_stops() -> None:
    """Bit for bit. Syncs go on, for buffers and for replicas that become non-finite."""
    trainer = probed_trainer(replicas=8, **SHORT).train(15)
    assert (trainer.parameters() == trainer.parameters()[0]).all()
    before = len(trainer.scheduler.history)
    trainer.train(10)
    assert (trainer.parameters() == trainer.parameters()[0]).all()
    assert [record.step for record in trainer.scheduler.history[before:]] == [16, 20, 24]
    assert all(len(set(record.values["lr/0"])) == 1 for record in trainer.scheduler.history[before:])


def decays(trainer: StackTrainer) -> list[bool]:
    """Return which replicas have another weight decay than the base one."""
    return [value != trainer.scheduler.cycle.spread.base(1) for value in trainer.scheduler.cycle.spread.values(1)]


@pytest.mark.parametrize(("gradients", "several"), [("shared", 6), ("local", 8)])
def test_other_scalars_are_explored_after_the_learning_rate(gradients: Any, several: int) -> None:
    """Learning rates are explored up to the sync at 30 % of 40 steps, weight decay up to that at 90 %.

    In the cycle that ends at 30 % both are explored. In pairs, one replica of four departs in nothing.
    """
    trainer = probed_trainer(**DECAY, gradients=gradients)
    for step in range(40):
        if step < 8 or step >= 12:
            assert departures(trainer).sum() == (several if step < 12 else 0)
            assert sum(decays(trainer)) == (several if 12 <= step < 36 else 0)
        else:
            assert departures(trainer).any()
            assert any(decays(trainer))
        trainer.train(1)
    history = trainer.scheduler.history
    assert {record.base["weight_decay/0"] for record in history if record.step <= 12} == {0.1}
    if gradients == "shared":
        assert history[-1].base["weight_decay/0"] != 0.1


@pytest.mark.parametrize("gradients", ["shared", pytest.param("local", marks=pytest.mark.full)])
def test_a_replica_that_becomes_non_finite_while_only_weight_decay_is_explored(gradients: Any) -> None:
    """It is excluded and replaced by the mean. The learning rate stays; weight decay follows the finite replicas."""
    trainer = probed_trainer(**DECAY, gradients=gradients).train(19)
    losses = trainer.stack.backward(loss_of, *data(19, 8))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    with torch.no_grad():
        next(trainer.stack.parameters())[2] = math.nan
    before = trainer.scheduler.cycle.spread.controller_state["mu"]
    trainer.scheduler.step(losses)
    now, after = trainer.scheduler.history[-1], trainer.scheduler.cycle.spread.controller_state["mu"]
    assert (now.step, now.excluded) == (20, [2])
    assert len(set(now.values["lr/0"])) == 1
    assert after[0] == before[0]
    assert math.isfinite(after[1])
    trainer.train(20)
    assert [record.excluded for record in trainer.scheduler.history if record.step > 20] == [[]] * 5
    assert trainer.parameters().isfinite().all()
    assert 0 < trainer.scheduler.history[-1].base["weight_decay/0"] < math.inf
