"""Checkpoints: a resumed run is the one that was not interrupted, bit for bit; those of other runs are refused."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

import hdet_kernels as hk
from hdet_kernels.ensemble import SingleReplica
from hdet_kernels.optim import FusedAdamW
from hdet_kernels.schedule.checkpoint import to_plain
from hdet_kernels.schedule.checkpoint_checks import checked
from tests.ranks import Cases, run_ranks
from tests.schedule.checkpoints import SETTINGS, SYNC, TOTAL, load, result, save, single
from tests.training import Trainer, batch, network, same, with_averaging

CONTROLLERS = {
    "regression": SETTINGS["auto_lr"],
    "softmax": hk.SoftmaxController(warmup_steps=10, scale=0.05),
    "hypergradient": hk.HypergradientController(start_at=0.1, stop_at=0.5),
}


def cosine(optimizer: Any) -> hk.HDETScheduler:
    base = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL)
    auto_lr = hk.RegressionController(start_at=0.1, stop_at=0.5)
    return hk.HDETScheduler(base, sync_every=SYNC, auto_lr=auto_lr, explore=[hk.Explore("weight_decay", spread=0.5)])


VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {**SETTINGS, "auto_lr": controller} for name, controller in CONTROLLERS.items()},
    "local": {**SETTINGS, "ddp": False},
    "ours": {**SETTINGS, "make_optimizer": FusedAdamW},
    "wrapped": {"make_scheduler": cosine, "groups": True},
    "explored": {**SETTINGS, "explore": [hk.Explore("weight_decay", spread=0.5, bounds=(1e-4, 1.0))]},
}
VARIANTS["hypergradient"]["ddp"] = True
VARIANTS["wrapped, tensor lr"] = {**VARIANTS["wrapped"], "lr": torch.tensor(0.01)}


def _uninterrupted(rank: int, variant: str, at: int, folder: Path) -> dict[str, Any]:
    trainer = Trainer(rank, **VARIANTS[variant])
    trainer.train(at)
    save(trainer, folder / f"rank{rank}.pt")
    trainer.train(TOTAL - at)
    return result(trainer)


def _resumed(rank: int, variant: str, at: int, folder: Path, scheduler_first: bool) -> dict[str, Any]:
    torch.manual_seed(1234 + rank)
    trainer = load(Trainer(rank, **VARIANTS[variant]), folder / "rank0.pt", scheduler_first)
    trainer.train(TOTAL - at)
    return result(trainer)


def _saved_and_resumed(rank: int, variant: str, *places: int) -> dict[int, bool]:
    """Whether the runs that resume from checkpoints of these steps end as the uninterrupted one."""

    def built() -> Trainer:
        return Trainer(rank, **copy.deepcopy(VARIANTS[variant]))

    whole, files = built(), {}
    for at in places:
        files[at] = io.BytesIO()
        save(whole.train(at - whole.step), files[at])
    expected = result(whole.train(TOTAL - whole.step))
    found = {}
    for at, file in files.items():
        torch.manual_seed(1234 + rank)
        file.seek(0)
        resumed = result(load(built(), file).train(TOTAL - at))
        found[at] = same({**expected, "rates": expected["rates"][at:]}, resumed)
    return found


RESUMED = Cases(
    2,
    _saved_and_resumed,
    {"mid-cycle": ("regression", 12), "boundary": ("softmax", 15), "first step": ("wrapped", 1)},
    full={variant: (variant, 1, 12, 15) for variant in VARIANTS},
)


@pytest.mark.parametrize("case", RESUMED.params())
def test_a_resumed_run_is_the_uninterrupted_run(case: str) -> None:
    for found in RESUMED[case]:
        assert all(found.values()), found


@pytest.mark.parametrize(
    ("n", "variant"),
    [(2, "explored"), *(pytest.param(n, "local", marks=pytest.mark.full) for n in (3, 4))],
    ids=str,
)
def test_rank_0s_file_gives_every_rank_its_own_multipliers(n: int, variant: str, tmp_path: Path) -> None:
    """At a sync all replicas are equal, so one file restores all of them bit for bit. (DDP on more than two ranks sums
    its first gradients after a start in another order than later ones, and so rounds differently when resumed.)"""
    whole = run_ranks(n, _uninterrupted, variant, 15, tmp_path)
    for order in (False, True):
        second = run_ranks(n, _resumed, variant, 15, tmp_path, order)
        assert all(same({**a, "rates": a["rates"][15:]}, b) for a, b in zip(whole, second, strict=True))
    assert not same(whole[0]["rates"], whole[1]["rates"])


def _coupled(params: Any, lr: float) -> torch.optim.Adam:
    return torch.optim.Adam(params, lr=lr, weight_decay=0.5)


BETAS = [hk.Explore("betas[1]", spread=0.3, bounds=(0.1, 0.999))]
#: Runs on shared gradients, and whether rank 0's file at a sync restores all ranks. Where the moments depend on more
#: than the gradient (on the parameters, by a coupled decay, or on explored betas) they are averaged.
AT_A_SYNC: dict[str, tuple[dict[str, Any], bool]] = {
    "decoupled decay": ({}, True),
    "coupled decay": ({"make_optimizer": _coupled}, True),
    "coupled decay, not averaged": ({"make_optimizer": _coupled, "average_state": False}, False),
    "explored betas": ({"explore": BETAS, "cycle_momentum": False}, True),
    "explored betas, not averaged": ({"explore": BETAS, "cycle_momentum": False, "average_state": False}, False),
    "explored eps": ({"explore": [hk.Explore("eps", spread=0.5)]}, True),
}


def _from_rank_0(rank: int, name: str) -> bool:
    """Whether a run that all ranks resume from rank 0's state at a sync is the uninterrupted one."""
    options = {"total_steps": 8, "sync_every": 4, "spread": 0.5, "auto_lr": False, **AT_A_SYNC[name][0]}
    whole = Trainer(rank, **options).train(4)
    states = [copy.deepcopy([part.state_dict() for part in (whole.module, whole.optimizer, whole.scheduler)])]
    torch.distributed.broadcast_object_list(states, src=0)
    resumed = Trainer(rank, **options)
    for part, state in zip((resumed.module, resumed.optimizer, resumed.scheduler), states[0], strict=True):
        part.load_state_dict(state)
    whole.train(3), resumed.train(3)  # before the next sync makes them alike again
    return same(
        [whole.parameters(), whole.moments(), whole.rates[4:]], [resumed.parameters(), resumed.moments(), resumed.rates]
    )


