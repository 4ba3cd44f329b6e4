"""Checkpoints: a resumed run is the run that was not interrupted, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hdet_kernels as hk
from hdet_kernels.ensemble import SingleReplica
from hdet_kernels.optim import FusedAdamW
from tests.ranks import Cases, run_ranks
from tests.schedule.checkpoints import SETTINGS, SYNC, TOTAL, load, result, save, single
from tests.training import Trainer, batch, same

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


def _resumed(rank: int, variant: str, at: int, folder: Path, scheduler_first: bool, of: int | None) -> dict[str, Any]:
    torch.manual_seed(1234 + rank)
    source = rank if of is None else of
    trainer = load(Trainer(rank, **VARIANTS[variant]), folder / f"rank{source}.pt", scheduler_first)
    trainer.train(TOTAL - at)
    return result(trainer)


#: Controllers, schedulers and optimizers differ in their own state, which is largest within a cycle.
QUICK = [("regression", 12), ("hypergradient", 12), ("softmax", 15), ("wrapped", 1), ("explored", 12)]


@pytest.mark.parametrize(
    ("variant", "at"),
    [
        pytest.param(variant, at, marks=() if (variant, at) in QUICK else pytest.mark.full, id=f"{variant}-{name}")
        for variant in VARIANTS
        for at, name in ((12, "mid-cycle"), (15, "boundary"), (1, "first-step"))
    ],
)
def test_a_resumed_run_is_the_uninterrupted_run(variant: str, at: int, tmp_path: Path) -> None:
    whole = run_ranks(2, _uninterrupted, variant, at, tmp_path)
    second = run_ranks(2, _resumed, variant, at, tmp_path, False, None)
    for a, b in zip(whole, second, strict=True):
        assert same({**a, "rates": a["rates"][at:]}, b)


@pytest.mark.full
def test_the_order_of_loading_does_not_matter(tmp_path: Path) -> None:
    whole = run_ranks(2, _uninterrupted, "explored", 12, tmp_path)
    second = run_ranks(2, _resumed, "explored", 12, tmp_path, True, None)
    assert all(same({**a, "rates": a["rates"][12:]}, b) for a, b in zip(whole, second, strict=True))


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
        second = run_ranks(n, _resumed, variant, 15, tmp_path, order, 0)
        assert all(same({**a, "rates": a["rates"][15:]}, b) for a, b in zip(whole, second, strict=True))
    assert not same(whole[0]["rates"], whole[1]["rates"])


def _coupled(params: Any, lr: float) -> torch.optim.Adam:
    return torch.optim.Adam(params, lr=lr, weight_decay=0.5)


BETAS = [hk.Explore("betas[1]", spread=0.3, bounds=(0.1, 0.999))]
#: Runs on shared gradients, and whether rank 0's file at a sync restores all ranks. It does not where the moments
#: depend on more than the gradient: on the parameters, by a decay that is added to the gradient, or on explored betas.
AT_A_SYNC: dict[str, tuple[dict[str, Any], bool]] = {
    "decoupled decay": ({}, True),
    "coupled decay": ({"make_optimizer": _coupled}, False),
    "coupled decay, averaged": ({"make_optimizer": _coupled, "average_state": True}, True),
    "explored betas": ({"explore": BETAS, "cycle_momentum": False}, False),
    "explored betas, averaged": ({"explore": BETAS, "cycle_momentum": False, "average_state": True}, True),
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
    second = run_ranks(3, _resumed, "explored", 12, tmp_path, False, 0)
    for a, b in zip(whole, second, strict=True):
        assert a["rates"][12:15] == b["rates"][:3], "until the next sync the learning rates are those of the saved run"
    assert all(torch.equal(r["parameters"], second[0]["parameters"]) for r in second)


def _other_size(rank: int, at: int, folder: Path) -> Any:
    trainer = Trainer(rank, **VARIANTS["explored"])
    groups = [g["lr"] for g in trainer.optimizer.param_groups]
    state = torch.load(folder / "rank0.pt", weights_only=True)[2]
    try:
        trainer.scheduler.load_state_dict(state)
    except ValueError as error:
        return str(error), groups == [g["lr"] for g in trainer.optimizer.param_groups], trainer.step
    load(trainer, folder / "rank0.pt").train(TOTAL - at)
    return result(trainer)


@pytest.mark.parametrize("n", [1, pytest.param(4, marks=pytest.mark.full)])
def test_another_world_size_resumes_at_a_boundary(n: int, tmp_path: Path) -> None:
    whole = run_ranks(2, _uninterrupted, "explored", 15, tmp_path)
    results = run_ranks(n, _other_size, 15, tmp_path)
    rates = np.array([r["rates"] for r in results])  # [rank, step, group]
    base = rates.mean(axis=0)
    for group in range(2):
        np.testing.assert_allclose(np.sort(rates[:, 0, group] / base[0, group]), hk.multipliers(n, 0.5))
    saved = np.mean([r["rates"][15] for r in whole], axis=0)
    np.testing.assert_allclose(base[0], saved, rtol=1e-12, err_msg="the base schedule goes on where it was")
    assert [len(r["history"][-1]["losses"]) for r in results] == [n] * n
    assert all(torch.equal(r["parameters"], results[0]["parameters"]) for r in results)


@pytest.mark.full  # test_restart.py has this with two replicas for three
def test_another_world_size_within_a_cycle_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run_ranks(2, _uninterrupted, "explored", 12, tmp_path)
    for message, untouched, step in run_ranks(3, _other_size, 12, tmp_path):
        assert "has 2 replicas and was saved 2 steps into a cycle, this run has 3" in message
        assert "at a multiple of sync_every=5" in message
        assert untouched
        assert step == 0


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


def test_numpy_numbers_are_saved_as_plain_ones(tmp_path: Path) -> None:
    explore = [hk.Explore("weight_decay", spread=np.float64(0.5), bounds=(np.float32(0.0), np.float64(1.0)))]
    torch.save(single(spread=np.float64(0.2), explore=explore).state_dict(), tmp_path / "s.pt")
    torch.load(tmp_path / "s.pt", weights_only=True)


def test_losses_and_history_are_restored_exactly(tmp_path: Path) -> None:
    scheduler = single(total_steps=400, sync_every=10)
    for step in range(25):
        scheduler.optimizer.step()
        scheduler.step(batch(0, step)[1].mean())
    torch.save(scheduler.state_dict(), tmp_path / "s.pt")
    other = single(total_steps=400, sync_every=10)
    other.load_state_dict(torch.load(tmp_path / "s.pt", weights_only=True))
    assert float(other.cycle.window.sum) == float(scheduler.cycle.window.sum)
    assert (other.cycle.window.count, other.last_epoch) == (5, 25)
    assert other.history == scheduler.history
    assert other.get_last_lr() == scheduler.get_last_lr()


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
