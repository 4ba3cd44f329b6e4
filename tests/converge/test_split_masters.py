"""Averages of split masters: in float32, as those of float32 copies, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hdet_kernels as hk
from hdet_kernels.split_master import split
from tests.ranks import run_ranks
from tests.training import same

BF16 = torch.bfloat16

#: Options of the scheduler, and the rows of a stack (0: none).
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 0),
    "in buckets": ({"bucket_bytes": 64}, 0),
    "overlapped": ({"overlap_steps": 1}, 0),
    "compressed": ({"compress": "int8"}, 0),
    "outer": ({"outer": hk.Outer()}, 0),
    "stacks": ({}, 2),
}


class Run:
    """A model on gradients that do not depend on it, so that a parameter rounded otherwise changes nothing else."""

    def __init__(self, rank: int, way: str, master_weights: Any) -> None:
        options, self.rows = WAYS[way]
        torch.manual_seed(0)
        self.model: Any = torch.nn.Linear(37, 5).to(BF16)
        if self.rows:
            self.model = hk.ReplicaStack(self.model, self.rows, gradients="local")
            options = {**options, "ensemble": self.model.ensemble}
        else:
            options = {**options, "gradients": "local"}
        self.rank = rank
        self.optimizer = hk.FusedAdamW(self.model.parameters(), lr=1e-3, master_weights=master_weights)
        base = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)
        self.scheduler = hk.HDETScheduler(base, total_steps=12, sync_every=3, auto_lr=False, spread=0.5, **options)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(10 * self.scheduler.last_epoch + self.rank)
            for param in self.model.parameters():
                param.grad = torch.randn(param.shape, generator=generator).to(BF16)
            self.optimizer.step()
            self.scheduler.step(torch.ones(self.rows) if self.rows else 1.0)

    def numbers(self) -> tuple[Tensor, Tensor]:
        """The parameters in full, and as they are."""
        (full,), (flat,) = self.optimizer.buckets.full, self.optimizer.buckets.flats
        return full.clone(), flat.clone()


def _averaged(rank: int, ways: list[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for way in ways:
        found[way] = []
        for kind in (True, "split"):
            run = Run(rank, way, kind)
            run.train(2)
            before = run.numbers()
            with run.scheduler.consensus():
                inside = run.numbers()
            after = run.numbers()
            run.train(8)
            found[way].append({"before": before, "inside": inside, "after": after, "end": run.numbers()})
    return found


def check_averages(ways: list[str]) -> None:
    ranks = run_ranks(2, _averaged, ways)
    for way in ways:
        for found in ranks:
            copies, ours = found[way]
            for when in ("before", "inside", "end"):
                assert same(ours[when][0], copies[when][0]), f"{way}, {when}"
                assert same(ours[when][1], split(copies[when][0])[0]), f"{way}, {when}"
            assert same(ours["after"], ours["before"]), f"{way}: every digit of this replica comes back"
        first, second = (found[way][1] for found in ranks)
        assert not same(first["before"][0], second["before"][0])
        assert same(first["inside"], second["inside"])
        if way == "plain":
            mean = (first["before"][0] + second["before"][0]) / 2
            assert (first["inside"][0] - mean).abs().max() <= 2.0**-24 * mean.abs().max(), "not a mean of roundings"


def test_split_masters_are_averaged_like_copies() -> None:
    check_averages(["plain", "overlapped", "stacks"])


@pytest.mark.full
def test_split_masters_are_averaged_like_copies_in_every_way() -> None:
    check_averages([way for way in WAYS if way not in ("plain", "overlapped", "stacks")])
