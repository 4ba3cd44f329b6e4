"""The whole cycle over real processes: fan-out, shared and local gradients, converge, consensus, exploration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.optim import FusedAdamW
from tests.ranks import Cases, run_ranks
from tests.training import Trainer, batch, network

OPTIMIZERS: dict[str, Any] = {"torch": torch.optim.AdamW, "ours": FusedAdamW}


def all_equal(tensors: list[Tensor]) -> bool:
    return all(torch.equal(tensors[0], other) for other in tensors[1:])


def _fan_out(rank: int) -> list[list[float]]:
    torch.manual_seed(rank)  # the permutation must not depend on the global generator
    torch.rand(rank)
    return Trainer(rank, groups=True, auto_lr=False, spread=0.3, tie_groups=False).train(12).rates


def test_ranks_hold_every_multiplier_once_and_change_places() -> None:
    rates = np.array(run_ranks(3, _fan_out))  # [rank, step, group]
    schedule = rates.mean(axis=0)
    plain = torch.optim.AdamW(network().parameters())
    reference = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.01, total_steps=12)
    for step in range(12):
        np.testing.assert_allclose(schedule[step], reference.get_last_lr()[0], rtol=1e-12)
        for group in range(2):
            np.testing.assert_allclose(
                sorted(rates[:, step, group] / schedule[step, group]), hk.multipliers(3, 0.3), rtol=1e-12
            )
        plain.step()
        reference.step()
    ratio = np.round(rates / schedule, 9)
    assert any((ratio[:, 0, 0] != ratio[:, cycle, 0]).any() for cycle in (4, 8)), "places change between cycles"
    assert (ratio[..., 0] != ratio[..., 1]).any(), "groups have permutations of their own"


def _shared(rank: int, kind: str) -> dict[str, Any]:
    trainer = Trainer(rank, make_optimizer=OPTIMIZERS[kind], auto_lr=False)
    within = trainer.train(3).parameters()
    moments = trainer.moments()
    synced = trainer.train(1).parameters()
    trainer.train(8)
    record = trainer.scheduler.history[0]
    return {
        "within": within, "moments": moments, "synced": synced, "final": trainer.parameters(),
        "gradients": record.gradients, "collectives": record.collectives, "syncs": len(trainer.scheduler.history),
    }  # fmt: skip


@pytest.mark.parametrize(("n", "kind"), [(2, "ours"), pytest.param(4, "torch", marks=pytest.mark.full)])
def test_replicas_with_shared_gradients_diverge_and_become_equal_at_a_sync(n: int, kind: str) -> None:
    results = run_ranks(n, _shared, kind)
    within = torch.stack([r["within"] for r in results])
    assert not all_equal(list(within))
    assert all_equal([r["moments"] for r in results]), "DDP's gradients, and so the moments, are equal"
    assert all_equal([r["synced"] for r in results])
    assert all_equal([r["final"] for r in results])
    assert {(r["gradients"], r["collectives"], r["syncs"]) for r in results} == {("shared", 2, 3)}


def _local(rank: int, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    trainer = Trainer(rank, make_optimizer=OPTIMIZERS[kind], ddp=False, auto_lr=False, **options)
    within = trainer.train(3).moments()
    gathered = [torch.empty_like(within) for _ in range(dist.get_world_size())]
    trainer.train(1, before_step=lambda t: dist.all_gather(gathered, t.moments()))
    record = trainer.scheduler.history[0]
    mean = torch.stack(gathered).mean(dim=0)
    return {"within": within, "moments": trainer.moments(), "mean": mean, "record": record.to_dict()}


LOCAL = Cases(
    3,
    _local,
    {
        "auto": ("torch", {}),
        "ours": ("ours", {"gradients": "local"}),
        "own": ("torch", {"average_state": False}),
        "shared": ("torch", {"gradients": "shared"}),
    },
)


@pytest.mark.parametrize("case", LOCAL.params())
def test_local_gradients_average_the_moments_too(case: str) -> None:
    """Those that are said to be shared, and are not, leave moments that differ: they are averaged all the same."""
    results, averaged = LOCAL[case], case != "own"
    assert not all_equal([r["within"] for r in results])
    assert all_equal([r["moments"] for r in results]) is averaged
    assert {r["record"]["gradients"] for r in results} == {"shared" if case == "shared" else "local"}
    if averaged:
        torch.testing.assert_close(results[0]["moments"], results[0]["mean"])
    if case == "auto":
        assert results[0]["record"]["collectives"] == 2, "moments travel with the parameters"


def _same_batches(rank: int) -> list[str]:
    """Local gradients on the same data are equal until the parameters have diverged."""
    trainer = Trainer(0, ddp=False, auto_lr=False, sync_every=1)
    trainer.train(6)
    return [record.gradients for record in trainer.scheduler.history]


@pytest.mark.full
def test_equal_gradients_count_as_shared_even_if_they_are_computed_locally() -> None:
    """With T = 1 and equal data the replicas' gradients are equal at every step: nothing needs averaging but them."""
    assert run_ranks(2, _same_batches) == [["shared"] * 6] * 2


