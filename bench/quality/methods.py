"""Configure HDET and its variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import numpy as np

import hdet_kernels as hk
from hdet_kernels.controller.protocol import Observation, Run, State
from hdet_kernels.controller.settings import RegressionSettings

from .peers import PEERS
from .results import Spec


@dataclass(frozen=True)
class Method:
    """A configuration of HDET: keywords of the scheduler, kind of gradients, and ν of the initial noise."""

    keywords: dict[str, Any] = field(default_factory=dict)
    gradients: Literal["shared", "local"] = "shared"
    noise: float = 0.0


@dataclass(frozen=True)
class ExploitController:
    """Controller of population-based training: the base becomes the value of the best replica."""

    start_at: float = 0.05
    stop_at: float = 0.3

    reads: ClassVar[Literal["losses"]] = "losses"

    def prepare(self, run: Run) -> Run:
        if run.total_steps is None:
            raise ValueError("ExploitController needs the length of the run: pass total_steps=")
        return run

    def active(self, run: Run, step: int) -> bool:
        total = run.total_steps or 0
        return self.start_at * total <= step <= self.stop_at * total

    def start(self, count: int, run: Run | None = None) -> State:
        return {"mu": [0.0] * count}

    def base(self, state: State, index: int, scheduled: Any) -> Any:
        return scheduled * math.exp(state["mu"][index])

    def update(self, run: Run, state: State, seen: Observation) -> State:
        if not np.isfinite(seen.losses).any():
            return state
        best = int(np.nanargmin(np.where(np.isfinite(seen.losses), seen.losses, np.nan)))
        return {"mu": (np.array(state["mu"]) + np.log(seen.multipliers[:, best])).tolist()}


def controller(options: Mapping[str, Any]) -> hk.RegressionController:
    """Return the default controller with other constants: arguments of it, or fields of its settings."""
    names = {field.name for field in fields(RegressionSettings)}
    settings = RegressionSettings(**{name: value for name, value in options.items() if name in names})
    return hk.RegressionController(
        **{name: value for name, value in options.items() if name not in names}, settings=settings
    )


def hdet_method(spec: Spec, steps: int) -> Method:
    """Return the configuration that ``spec.method`` names; ``spec.options`` are constants of its controller.

    Of the method "scout" they may be constants of the search too.
    """
    names = {field.name for field in fields(hk.ScoutSettings)}
    scouting = {name: value for name, value in spec.options.items() if name in names}
    others = {name: value for name, value in spec.options.items() if name not in names}
    paper = hk.paper_settings(steps)
    rarely = max(round(0.025 * steps), 1)  # replicas with local gradients need time to diverge, even with a probe
    methods: dict[str, Callable[[], Method]] = {
        "hdet": lambda: Method({"auto_lr": controller(spec.options)}),
        "scout": lambda: Method({"auto_lr": controller(others), "scout": hk.ScoutSettings(**scouting)}),
        "hypergradient": lambda: Method({"auto_lr": hk.HypergradientController(**spec.options)}),
        "fan-out": lambda: Method({"auto_lr": False}),
        "local SGD": lambda: Method({"auto_lr": False, "spread": 0.0}, gradients="local"),
        "DiLoCo": lambda: Method(
            {"auto_lr": False, "spread": 0.0, "averaging": hk.Averaging(outer=hk.Outer())}, gradients="local"
        ),
        "PBT": lambda: Method(
            {"auto_lr": ExploitController(), "averaging": hk.Averaging(merge="best"), "sync_every": rarely},
            gradients="local",
        ),
        "warm init": lambda: Method({"auto_lr": False, "spread": 0.0, "sync_every": paper["sync_every"]}, noise=0.01),
        "paper, no auto-LR": lambda: Method({**paper, "auto_lr": False}, noise=0.01),
        "paper, no warm init": lambda: Method(paper),
        "paper": lambda: Method(paper, noise=0.01),
        "hdet, warm init": lambda: Method({"auto_lr": hk.RegressionController()}, noise=0.01),
    }
    if spec.method not in methods:
        raise ValueError(f"method={spec.method!r} is not one of plain, {', '.join([*methods, *PEERS])}")
    return methods[spec.method]()
