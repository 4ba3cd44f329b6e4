"""Resuming gives the uninterrupted run whatever the order of loading, and wherever in it the scheduler is built."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

import hdet_kernels as hk
from tests.ranks import Cases
from tests.training import batch, network, same, with_averaging

TOTAL, SYNC, AT = 12, 3, 7

#: The orders of four acts in which the scheduler is built before it is loaded.
ORDERS = [
    order
    for order in itertools.permutations(("build", "model", "optimizer", "scheduler"))
    if order.index("build") < order.index("scheduler")
]
#: Those that lost the masters, and one that did not.
QUICK = [
    ("build", "optimizer", "scheduler", "model"),
    ("optimizer", "build", "model", "scheduler"),
    ("optimizer", "build", "scheduler", "model"),
    ("build", "scheduler", "model", "optimizer"),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compress": {"compress": "int8"},
    "outer": {"outer": hk.Outer(lr=0.9)},
    "overlap": {"overlap_steps": 2},
    "stack": {},
    "cosine": {},
    "hypergradient": {"auto_lr": hk.HypergradientController(), "gradients": "shared"},
}


class Run:
    """A run of one rank with bfloat16 parameters and float32 masters."""

    def __init__(self, rank: int, kind: str, *, build: bool = True) -> None:
        self.rank, self.kind = rank, kind
        module = network().to(torch.bfloat16)
        self.model: Any = hk.ReplicaStack(module, 2, gradients="local") if kind == "stack" else module
        self.optimizer = hk.FusedAdamW(self.model.parameters(), lr=0.01)
        self.scheduler: Any = None
        if build:
            self.build()

    def build(self) -> None:
        options = {"sync_every": SYNC, "spread": 0.5, "auto_lr": hk.RegressionController(stop_at=1.0)}
        options |= OPTIONS[self.kind]
        if self.kind == "stack":
            options["ensemble"] = self.model.ensemble
        if self.kind == "cosine":
            base = lr_scheduler.CosineAnnealingLR(self.optimizer, TOTAL)
            self.scheduler = hk.HDETScheduler(base, **with_averaging(options))
        else:
            self.scheduler = hk.HDETOneCycleLR(self.optimizer, 0.02, TOTAL, **with_averaging(options))

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            x, y = (t.to(torch.bfloat16) for t in batch(self.rank, self.scheduler.last_epoch))
            self.optimizer.zero_grad()
            if self.kind == "stack":
                loss: Any = self.model.backward(lambda m, a, b: F.mse_loss(m(a), b), x, y)
            else:
                loss = F.mse_loss(self.model(x), y)
                loss.backward()
                if self.kind == "hypergradient":
                    for param in self.model.parameters():
                        torch.distributed.all_reduce(param.grad)
            self.optimizer.step()
            self.scheduler.step(loss.detach())
        return self

    def states(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def result(self) -> dict[str, Any]:
        found = self.states()
        for part in (found["scheduler"]["hdet"][0]["summary"], *found["scheduler"]["hdet"][0]["history"]):
            part["seconds"] = 0.0
        return found


def _orders(rank: int, kind: str, orders: Sequence[tuple[str, ...]]) -> dict[Any, bool]:
    whole = Run(rank, kind).train(AT)
    saved = whole.states()
    expected = whole.train(TOTAL - AT).result()
    masters = [state["master"] for state in expected["optimizer"]["state"].values()]
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters)
    found = {}
    for order in orders:
        run = Run(rank, kind, build=False)
        for act in order:
            if act == "build":
                run.build()
            else:
                getattr(run, act).load_state_dict(copy.deepcopy(saved[act]))
        found[order] = same(run.train(TOTAL - AT).result(), expected)
    return found


_CASES = Cases(2, _orders, {"quick": ("compress", QUICK)}, {kind: (kind, ORDERS) for kind in OPTIONS})


@pytest.mark.parametrize("case", _CASES.params())
def test_every_order_of_loading_gives_the_same_run(case: str) -> None:
    for found in _CASES[case]:
        assert [order for order, equal in found.items() if not equal] == []
