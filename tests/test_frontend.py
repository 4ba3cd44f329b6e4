"""Frontends by public names: those of docs/frontend.md train as HDETOneCycleLR does, and every name is documented."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet_kernels as hk
from hdet_kernels import frontend
from tests.docs.namespace import namespace
from tests.docs.pages import ROOT, Block, blocks_of
from tests.ranks import Cases, environment_of_torchrun, run_ranks
from tests.schedule.undo_runs import Scripted
from tests.training import batch, loss_of, network, same

DOCS = ROOT / "docs"
PAGE = DOCS / "frontend.md"


def block_of(text: str) -> Block:
    """Return the block of the page that has a text."""
    (found,) = (block for block in blocks_of(PAGE) if text in block.code)
    return found


def frontends() -> dict[str, Any]:
    """Return the classes of the page by name."""
    names: dict[str, Any] = {"hk": hk, "__name__": "frontend"}
    for name in ("SharedFrontend", "LocalFrontend"):
        exec(block_of(f"class {name}").compiled(), names)
    return names


def lines_of(block: Block) -> int:
    """Return the lines of code, without imports and docstrings."""
    lines = [line.strip() for line in block.code.splitlines()]
    return sum(bool(line) and not line.startswith(("import ", "from ", '"""')) for line in lines)


def _short(rank: int, folder: Path) -> tuple[list[float], Any]:
    """Run the first frontend of the page; return its learning rates, and what all ranks should have alike."""
    with environment_of_torchrun(rank):
        names, rates = namespace(folder), []
        names["model"].register_forward_pre_hook(lambda *_: rates.append(names["optimizer"].param_groups[0]["lr"]))
        exec(block_of("enumerate(loader, start=1)").compiled(), names)
    optimizer, params = names["optimizer"], list(names["model"].parameters())
    moments = [optimizer.state[param]["exp_avg"] for param in params]
    return rates, ([param.detach() for param in params], moments, names["state"], float(names["base"]))


def test_the_frontend_of_thirty_lines_differs_averages_and_moves_the_learning_rate(tmp_path: Path) -> None:
    assert lines_of(block_of("enumerate(loader, start=1)")) <= 30
    (rates, alike), (other_rates, other_alike) = run_ranks(2, _short, tmp_path)
    assert same(alike, other_alike)
    assert alike[2]["eta"], "the controller has taken over from the schedule"
    assert {round(one / two, 6) for one, two in zip(rates, other_rates, strict=True)} <= {0.538462, 1.857143}


TOTAL, SYNC, PEAK_LR = 24, 4, 0.05


@dataclass(frozen=True)
class EarlyPairs(hk.RegressionController):
    """The default controller with more wishes: two early syncs, and pairs without a probe too."""

    def prepare(self, run: frontend.Run) -> frontend.Run:
        return replace(super().prepare(run), early=(1, 3), in_pairs=True)


@dataclass(frozen=True)
class Trying(Scripted):
    """Doubts after step 8 of the run, and finds the trial, which lasts as long, no better."""

    def start(self, count: int, run: frontend.Run | None = None) -> dict[str, Any]:
        return {**super().start(count, run), "trial": None}

    def doubts(self, run: frontend.Run, state: dict[str, Any], seen: frontend.Observation) -> bool:
        return (run.total_steps, seen.step) == (TOTAL, 8)

    def tried(self, run: frontend.Run, state: dict[str, Any], seen: frontend.Observation) -> dict[str, Any]:
        return {**self.begun_anew(run, state, seen), "trial": {"step": seen.step}}

    def worse(self, run: frontend.Run, state: dict[str, Any], seen: frontend.Observation) -> bool:
        return state["trial"] is not None and seen.step == state["trial"]["step"]


CONTROLLERS: dict[str, Callable[[], Any]] = {
    "early pairs": lambda: EarlyPairs(trust=None, stop_at=0.8),
    "default": hk.RegressionController,
    "softmax": lambda: hk.SoftmaxController(warmup_steps=6, scale=0.01),
    "hypergradient": lambda: hk.HypergradientController(stop_at=0.9),
    "undo": lambda: Scripted((12,), last=TOTAL),
    "trial": lambda: Trying(last=TOTAL),
}


class Replicas:
    """A model and its optimizer on this process: a rank of DDP, a rank with local gradients, or a stack."""

    def __init__(self, kind: str, rank: int = 0) -> None:
        self.kind, self.rank = kind, rank
        self.model: Any = network()
        self.ensemble: frontend.Ensemble
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

    def train(self, step_scheduler: Callable[[Any], None], spread: frontend.Spread, bad_at: int | None) -> list[Any]:
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
            state = [self.optimizer.state[p] for p in self.model.parameters()]
            moments = [each["exp_avg"].nan_to_num(nan=77.0) for each in state if "exp_avg" in each]
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
    run = frontend.Run(
        TOTAL, SYNC, 0.3, floors=(group["min_lr"],), peaks=(group["max_lr"],), probed=probed,
        gradients="shared" if shared else "local",
    )  # fmt: skip
    hdet = frontends()["SharedFrontend" if shared else "LocalFrontend"](
        schedule, run, CONTROLLERS[controller](), one.ensemble, spread=0.3, probe=one.probe if probed else None
    )
    ours = one.train(hdet.step, hdet.spread, bad_at)

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
    twice, once = [0, 4], [0]
    expected = {"undo": twice if bad_at == 2 else once, "trial": [0, 8]}
    assert undone == expected.get(controller, [])
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
        ("stack shared", "trial", False, None),
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


@pytest.mark.parametrize("text", ["enumerate(loader, start=1)", "class SharedFrontend"])
def test_the_frontends_use_public_names_only(text: str) -> None:
    for node in ast.walk(ast.parse(block_of(text).code)):
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_")
            if isinstance(node.value, ast.Name) and node.value.id in ("hk", "frontend"):
                assert node.attr in {"hk": hk, "frontend": frontend}[node.value.id].__all__


@pytest.mark.parametrize("page", ["frontend.md", "api.md"])
def test_every_name_of_the_contract_is_on_the_page(page: str) -> None:
    words = set(re.findall(r"\w+", (DOCS / page).read_text()))
    assert sorted(set(frontend.__all__) - words) == []
