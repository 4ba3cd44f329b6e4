"""Checkpoints: a resumed run is the run that was not interrupted, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hdet_kernels as hk
from hdet_kernels.ensemble import SingleReplica
from hdet_kernels.optim import FusedAdamW
from hdet_kernels.schedule.checkpoint import FORMAT
from tests.ranks import run_ranks
from tests.schedule.checkpoints import SETTINGS, SYNC, TOTAL, load, result, save
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


def _single(**options: Any) -> hk.HDETOneCycleLR:
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return hk.HDETOneCycleLR(optimizer, **{"max_lr": 0.1, "total_steps": 20, **options})


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
    saved = _single()
    for _ in range(3):
        saved.optimizer.step()
        saved.step(1.0)
    other = _single(**options)
    before = other.state_dict()
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved.state_dict())
    assert same(other.state_dict(), before)


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


def test_a_checkpoint_of_another_kind_of_scheduler_is_refused() -> None:
    one_cycle = _single()
    wrapped = hk.HDETScheduler(torch.optim.lr_scheduler.CosineAnnealingLR(_single().optimizer, 20))
    with pytest.raises(ValueError, match="made with schedule='HDETScheduler around CosineAnnealingLR', this scheduler"):
        one_cycle.load_state_dict(wrapped.state_dict())
    with pytest.raises(ValueError, match="made with schedule='OneCycleLR', this scheduler"):
        wrapped.load_state_dict(one_cycle.state_dict())
    with pytest.raises(ValueError, match="not a checkpoint of an HDET scheduler"):
        one_cycle.load_state_dict({"hdet": {}})


def test_an_explored_base_survives_building_the_scheduler_after_loading_the_optimizer() -> None:
    """A saved group holds the replica's value, and the base beside it, as torch keeps initial_lr."""

    class ThirdOfThree(SingleReplica):
        size = processes = 3
        replica = process = 2

    explore = [hk.Explore("weight_decay", spread=0.5)]
    first = _single(explore=explore, ensemble=ThirdOfThree(), auto_lr=False)
    assert first.optimizer.param_groups[0]["weight_decay"] != 0.01
    again = _single()
    again.optimizer.load_state_dict(first.optimizer.state_dict())
    second = hk.HDETOneCycleLR(again.optimizer, 0.1, 20, explore=explore, ensemble=ThirdOfThree(), auto_lr=False)
    second.load_state_dict(first.state_dict())
    assert second.cycle.spread.config() == first.cycle.spread.config()
    assert second.optimizer.param_groups[0]["weight_decay"] == first.optimizer.param_groups[0]["weight_decay"]


def test_numpy_numbers_are_saved_as_plain_ones(tmp_path: Path) -> None:
    explore = [hk.Explore("weight_decay", spread=np.float64(0.5), bounds=(np.float32(0.0), np.float64(1.0)))]
    torch.save(_single(spread=np.float64(0.2), explore=explore).state_dict(), tmp_path / "s.pt")
    torch.load(tmp_path / "s.pt", weights_only=True)


def test_a_plain_torch_checkpoint_is_refused() -> None:
    scheduler = _single()
    torch_scheduler = torch.optim.lr_scheduler.OneCycleLR(scheduler.optimizer, 0.1, 20)
    with pytest.raises(ValueError, match="not a checkpoint of an HDET scheduler"):
        scheduler.load_state_dict(torch_scheduler.state_dict())


def test_losses_and_history_are_restored_exactly(tmp_path: Path) -> None:
    scheduler = _single(total_steps=400, sync_every=10)
    for step in range(25):
        scheduler.optimizer.step()
        scheduler.step(batch(0, step)[1].mean())
    torch.save(scheduler.state_dict(), tmp_path / "s.pt")
    other = _single(total_steps=400, sync_every=10)
    other.load_state_dict(torch.load(tmp_path / "s.pt", weights_only=True))
    assert float(other.cycle.window.sum) == float(scheduler.cycle.window.sum)
    assert (other.cycle.window.count, other.last_epoch) == (5, 25)
    assert other.history == scheduler.history
    assert other.get_last_lr() == scheduler.get_last_lr()


# A checkpoint of version 0.1 (format 1). It was made with that version on the CPU by this run: parts() below, trained
# for 61 of its 120 steps, in the middle of a cycle. The file has the state_dict() of the stack, the optimizer and the
# scheduler there, and under "end" the parameters, the learning rates after every later step, the base learning rate and
# the controller's state after the last step, as version 0.1 computed them.
OLD = Path(__file__).parent / "data" / "version_0_1.pt"