def _plain_ddp(rank: int, ours: bool) -> Tensor:
    def torch_scheduler(optimizer: Any) -> Any:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=12)
        step = scheduler.step
        scheduler.step = lambda loss=None: step()  # type: ignore[method-assign,assignment]
        return scheduler

    if ours:
        return Trainer(rank, spread=0).train(12).parameters()
    return Trainer(rank, make_scheduler=torch_scheduler).train(12).parameters()


def test_without_spread_ddp_training_is_torchs_bit_for_bit() -> None:
    """On three ranks, where a mean of equal numbers would already round."""
    found = Cases(3, _plain_ddp, [(False,), (True,)])
    assert all_equal(found[(False,)] + found[(True,)])


def _plain_with_buffers(rank: int, ours: bool) -> tuple[Tensor, Tensor]:
    trainer = Trainer(rank, batch_norm=True, spread=0)
    options = {"spread": 0, "sync_every": 4, "model": trainer.module} if ours else {}
    make = hk.HDETOneCycleLR if ours else torch.optim.lr_scheduler.OneCycleLR
    scheduler: Any = make(trainer.optimizer, 0.01, 4, **options)
    for step in range(4):
        x, y = batch(rank, step)
        trainer.optimizer.zero_grad()
        nn.functional.mse_loss(trainer.model(x), y).backward()
        trainer.optimizer.step()
        scheduler.step()
    return trainer.parameters(), dict(trainer.module.named_buffers())["norm.running_mean"].clone()


def test_without_spread_buffers_are_averaged_and_parameters_left_alone() -> None:
    found = Cases(3, _plain_with_buffers, [(False,), (True,)])
    theirs, ours = found[(False,)], found[(True,)]
    assert all_equal([r[0] for r in theirs + ours])
    assert not all_equal([r[1] for r in theirs])
    assert all_equal([r[1] for r in ours])


def _buffers(rank: int) -> dict[str, Tensor]:
    trainer = Trainer(rank, ddp=False, batch_norm=True, auto_lr=False, sync_every=100)
    trainer.scheduler = hk.HDETOneCycleLR(
        trainer.optimizer,
        0.01,
        12,
        sync_every=4,
        auto_lr=False,
        model=trainer.module,
        averaging=hk.Averaging(buffers=False),
    )
    trainer.train(4)
    return {name: buffer.clone() for name, buffer in trainer.module.named_buffers()}


def test_batchnorm_statistics_stay_those_of_a_replica_on_request() -> None:
    first, second = run_ranks(2, _buffers)
    assert all(not torch.equal(first[name], second[name]) for name in ("norm.running_mean", "norm.running_var"))


def _consensus(rank: int, ddp: bool) -> dict[str, Any]:
    trainer = Trainer(rank, ddp=ddp, auto_lr=False)
    own = trainer.train(2).parameters()
    moments = trainer.moments()
    with trainer.scheduler.consensus():
        inside = trainer.parameters()
        refused = []
        for call in (trainer.scheduler.step, trainer.scheduler.converge, trainer.scheduler.consensus().__enter__):
            with pytest.raises(RuntimeError) as error:
                call()
            refused.append(str(error.value))
    back = trainer.parameters()
    with pytest.raises(ZeroDivisionError), trainer.scheduler.consensus():
        raise ZeroDivisionError
    same = torch.equal(own, trainer.parameters()) and torch.equal(own, back) and torch.equal(moments, trainer.moments())
    trainer.train(10)
    return {"own": own, "inside": inside, "same": same, "refused": refused, "end": trainer.parameters()}