_AT_A_SYNC = Cases(2, _from_rank_0, [(name,) for name in AT_A_SYNC])


@pytest.mark.parametrize("name", AT_A_SYNC)
def test_rank_0s_file_at_a_sync_restores_all_ranks_where_their_moments_are_equal(name: str) -> None:
    assert _AT_A_SYNC[(name,)] == [AT_A_SYNC[name][1]] * 2


@pytest.mark.full
def test_rank_0s_file_mid_cycle_gives_every_rank_its_own_multipliers(tmp_path: Path) -> None:
    whole = run_ranks(3, _uninterrupted, "explored", 12, tmp_path)
    second = run_ranks(3, _resumed, "explored", 12, tmp_path, False)
    for a, b in zip(whole, second, strict=True):
        assert a["rates"][12:15] == b["rates"][:3], "until the next sync the learning rates are those of the saved run"
    assert all(torch.equal(r["parameters"], second[0]["parameters"]) for r in second)


def _shared_is_remembered(rank: int, folder: Path) -> list[int]:
    """The bytes of a manual average right after resuming: of the parameters alone, since gradients are shared."""
    trainer = Trainer(rank, **SETTINGS)
    trainer.train(SYNC)
    save(trainer, folder / f"rank{rank}.pt")
    resumed = load(Trainer(rank, **SETTINGS), folder / f"rank{rank}.pt")
    for each in (trainer, resumed):
        each.scheduler.converge()
    return [each.scheduler.history[-1].bytes for each in (trainer, resumed)]