def old_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.sin(torch.arange(32, dtype=torch.float32).reshape(8, 4) * 0.7 + step)
    return x, x.sum(dim=1, keepdim=True).div(4).tanh()


def old_loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def parts(**options: Any) -> tuple[hk.ReplicaStack, hk.FusedAdamW, hk.HDETOneCycleLR]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    stack = hk.ReplicaStack(module, 4, gradients="shared")
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.01, backend="torch")
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        0.02,
        120,
        pct_start=0.6,
        sync_every=4,
        ensemble=stack.ensemble,
        explore=[hk.Explore("weight_decay", spread=0.5)],
        probe=lambda: stack.losses(old_loss, *old_batch(1000), same_batch=True),
        **options,
    )
    return stack, optimizer, scheduler


def test_a_checkpoint_of_version_0_1_resumes() -> None:
    """Learning rates and the controller's state go on exactly, parameters within rounding of other processors."""
    saved = torch.load(OLD, weights_only=True)
    assert "format" not in saved["scheduler"]["hdet"]
    stack, optimizer, scheduler = parts()
    for part, name in ((stack, "stack"), (optimizer, "optimizer"), (scheduler, "scheduler")):
        part.load_state_dict(saved[name])
    rates = []
    for step in range(scheduler.last_epoch, 120):
        losses = stack.backward(old_loss, *old_batch(step))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses)
        rates.append(scheduler.get_last_lr())
    end = saved["end"]
    assert len(rates) == 59
    np.testing.assert_allclose(rates, end["rates"], rtol=1e-6)
    np.testing.assert_allclose(scheduler.get_base_lr(), end["base"], rtol=1e-6)
    mu = scheduler.cycle.spread.controller_state["mu"]
    assert mu[0] > 1
    np.testing.assert_allclose(mu, end["controller"]["mu"], rtol=1e-5)
    assert scheduler.cycle.spread.controller_state["observations"] == end["controller"]["looks"]
    for param, expected in zip(stack.parameters(), end["parameters"], strict=True):
        torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-6)


def test_the_state_of_version_0_1_is_translated_exactly() -> None:
    saved = torch.load(OLD, weights_only=True)["scheduler"]
    before = copy.deepcopy(saved)
    scheduler = parts()[2]
    scheduler.load_state_dict(saved)
    assert same(saved, before), "loading leaves the checkpoint as it is"
    old, new = saved["hdet"]["spread"]["controller"], scheduler.cycle.spread.controller_state
    names = {"looks": "observations", "ceilings": "caps", "belief": "log_likelihood", "way": "path_length",
             "opposed": "slow", "terrain": "stability"}  # fmt: skip
    assert {names.get(name, name) for name in old} == set(new)
    assert all(same(value, new[names.get(name, name)]) for name, value in old.items() if name != "terrain")
    within = {"first": "initial_level", "near": "edge", "broke": "diverged_at", "lowest": "lowest_before"}
    assert new["stability"] == {within.get(name, name): value for name, value in old["terrain"].items()}
    assert new["stability"]["initial_level"] is not None
    assert scheduler.state_dict()["hdet"]["format"] == FORMAT == 3


def test_version_0_1_had_the_settings_of_today() -> None:
    """Its constants were not saved: a run under other settings than its own is refused."""
    controller = hk.RegressionController(settings=hk.controller.RegressionSettings(quantile=0.5))
    scheduler = parts(auto_lr=controller)[2]
    with pytest.raises(ValueError, match=r"made with controller_constants.settings.quantile=0.35, this .* has 0.5"):
        scheduler.load_state_dict(torch.load(OLD, weights_only=True)["scheduler"])


def test_a_format_from_the_future_is_refused_and_changes_nothing() -> None:
    scheduler = _single()
    state = scheduler.state_dict()
    state["hdet"]["format"] = FORMAT + 1
    before = copy.deepcopy(scheduler.state_dict())
    with pytest.raises(
        ValueError, match=r"has format 4 of hdet_kernels .*, this is version .*, which reads 1 to 3: load it with"
    ):
        scheduler.load_state_dict(state)
    assert same(scheduler.state_dict(), before)
