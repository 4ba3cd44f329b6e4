"""Configure the compared methods: HDET and its variants, and optimizers that need no learning rate."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from torch.optim import Optimizer

import hdet_kernels as hk
from hdet_kernels.controller.protocol import Observation, Run, State

from .spec import Spec


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


def hdet_method(spec: Spec, steps: int) -> Method:
    """Return the configuration that ``spec.method`` names; ``spec.options`` are constants of its controller."""
    paper = hk.paper_settings(steps)
    rarely = max(round(0.025 * steps), 1)  # replicas with local gradients need time to diverge, even with a probe
    methods: dict[str, Callable[[], Method]] = {
        "hdet": lambda: Method({"auto_lr": hk.RegressionController(**spec.options)}),
        "hypergradient": lambda: Method({"auto_lr": hk.HypergradientController(**spec.options)}),
        "fan-out": lambda: Method({"auto_lr": False}),
        "local SGD": lambda: Method({"auto_lr": False, "spread": 0.0}, gradients="local"),
        "DiLoCo": lambda: Method({"auto_lr": False, "spread": 0.0, "outer": hk.Outer()}, gradients="local"),
        "PBT": lambda: Method(
            {"auto_lr": ExploitController(), "merge": "best", "sync_every": rarely}, gradients="local"
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


@dataclass(frozen=True)
class Peer:
    """An optimizer from another package, with the schedule that its authors recommend."""

    package: str
    schedule: str
    build: Callable[[list[dict[str, Any]], float, int], Optimizer]
    finish: Callable[[Optimizer], object] = lambda optimizer: None

    def missing(self) -> str | None:
        """Return the command that installs it, or None if it is installed."""
        return None if importlib.util.find_spec(self.package.split()[0]) else f"pip install {self.package.split()[-1]}"


def _schedule_free(groups: list[dict[str, Any]], lr: float, steps: int) -> Optimizer:
    optimizer = importlib.import_module("schedulefree").AdamWScheduleFree(
        groups, lr=lr, warmup_steps=round(0.05 * steps), weight_decay=0.01
    )
    optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def _at_one(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Set lr to 1: D-Adaptation and Prodigy find the scale themselves and multiply it by lr."""
    return [{**group, "lr": 1.0} for group in groups]


def _prodigy(groups: list[dict[str, Any]], lr: float, steps: int) -> Optimizer:
    made: Optimizer = importlib.import_module("prodigyopt").Prodigy(
        _at_one(groups), lr=1.0, weight_decay=0.01, safeguard_warmup=True, use_bias_correction=True
    )
    return made


def _d_adaptation(groups: list[dict[str, Any]], lr: float, steps: int) -> Optimizer:
    made: Optimizer = importlib.import_module("dadaptation").DAdaptAdam(
        _at_one(groups), lr=1.0, weight_decay=0.01, decouple=True
    )
    return made


PEERS: dict[str, Peer] = {
    "Schedule-Free AdamW": Peer(
        "schedulefree",
        "none",
        _schedule_free,
        lambda optimizer: optimizer.eval(),  # type: ignore[attr-defined]
    ),
    "Prodigy": Peer("prodigyopt", "cosine", _prodigy),
    "D-Adaptation": Peer("dadaptation", "cosine", _d_adaptation),
}