def test_whether_gradients_are_shared_is_saved(tmp_path: Path) -> None:
    for before, after in run_ranks(2, _shared_is_remembered, tmp_path):
        assert before == after < 1000, "129 parameters and a control row, no moments"


def test_an_explored_base_survives_building_the_scheduler_after_loading_the_optimizer() -> None:
    """A saved group holds the replica's value, and the base beside it, as torch keeps initial_lr."""

    class ThirdOfThree(SingleReplica):
        size = processes = 3
        replica = process = 2

    explore = [hk.Explore("weight_decay", spread=0.5)]
    first = single(explore=explore, ensemble=ThirdOfThree(), auto_lr=False)
    assert first.optimizer.param_groups[0]["weight_decay"] != 0.01
    again = single()
    again.optimizer.load_state_dict(first.optimizer.state_dict())
    second = hk.HDETOneCycleLR(again.optimizer, 0.1, 20, explore=explore, ensemble=ThirdOfThree(), auto_lr=False)
    second.load_state_dict(first.state_dict())
    assert second.cycle.spread.config() == first.cycle.spread.config()
    assert second.optimizer.param_groups[0]["weight_decay"] == first.optimizer.param_groups[0]["weight_decay"]


class Picky:
    """A setter that refuses a value."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.refuses = False

    def __call__(self, value: float) -> None:
        if self.refuses:
            self.refuses = False
            raise RuntimeError("not this one")
        self.values.append(value)


def test_a_setter_that_raises_leaves_everything_as_before() -> None:
    def build(setter: Picky) -> hk.HDETOneCycleLR:
        return single(explore=[hk.Explore("dropout", base=0.1, apply=setter)], auto_lr=False, ensemble=SingleReplica())

    saved = build(Picky())
    for _ in range(3):
        saved.optimizer.step()
        saved.step(1.0)
    setter = Picky()
    scheduler = build(setter)
    before = copy.deepcopy([scheduler.state_dict(), scheduler.optimizer.param_groups, scheduler.get_last_lr()])
    setter.refuses = True
    with pytest.raises(RuntimeError, match="not this one"):
        scheduler.load_state_dict(saved.state_dict())
    assert same([scheduler.state_dict(), scheduler.optimizer.param_groups, scheduler.get_last_lr()], before)
    scheduler.load_state_dict(saved.state_dict())
    assert same(scheduler.state_dict(), saved.state_dict())


class Stubborn(torch.optim.lr_scheduler.LambdaLR):
    """A wrapped schedule whose loading fails half-way."""

    fails = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.fails:
            type(self).fails = False
            raise KeyError("half-way")


def test_a_wrapped_schedule_that_raises_leaves_everything_as_before() -> None:
    def build() -> hk.HDETScheduler:
        return hk.HDETScheduler(Stubborn(single().optimizer, lambda t: 1 / (1 + t)), total_steps=20, auto_lr=False)

    saved, scheduler = build(), build()
    for _ in range(3):
        saved.optimizer.step()
        saved.step(1.0)
    before = copy.deepcopy(scheduler.state_dict())
    Stubborn.fails = True
    with pytest.raises(ValueError, match="Stubborn refuses the checkpoint's base_scheduler"):
        scheduler.load_state_dict(saved.state_dict())
    assert same(scheduler.state_dict(), before)


STEPS, EVERY, SAVED_AT = 12, 3, 7

#: The orders of four acts in which the scheduler is built before it is loaded.
ORDERS = [
    order
    for order in itertools.permutations(("build", "model", "optimizer", "scheduler"))
    if order.index("build") < order.index("scheduler")
]
#: Those that lost the masters, and one that did not.
QUICK_ORDERS = [
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
        options = {"sync_every": EVERY, "spread": 0.5, "auto_lr": hk.RegressionController(stop_at=1.0)}
        options |= OPTIONS[self.kind]
        if self.kind == "stack":
            options["ensemble"] = self.model.ensemble
        if self.kind == "cosine":
            base = lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
            self.scheduler = hk.HDETScheduler(base, **with_averaging(options))
        else:
            self.scheduler = hk.HDETOneCycleLR(self.optimizer, 0.02, STEPS, **with_averaging(options))

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
    whole = Run(rank, kind).train(SAVED_AT)
    saved = whole.states()
    expected = whole.train(STEPS - SAVED_AT).result()
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
        found[order] = same(run.train(STEPS - SAVED_AT).result(), expected)
    return found


_ORDERS = Cases(2, _orders, {"quick": ("compress", QUICK_ORDERS)}, {kind: (kind, ORDERS) for kind in OPTIONS})


@pytest.mark.parametrize("case", _ORDERS.params())
def test_every_order_of_loading_gives_the_same_run(case: str) -> None:
    for found in _ORDERS[case]:
        assert [order for order, equal in found.items() if not equal] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 3}, "made with sync_every=1, this scheduler has 3"),
        ({"seed": 5}, "made with seed=0, this scheduler has 5"),
        ({"total_steps": 21}, "made with total_steps=20, this scheduler has 21"),
        ({"spread": 0.1}, "made with hyperparameters="),
        ({"auto_lr": False}, "made with controller='RegressionController', this scheduler has None"),
    ],
    ids=["sync_every", "seed", "total_steps", "spread", "controller"],
)
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(options: dict[str, Any], message: str) -> None:
    saved = single()
    for _ in range(3):
        saved.optimizer.step()
        saved.step(1.0)
    other = single(**options)
    before = other.state_dict()
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved.state_dict())
    assert same(other.state_dict(), before)


def test_a_checkpoint_of_another_kind_of_scheduler_is_refused() -> None:
    one_cycle = single()
    wrapped = hk.HDETScheduler(torch.optim.lr_scheduler.CosineAnnealingLR(single().optimizer, 20))
    with pytest.raises(ValueError, match="made with schedule='HDETScheduler around CosineAnnealingLR', this scheduler"):
        one_cycle.load_state_dict(wrapped.state_dict())
    with pytest.raises(ValueError, match="made with schedule='OneCycleLR', this scheduler"):
        wrapped.load_state_dict(one_cycle.state_dict())
    plain = torch.optim.lr_scheduler.OneCycleLR(single().optimizer, 0.1, 20).state_dict()
    for state in ({"hdet": {}}, plain):
        with pytest.raises(ValueError, match="not a checkpoint of an HDET scheduler"):
            one_cycle.load_state_dict(state)


def _under_way(rank: int) -> list[str]:
    """A checkpoint at a sync, with an overlapped average under way, for a stack of two rows: refused, then allowed."""
    options: dict[str, Any] = {"total_steps": 12, "sync_every": 4, "auto_lr": False}
    trainer = Trainer(rank, overlap_steps=2, ddp=False, **options).train(4)
    found = []
    for _ in range(2):
        stack = hk.ReplicaStack(network(), 2)
        optimizer = hk.FusedAdamW(stack.parameters(), lr=0.01)
        scheduler = hk.HDETOneCycleLR(optimizer, 0.01, ensemble=stack.ensemble, **options)
        before = copy.deepcopy(scheduler.state_dict())
        try:
            scheduler.load_state_dict(trainer.scheduler.state_dict())
            found.append("")
        except ValueError as error:
            assert same(scheduler.state_dict(), before)
            found.append(str(error))
        trainer.scheduler.converge()
    return found


def test_an_overlapped_average_under_way_needs_as_many_rows() -> None:
    for refused, allowed in run_ranks(2, _under_way):
        assert "has 2 replicas, 1 in a process, and an overlapped average under way, this run has" in refused
        assert "2 in a process" in refused
        assert "call scheduler.converge() before saving, which applies it" in refused
        assert allowed == ""


class Forgetful(hk.SoftmaxController):
    """A controller from outside whose state needs an entry of a type."""

    def base(self, state: dict[str, Any], index: int, scheduled: Any) -> Any:
        return super().base(state, index, scheduled) * (1 + state["velocity"][index])


def test_the_state_of_a_controller_from_outside_is_tried_first() -> None:
    def build() -> hk.HDETOneCycleLR:
        return single(auto_lr=Forgetful(warmup_steps=0))

    scheduler = build()
    before = copy.deepcopy(scheduler.state_dict())
    for velocity in ([], ["x"], [float("nan")], None):
        state = copy.deepcopy(before)
        state["hdet"][0]["spread"]["controller"]["velocity"] = velocity
        with pytest.raises(ValueError, match=r"hdet\.spread\.controller"):
            scheduler.load_state_dict(state)
        assert same(scheduler.state_dict(), before)


def test_other_formats_and_entries_of_newer_versions_are_refused_by_name() -> None:
    scheduler = single()
    before = copy.deepcopy(scheduler.state_dict())
    own = before["hdet"][0]
    for state, words in (
        ({**own, "format": 5, "version": "9.9", "mood": 1}, r"format 5 of hdet_kernels '9\.9', .* not know hdet\.mood"),
        ({**own, "format": 2}, "format 2 of hdet_kernels"),
        (
            {k: v for k, v in own.items() if k not in ("format", "version")},
            r"format 1 of hdet_kernels 'before 0\.2\.0'",
        ),
        ({k: v for k, v in own.items() if k != "format"}, r"no hdet\.format"),
        ({**own, "mood": 1}, r"does not know: hdet\.mood"),
    ):
        with pytest.raises(ValueError, match=words):
            scheduler.load_state_dict({**before, "hdet": (state,)})
        assert same(scheduler.state_dict(), before)


@pytest.mark.parametrize("slopes", [[], [[0.5]], [[1.0], [-3.0]], [[1.0], [4.0], [2.0]], [[2.0]] * 3], ids=str)
def test_sums_of_slopes_of_format_3_become_slopes_of_the_same_mean_and_error(slopes: list[list[float]]) -> None:
    def made() -> hk.HDETOneCycleLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        controller = hk.HypergradientController()
        return hk.HDETOneCycleLR(optimizer, 0.1, 20, sync_every=4, auto_lr=controller, cycle_momentum=False)

    (hdet,) = made().state_dict()["hdet"]
    values = [value for (value,) in slopes]
    sums = [[sum(values)], [sum(value * value for value in values)]] if values else None
    moved = {key: value for key, value in hdet["displacement"].items() if key != "slopes"}
    added = ("part", "averaged", "optimizer_state")
    old = {**{key: value for key, value in hdet.items() if key not in added}, "format": 3}
    old["displacement"] = {**moved, "sums": sums, "count": len(values)}
    scheduler = made()
    scheduler.load_state_dict({**scheduler.state_dict(), "hdet": old})
    found = [value for (value,) in scheduler.state_dict()["hdet"][0]["displacement"]["slopes"]]
    assert len(found) == len(values)
    if values:
        np.testing.assert_allclose([np.mean(found), np.std(found)], [np.mean(values), np.std(values)], atol=1e-12)


def test_what_is_read_turns_into_what_was_saved() -> None:
    scheduler = single()
    for _ in range(3):
        scheduler.optimizer.step()
        scheduler.step(1.0)
    state = scheduler.state_dict()
    assert same(to_plain(checked(scheduler.cycle, state)), state["hdet"][0])
