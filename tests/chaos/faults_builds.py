"""A rank that was built otherwise: other settings, another model, another order, names or dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hdet_kernels as hk
from tests.chaos.configurations import WIDTH, Net
from tests.chaos.faults import Fault, Scene

DISAGREE = r"disagree on .*{who}"


def built(**changes: Any) -> Callable[[Scene], None]:
    """Build the victim with other arguments of :class:`.replica.Replica`."""
    return lambda scene: scene.build.update(changes)


def edited(edit: Callable[[Net], Any]) -> Callable[[Scene], None]:
    """Build everything on a network that was edited first."""

    def change(net: Net) -> nn.Module:
        edit(net)
        return net

    return built(change=change)


def wider(net: Net) -> None:
    net.middle, net.outer = nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, 1)


def deeper(net: Net) -> None:
    net.outer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))  # type: ignore[assignment]


def untracked(net: Net) -> None:
    net.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)


def transposed(net: Net) -> None:
    """Keep the shape of a weight, but in another order in memory."""
    net.inner.weight = nn.Parameter(net.inner.weight.detach().t().contiguous().t())


class Renamed(nn.Module):
    """The same layers under another name."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.first, self.norm, self.middle, self.outer = net.inner, net.norm, net.middle, net.outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(torch.tanh(self.middle(torch.tanh(self.norm(self.first(x))))))
        return out


def swapped(module: Any) -> list[Any]:
    """Return the named parameters with two layers of one shape in the other order."""
    other = {"inner.weight": "middle.weight", "middle.weight": "inner.weight"}
    found = dict(module.named_parameters())
    return [(other.get(name, name), found[other.get(name, name)]) for name in found]


def two_groups(module: Any) -> list[Any]:
    found = list(module.parameters())
    return [{"params": found[:2]}, {"params": found[2:]}]


class OtherController(hk.SoftmaxController):
    """A controller of another class."""


#: Options that must be the same on all ranks. Those that move the syncs themselves, or the collectives between them,
#: are not tried where every step has a collective of the gradients.
OPTIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "max_lr": ({"max_lr": 0.03}, "", ""),
    "total_steps": ({"total_steps": 16}, "", ""),
    "sync_every": ({"sync_every": 3}, "", "shared overlap"),
    "spread": ({"spread": 0.25}, "", ""),
    "seed": ({"seed": 5}, "", ""),
    "pct_start": ({"pct_start": 0.5}, "", "shared"),
    "gradients": ({"gradients": "shared"}, "", "stack"),
    "average_state": ({"average_state": False}, "", ""),
    "average_buffers": ({"average_buffers": False}, "", "stack"),
    "bucket_bytes": ({"bucket_bytes": 128}, "", ""),
    "compress": ({"compress": "bf16"}, "", "compress"),
    "no compress": ({"compress": None}, "compress", ""),
    "overlap_steps": ({"overlap_steps": 1}, "", "outer"),
    "outer": ({"outer": hk.Outer(lr=0.5)}, "", "overlap"),
    "merge": ({"merge": "best"}, "probe", "overlap compress outer"),
    "controller": ({"auto_lr": OtherController()}, "", "probe"),
    "constants of the controller": ({"auto_lr": hk.RegressionController(start_at=0.0, stop_at=0.9)}, "", ""),
    "no controller": ({"auto_lr": False}, "", "probe"),
    "no probe": ({"probe": None}, "probe", "shared"),
    "no explored scalar": ({"explore": ()}, "setter", ""),
}

#: Networks, parameters and optimizers that must be the same on all ranks, and the configurations that they do not fit.
MODELS: dict[str, tuple[Callable[[Scene], None], str]] = {
    "a wider layer": (edited(wider), ""),
    "one more layer": (edited(deeper), ""),
    "one more buffer": (edited(lambda net: net.register_buffer("more", torch.zeros(3))), ""),
    "no statistics of BatchNorm": (edited(untracked), ""),
    "a frozen parameter": (
        edited(lambda net: net.outer.bias.requires_grad_(False)),
        "ours",
    ),  # which have state for all
    "another order in memory": (edited(transposed), "stack"),
    "tied layers": (edited(lambda net: setattr(net.middle, "weight", net.inner.weight)), ""),
    "other names": (built(change=Renamed), ""),
    "a parameter left out": (built(params=lambda module: list(module.parameters())[:-1]), ""),
    "two parameter groups": (built(params=two_groups), ""),
    "another order of equal shapes": (built(params=swapped), ""),
    "double precision": (edited(lambda net: net.double()), "masters"),
    "another optimizer": (built(optimizer=hk.FusedSGD), "torch"),
}

FAULTS = [
    *(
        Fault(f"another setting: {name}", "refused", "build", built(options=options), message=DISAGREE, needs=needs,
              without=without)
        for name, (options, needs, without) in OPTIONS.items()
    ),
    *(
        Fault(f"another model: {name}", "refused", "build", act, message=DISAGREE, needs="local", without=without)
        for name, (act, without) in MODELS.items()
    ),
    Fault("another number of rows", "refused", "build", built(rows=3), message=DISAGREE, needs="stack"),
    Fault("without a backup", "unharmed", "build", built(options={"backup": False})),
]  # fmt: skip