@pytest.mark.parametrize("ddp", [pytest.param(True, marks=pytest.mark.full), False], ids=["shared", "local"])
def test_consensus_shows_the_average_and_gives_the_replicas_back(ddp: bool) -> None:
    results = run_ranks(3, _consensus, ddp)
    mean = torch.stack([r["own"] for r in results]).double().mean(dim=0).float()
    assert all_equal([r["inside"] for r in results])
    torch.testing.assert_close(results[0]["inside"], mean, rtol=2e-7, atol=2e-8)
    assert all(r["same"] for r in results)
    assert all("inside scheduler.consensus()" in text for r in results for text in r["refused"])
    assert all_equal([r["end"] for r in results])


def _auto_lr(rank: int, explore: bool) -> dict[str, Any]:
    calls: list[int] = []

    def fixed_batch() -> Tensor:
        calls.append(trainer.step)
        x, y = batch(99, 0, size=64)
        return nn.functional.mse_loss(trainer.module(x), y)

    trainer = Trainer(
        rank, max_lr=1e-4, total_steps=400, sync_every=10, trust=None, probe=fixed_batch, groups=True, tie_groups=False,
        explore=[hk.Explore("weight_decay", base=0.01)] if explore else [],
    )  # fmt: skip
    trainer.train(400)
    return {
        "calls": calls, "mu": trainer.scheduler.cycle.spread.controller_state["mu"],
        "history": trainer.scheduler.history, "parameters": trainer.parameters(),
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("explore", [False, True], ids=["lr", "lr+wd"])
def test_without_trust_a_learning_rate_that_is_much_too_low_is_raised(explore: bool) -> None:
    results = run_ranks(4, _auto_lr, explore)
    assert all(r["mu"] == results[0]["mu"] for r in results), "every rank computes the same base values"
    assert min(results[0]["mu"][:2]) > 1.0
    assert all_equal([r["parameters"] for r in results])
    last = 360 if explore else 240
    assert [step + 1 for step in results[0]["calls"]] == list(range(10, last + 1, 10)), (
        "the probe runs where it is read"
    )
    record = results[0]["history"][1]
    assert record.probes is not None
    assert set(record.values) == {"lr/0", "lr/1"} | ({"weight_decay/0", "weight_decay/1"} if explore else set())
    assert all(len(values) == 4 for values in record.values.values())


def _hypergradient(rank: int, ddp: bool) -> list[float]:
    trainer = Trainer(rank, ddp=ddp, max_lr=1e-4, total_steps=200, sync_every=5, auto_lr=hk.HypergradientController())
    mu: list[float] = trainer.train(200).scheduler.cycle.spread.controller_state["mu"]
    return mu


@pytest.mark.full
def test_the_hypergradient_controller_works_with_shared_gradients_and_with_one_replica() -> None:
    two = run_ranks(2, _hypergradient, True)
    assert two[0] == two[1]
    assert two[0][0] > 1
    assert run_ranks(1, _hypergradient, True)[0][0] > 1


def _hypergradient_apart(rank: int) -> list[dict[str, float]]:
    trainer = Trainer(rank, total_steps=40, sync_every=2, auto_lr=False)
    hk.warm_noisy_init_(trainer.module.parameters(), nu=0.1)
    trainer.scheduler = hk.HDETOneCycleLR(
        trainer.optimizer, 0.01, total_steps=40, sync_every=2, auto_lr=hk.HypergradientController()
    )
    return [record.base for record in trainer.train(10).scheduler.history]


def test_replicas_that_start_apart_have_one_hypergradient() -> None:
    first, *others = run_ranks(3, _hypergradient_apart)
    assert len(first) == 5
    assert all(other == first for other in others)


def test_the_hypergradient_controller_refuses_local_gradients() -> None:
    with pytest.raises(AssertionError, match="needs gradients that are averaged over the replicas"):
        run_ranks(2, _hypergradient, False)


def _wrapped(rank: int) -> tuple[list[float], Tensor]:
    def cosine(optimizer: Any) -> hk.HDETScheduler:
        base = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return hk.HDETScheduler(base, sync_every=4, auto_lr=False, spread=0.5)

    trainer = Trainer(rank, make_scheduler=cosine)
    trainer.train(12)
    return [rate for (rate,) in trainer.rates], trainer.parameters()


def test_a_wrapped_scheduler_fans_out_and_converges() -> None:
    results = run_ranks(2, _wrapped)
    rates = np.array([r[0] for r in results])
    np.testing.assert_allclose(rates.mean(axis=0), [0.005 * (1 + np.cos(np.pi * t / 12)) for t in range(12)], rtol=1e-9)
    np.testing.assert_allclose(np.sort(rates / rates.mean(axis=0), axis=0), [[0.5] * 12, [1.5] * 12])
    assert all_equal([r[1] for r in results])
