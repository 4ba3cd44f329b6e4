"""A rank that was built otherwise: other settings, another model, another order, names or dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hdet_kernels as hk
from tests.chaos.configurations import WIDTH, Net
from tests.chaos.faults import Fault, Scene, traits

SETTINGS = r"disagree on .*{who}"
LAYOUT = r"disagree on .*{who}"


def setting(**options: Any) -> Callable[[Scene], None]:
    """Build the scheduler with another option."""

    def act(scene: Scene) -> None:
        scene.build["options"] = options

    return act


def model(change: Callable[[Net], nn.Module]) -> Callable[[Scene], None]:
    """Build everything on a changed network."""

    def act(scene: Scene) -> None:
        scene.build["change"] = change

    return act


def params(choose: Callable[[Any], Any]) -> Callable[[Scene], None]:
    """Give the optimizer the parameters in another way."""

    def act(scene: Scene) -> None:
        scene.build["params"] = choose

    return act


def optimizer(make: Callable[..., Any]) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        scene.build["optimizer"] = make

    return act


def rows(scene: Scene) -> None:
    scene.build["rows"] = scene.configuration.rows + 1


def wider(net: Net) -> nn.Module:
    net.middle = nn.Linear(WIDTH, WIDTH + 1)
    net.outer = nn.Linear(WIDTH + 1, 1)
    return net


def deeper(net: Net) -> nn.Module:
    net.outer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))  # type: ignore[assignment]
    return net


def with_buffer(net: Net) -> nn.Module:
    net.register_buffer("more", torch.zeros(3))
    return net


def without_tracking(net: Net) -> nn.Module:
    net.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)
    return net


def frozen(net: Net) -> nn.Module:
    net.outer.bias.requires_grad_(False)
    return net


def transposed(net: Net) -> nn.Module:
    """Keep the shape of a weight, but in another order in memory."""
    net.inner.weight = nn.Parameter(net.inner.weight.detach().t().contiguous().t())
    return net


def tied(net: Net) -> nn.Module:
    net.middle.weight = net.inner.weight
    return net


def renamed(net: Net) -> nn.Module:
    """Build the same layers under another name."""

    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.middle, self.outer = net.inner, net.norm, net.middle, net.outer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.outer(torch.tanh(self.middle(torch.tanh(self.norm(self.first(x))))))
            return out

    return Renamed()


def swapped(module: Any) -> list[Any]:
    """Return the named parameters with two layers of one shape in the other order."""
    found = dict(module.named_parameters())
    names = [*found]
    inner, middle = (names.index(f"{layer}.weight") for layer in ("inner", "middle"))
    names[inner], names[middle] = names[middle], names[inner]
    return [(name, found[name]) for name in names]


def named(module: Any) -> list[Any]:
    return list(module.named_parameters())


def two_groups(module: Any) -> list[Any]:
    found = list(module.parameters())
    return [{"params": found[:2]}, {"params": found[2:]}]


def some(module: Any) -> list[Any]:
    return list(module.parameters())[:-1]


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

MODELS: dict[str, tuple[Callable[[Scene], None], str]] = {
    "a wider layer": (model(wider), ""),
    "one more layer": (model(deeper), ""),
    "one more buffer": (model(with_buffer), ""),
    "no statistics of BatchNorm": (model(without_tracking), ""),
    "a frozen parameter": (model(frozen), "ours"),  # which have state for all parameters
    "another order in memory": (model(transposed), "stack"),
    "tied layers": (model(tied), ""),
    "other names": (model(renamed), ""),
    "a parameter left out": (params(some), ""),
    "two parameter groups": (params(two_groups), ""),
    "another order of equal shapes": (params(swapped), ""),
    "double precision": (model(lambda net: net.double()), "masters"),
    "another optimizer": (optimizer(hk.FusedSGD), "torch"),
}

FAULTS = [
    *(
        Fault(
            f"another setting: {name}", "refused", "build", setting(**options), message=SETTINGS,
            needs=traits(needs), without=traits(without), waits=False,
        )
        for name, (options, needs, without) in OPTIONS.items()
    ),
    *(
        Fault(
            f"another model: {name}", "refused", "build", act, message=LAYOUT, needs=traits("local"),
            without=traits(without),
        )
        for name, (act, without) in MODELS.items()
    ),
    Fault("another number of rows", "refused", "build", rows, message=SETTINGS, needs=traits("stack")),
    Fault("without a backup", "unharmed", "build", setting(backup=False)),
]  # fmt: skip
