"""The frontends of docs/frontend.md train bit for bit as HDETOneCycleLR does, and use public names only."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet_kernels as hk
from tests.frontend.pages_code import block_of, frontends
from tests.ranks import Cases
from tests.schedule.undo_runs import Scripted
from tests.training import batch, loss_of, network, same

TOTAL, SYNC, PEAK_LR = 24, 4, 0.05


@dataclass(frozen=True)
class EarlyPairs(hk.RegressionController):
    """The default controller with more wishes: two early syncs, and pairs without a probe too."""

    def prepare(self, run: hk.Run) -> hk.Run:
        return replace(super().prepare(run), early=(1, 3), in_pairs=True)


CONTROLLERS: dict[str, Callable[[], Any]] = {
    "early pairs": lambda: EarlyPairs(trust=None, stop_at=0.8),
    "default": hk.RegressionController,
    "softmax": lambda: hk.SoftmaxController(warmup_steps=6, scale=0.01),
    "hypergradient": lambda: hk.HypergradientController(stop_at=0.9),
    "undo": lambda: Scripted(((4, "sound"), (12, "broken"), (16, "sound")), last=TOTAL),
}


class Replicas:
    """A model and its optimizer on this process: a rank of DDP, a rank with local gradients, or a stack."""

    def __init__(self, kind: str, rank: int = 0) -> None:
        self.kind, self.rank = kind, rank
        self.model: Any = network()
        self.ensemble: hk.Ensemble
        if kind.startswith("stack"):
            self.model = hk.ReplicaStack(self.model, 4, gradients="local" if kind.endswith("local") else "shared")
            self.ensemble = self.model.ensemble
            self.optimizer: Any = hk.FusedAdamW(self.model.parameters())
        else:
            self.model = DistributedDataParallel(self.model) if kind.endswith("shared") else self.model
            self.ensemble = hk.ProcessEnsemble()
            self.optimizer = torch.optim.AdamW(self.model.parameters())

    def probe(self) -> Tensor:
        x, y = batch(99, 99)
        if isinstance(self.model, hk.ReplicaStack):
            return self.model.losses(loss_of, x, y, same_batch=True)
        return loss_of(self.model, x, y)

    def train(self, step_scheduler: Callable[[Any], None], spread: hk.Spread, bad_at: int | None) -> list[Any]:
        """Train, and return parameters, moments, learning rates and base values after every step."""
        seen = []
        for step in range(TOTAL):
            self.optimizer.zero_grad()
            x, y = batch(self.rank, step)
            if isinstance(self.model, hk.ReplicaStack):
                loss = self.model.backward(loss_of, x, y)
            else:
                loss = loss_of(self.model, x, y)
                loss.backward()
            self.optimizer.step()
            if step == bad_at:
                with torch.no_grad():
                    next(iter(self.model.parameters())).fill_(torch.nan)
            step_scheduler(loss.detach())
            moments = [self.optimizer.state[p]["exp_avg"].nan_to_num(nan=77.0) for p in self.model.parameters()]
            values = [p.detach().nan_to_num(nan=77.0) for p in self.model.parameters()]
            groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
            rates = spread.base_rates(), list(spread.scheduled), spread.placement().values.tolist()
            seen.append((values, moments, groups, *rates))
        return seen


def trained(kind: str, controller: str, probed: bool, bad_at: int | None, rank: int = 0) -> tuple[list[Any], list[Any]]:
    """Return what happened under the frontend of the page, and under the scheduler."""
    shared = kind.endswith("shared")
    one = Replicas(kind, rank)
    schedule = OneCycleLR(one.optimizer, PEAK_LR, TOTAL)
    (group,) = one.optimizer.param_groups
    run = hk.Run(
        TOTAL, SYNC, 0.3, floors=(group["min_lr"],), peaks=(group["max_lr"],), probed=probed,
        gradients="shared" if shared else "local",
    )  # fmt: skip
    frontend = frontends()["SharedFrontend" if shared else "LocalFrontend"](
        schedule, run, CONTROLLERS[controller](), one.ensemble, spread=0.3, probe=one.probe if probed else None
    )
    ours = one.train(frontend.step, frontend.spread, bad_at)

    other = Replicas(kind, rank)
    scheduler = hk.HDETOneCycleLR(
        other.optimizer, PEAK_LR, TOTAL, spread=0.3, sync_every=SYNC, auto_lr=CONTROLLERS[controller](),
        probe=other.probe if probed else None, gradients="shared" if shared else "local", ensemble=other.ensemble,
    )  # fmt: skip
    theirs = other.train(scheduler.step, scheduler.cycle.spread, bad_at)
    check_means_something(controller, bad_at, scheduler.history, theirs)
    return ours, theirs


def check_means_something(controller: str, bad_at: int | None, history: list[hk.SyncRecord], seen: list[Any]) -> None:
    """Raise unless the run had what the case is about."""
    early = [record.step for record in history if record.kind == "early"]
    assert early == ([1, 3] if controller == "early pairs" else [])
    undone = [record.undone for record in history if record.undone is not None]
    start, later = [0, 0], [4]
    assert undone == ((start if bad_at == 2 else later) if controller == "undo" else [])
    moved = [base != scheduled for *_, base, scheduled, _ in seen]
    assert any(moved) == (controller != "default"), "the default controller leaves this learning rate alone"


QUICK = [("ranks shared", "early pairs", True, None), ("ranks local", "early pairs", False, None)]
FULL = [
    ("ranks shared", "default", False, None),
    ("ranks local", "undo", False, None),
    ("ranks shared", "softmax", False, None),
]


def _on_a_rank(rank: int, kind: str, controller: str, probed: bool, bad_at: int | None) -> bool:
    ours, theirs = trained(kind, controller, probed, bad_at, rank)
    return same(ours, theirs)


RANKS = Cases(2, _on_a_rank, QUICK, FULL)


@pytest.mark.parametrize(("kind", "controller", "probed", "bad_at"), RANKS.params())
def test_a_frontend_on_two_ranks_is_the_scheduler(kind: str, controller: str, probed: bool, bad_at: int | None) -> None:
    assert RANKS[kind, controller, probed, bad_at] == [True, True]


@pytest.mark.parametrize(
    ("kind", "controller", "probed", "bad_at"),
    [
        ("stack shared", "early pairs", True, None),
        ("stack local", "early pairs", True, None),
        ("stack shared", "undo", False, 2),
        pytest.param("stack shared", "undo", False, 9, marks=pytest.mark.full),
        pytest.param("stack local", "undo", False, 9, marks=pytest.mark.full),
        pytest.param("stack shared", "undo", False, None, marks=pytest.mark.full),
        pytest.param("stack shared", "default", False, None, marks=pytest.mark.full),
        pytest.param("stack local", "default", False, None, marks=pytest.mark.full),
        pytest.param("stack shared", "softmax", False, None, marks=pytest.mark.full),
        pytest.param("stack local", "softmax", False, None, marks=pytest.mark.full),
        pytest.param("stack shared", "hypergradient", False, None, marks=pytest.mark.full),
    ],
)
def test_a_frontend_on_a_stack_is_the_scheduler(kind: str, controller: str, probed: bool, bad_at: int | None) -> None:
    ours, theirs = trained(kind, controller, probed, bad_at)
    assert same(ours, theirs)


def test_the_frontend_is_short_and_uses_public_names_only() -> None:
    lines = [line.strip() for line in block_of("SharedFrontend").code.splitlines()]
    assert sum(bool(line) and not line.startswith(("import ", '"""')) for line in lines) <= 50
    for name in ("SharedFrontend", "LocalFrontend"):
        for node in ast.walk(ast.parse(block_of(name).code)):
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_")
                if isinstance(node.value, ast.Name) and node.value.id == "hk":
                    assert node.attr in hk.frontend.__all__
            assert not isinstance(node, ast.ImportFrom)
