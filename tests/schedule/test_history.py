"""The records of syncs."""

from __future__ import annotations

import json

import hdet_kernels as hk
from hdet_kernels.schedule.history import SyncRecord
from tests.schedule.cases import Place, adam, advance
from tests.training import same


def test_a_record_has_losses_values_and_costs() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=4, auto_lr=False)
    rates = []
    for step in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        advance(optimizer, scheduler, float(step))
    (record,) = scheduler.history
    assert (record.step, record.cycle, record.losses, record.excluded) == (4, 0, [1.5], [])
    assert record.base == {"lr/0": rates[-1]}
    assert record.values == {"lr/0": [rates[-1]]}
    assert (record.bytes, record.collectives) == (0, 0)


def test_a_record_becomes_plain_values_and_back() -> None:
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(
        optimizer, 0.1, 8, sync_every=4, auto_lr=False, explore=[hk.Explore("eps")], ensemble=Place(3, 1)
    )
    for step in range(8):
        advance(optimizer, scheduler, float(step))
    scheduler.converge()
    assert [(record.step, record.kind, record.landed) for record in scheduler.history] == [
        (4, "sync", 4),
        (8, "sync", 8),
        (8, "manual", 8),
    ]
    for record in scheduler.history:
        plain = json.loads(json.dumps(record.to_dict()))
        assert same(SyncRecord(**plain).to_dict(), record.to_dict())
        assert plain["gradients"] == "shared"
        assert (plain["taken"], plain["excluded"]) == (None, [])
        assert [len(values) for values in plain["values"].values()] == [3, 3]
