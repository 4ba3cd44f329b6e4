"""The kinds of training that faults are injected into, each with a tiny model and a run of 12 steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import hdet_kernels as hk

WIDTH, TOTAL, SYNC = 4, 12, 4


class Net(nn.Module):
    """Two layers of one shape with BatchNorm between them, and a third."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.middle(torch.tanh(self.norm(self.inner(x))))))
        return out


def network() -> Net:
    """Return the same network in every process."""
    torch.manual_seed(0)
    return Net()


def batch(replica: int, step: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """Return the batch of a replica at a step: a function of both, so that a resumed run sees the same data."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    x = torch.randn(size, WIDTH, generator=generator)
    return x, (x.sum(dim=1, keepdim=True) / 2).sin()


@dataclass(frozen=True)
class Configuration:
    """One kind of training.

    Attributes:
        name: as it is printed.
        ranks: number of processes.
        optimizer: builds the optimizer.
        traits: what faults ask for: ``"shared"`` or ``"local"`` gradients, ``"probe"``, ``"setter"``, ``"ours"`` or
            ``"torch"`` (the optimizer), and special ones such as ``"stack"``, ``"sharded"``, ``"masters"``, and
            ``"early"``: steps in the backward pass, after which there are no gradients, and which cannot be repeated.
        options: of the scheduler.
        rows: replicas in a process.
        shards: processes that hold a replica together.
    """

    name: str
    ranks: int
    optimizer: Callable[..., Any]
    traits: frozenset[str]
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 1
    shards: int = 1

    @property
    def replicas(self) -> int:
        return self.ranks * self.rows // self.shards

    def replica_of(self, rank: int) -> int:
        """Return the number of the first replica that a rank holds, alone or with others."""
        return rank // self.shards * self.rows


#: A controller that acts at every sync, and undoes nothing: what cannot be averaged is refused. Small buckets, so that
#: every sync has several collectives.
SETTINGS: dict[str, Any] = {
    "max_lr": 0.02,
    "total_steps": TOTAL,
    "sync_every": SYNC,
    "spread": 0.5,
    "bucket_bytes": 256,
    "auto_lr": hk.RegressionController(start_at=0.0, stop_at=1.0, undo=0),
}


def _one(name: str, optimizer: Callable[..., Any], traits: str, **options: Any) -> Configuration:
    special = {"stacks": {"ranks": 2, "rows": 2}, "hsdp": {"ranks": 4, "shards": 2}, "two hosts": {"ranks": 4}}
    # Sums of two are the same in any order. DDP deals its buckets anew after its first step, also when it is resumed.
    special["ddp, in backward"] = {"ranks": 2}
    shape = {"ranks": 3, **special.get(name, {})}
    return Configuration(name, optimizer=optimizer, traits=frozenset(traits.split()), options=options, **shape)


_ALL = (
    _one("ddp", torch.optim.AdamW, "shared probe setter torch"),
    _one("ddp, ours", hk.FusedAdamW, "shared ours", bucket_bytes=None),
    _one("local", hk.FusedAdamW, "local plain probe setter ours", gradients="local"),
    _one("local, torch", torch.optim.AdamW, "local plain probe setter torch"),
    _one("local, in backward", hk.FusedAdamW, "local plain probe setter ours early", gradients="local"),
    _one("ddp, in backward", hk.FusedAdamW, "shared ours early"),
    _one("stacks", hk.FusedAdamW, "shared stack probe setter ours"),
    _one("hsdp", torch.optim.AdamW, "shared sharded torch"),
    _one("compress", hk.FusedAdamW, "local compress probe ours", gradients="local", compress="int8"),
    _one("overlap", hk.FusedAdamW, "local overlap probe setter ours", gradients="local", overlap_steps=2),
    _one("two hosts", hk.FusedAdamW, "local hosts ours", gradients="local"),
    _one("outer", torch.optim.AdamW, "local outer setter torch", gradients="local", outer=hk.Outer()),
    _one("masters", hk.FusedAdamW, "local masters probe setter ours", gradients="local"),
    _one(
        "masters, compress, outer",
        hk.FusedAdamW,
        "local masters compress outer ours",
        gradients="local",
        compress="bf16",
        outer=hk.Outer(lr=0.9, momentum=0.5),
    ),
)
CONFIGURATIONS: dict[str, Configuration] = {each.name: each for each in _ALL}
