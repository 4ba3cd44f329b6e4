"""OneCycleAutoLR: the published arguments and usage, without the published defects.

Every test named after a defect fails on the published behaviour.
"""

from __future__ import annotations

import copy
import inspect
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from hdet_kernels.compat import OneCycleAutoLR
from hdet_kernels.controller.softmax import published_decay
from tests.ranks import run_ranks
from tests.training import Trainer, batch, network, same

PUBLISHED = {
    "auto_lr_warmup_steps": 100000,
    "ensemble_lr_spread_ratio": 0.0,
    "model_sync_interval": 1000,
    "rank": 0,
    "world_size": 1,
    "enable_auto_lr": False,
    "loss_scale": 0.002,
    "lr_of_lr": 0.5,
    "momentum_of_lr": 0.9,
}


def test_arguments_are_the_published_ones_in_their_order() -> None:
    torchs = inspect.signature(torch.optim.lr_scheduler.OneCycleLR).parameters
    ours = inspect.signature(OneCycleAutoLR).parameters
    assert list(ours) == [*torchs, *PUBLISHED]
    assert {name: ours[name].default for name in PUBLISHED} == PUBLISHED
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in ours.values())


def _authors_loop(rank: int, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """The usage of the published README: DDP around the model, ``scheduler.step(loss)`` after ``optimizer.step()``."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    total_steps = options.pop("total_steps", steps)
    scheduler = OneCycleAutoLR(
        optimizer,
        max_lr=0.01,
        total_steps=total_steps,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        **{"ensemble_lr_spread_ratio": 1 / 9, "model_sync_interval": 4, "auto_lr_warmup_steps": 8, **options},
    )
    rates, parameters = [], []
    for step in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        x, y = batch(rank, step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
        parameters.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return {"rates": rates, "parameters": parameters, "history": scheduler.history}


def test_defects_1_2_and_5_without_auto_lr_there_is_a_spread_and_an_average_of_two_collectives() -> None:
    results = run_ranks(4, _authors_loop, 4, {"enable_auto_lr": False, "total_steps": 100})
    for step in range(4):
        rates = np.array([r["rates"][step] for r in results])
        np.testing.assert_allclose(sorted(rates / rates.mean()), hk.multipliers(4, 1 / 9))
        equal = [torch.equal(results[0]["parameters"][step], r["parameters"][step]) for r in results[1:]]
        assert all(equal) is (step == 3), "from the sync after the fourth step on"
    assert [r["history"][0].collectives for r in results] == [2] * 4


@pytest.mark.full
def test_defect_3_the_learning_rate_ends_at_onecycles_floor() -> None:
    """At torch's factors and K = 36 the published γ makes it grow 18 % a sync."""
    assert published_decay(25.0, 1e4, 36) == pytest.approx(-0.181, abs=1e-3)
    results = run_ranks(2, _authors_loop, 152, {"enable_auto_lr": True, "auto_lr_warmup_steps": 8, "loss_scale": 1e6})
    rates = np.mean([r["rates"] for r in results], axis=0)
    assert rates[8:].max() <= 0.01
    assert rates[-1] == pytest.approx(0.01 / 25 / 1e4, rel=0.2)


def _generators(rank: int) -> bool:
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    random.seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([param], lr=0.1)
    scheduler = OneCycleAutoLR(
        optimizer, 0.1, 20, ensemble_lr_spread_ratio=0.1, model_sync_interval=2, auto_lr_warmup_steps=4,
        enable_auto_lr=True, rank=rank, world_size=2,
    )  # fmt: skip
    for _ in range(20):
        optimizer.step()
        scheduler.step(torch.tensor(1.0 + rank))
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002
    return torch.equal(before[0], after[0]) and bool((before[1] == after[1]).all()) and before[2] == after[2]


def test_defect_4_no_global_generator_is_touched() -> None:
    assert run_ranks(2, _generators) == [True, True]


def test_the_controller_is_the_papers_with_the_published_constants() -> None:
    """η̄ after the first two active syncs, by the equations, from the losses and learning rates that were recorded."""
    results = run_ranks(4, _authors_loop, 16, {"enable_auto_lr": True, "total_steps": 40})
    first, second = (r for r in results[0]["history"] if r.step in (8, 12))
    eta, velocity, gamma = first.base["lr/0"], 0.0, None
    for record in (first, second):
        assert record.base["lr/0"] == pytest.approx(eta, rel=1e-12)
        losses, values = np.array(record.losses), np.array(record.values["lr/0"])
        gamma = 1 - (0.01 / 25 / 1e4 / eta) ** (1 / ((40 - 8) / 4)) if gamma is None else gamma
        weights = np.exp((losses.mean() - losses) / 0.002)
        weights /= weights.sum()
        velocity = 0.9 * velocity + 0.1 * ((weights * values).sum() - values.mean())
        eta = eta * (1 - gamma) + 0.5 * velocity
    np.testing.assert_allclose(np.mean([r["rates"][12] for r in results]), eta, rtol=1e-9)


def _compared(rank: int) -> dict[str, bool]:
    """Train by the published class and by the scheduler with the paper's controller; and a run that is resumed."""
    options = {"max_lr": [0.01, 0.02], "total_steps": 22}
    names = {"model_sync_interval": 4, "ensemble_lr_spread_ratio": 0.25, "auto_lr_warmup_steps": 8, "loss_scale": 0.05}

    def published() -> Trainer:
        own = {"make_scheduler": OneCycleAutoLR, "enable_auto_lr": True, **names}
        return Trainer(rank, ddp=True, groups=True, **own, **options)

    controller = hk.SoftmaxController(8, scale=0.05, rate=0.5, beta=0.9)
    ours = Trainer(rank, ddp=True, groups=True, auto_lr=controller, sync_every=4, spread=0.25, **options).train(22)
    theirs, first, second = published().train(22), published().train(10), published()
    for part in ("module", "optimizer", "scheduler"):
        getattr(second, part).load_state_dict(copy.deepcopy(getattr(first, part).state_dict()))
    second.train(12)
    scheduler = second.scheduler
    return {
        "parameters": same(ours.parameters(), theirs.parameters()),
        "rates": ours.rates == theirs.rates,
        "resumed": same(theirs.parameters(), second.parameters()),
        "resumed rates": theirs.rates[10:] == second.rates,
        "place": (scheduler.rank, scheduler.world_size) == (rank, 2),
        "attributes": (scheduler.model_sync_interval, scheduler.ensemble_lr_spread_ratio) == (4, 0.25),
    }


def test_it_is_the_scheduler_with_the_papers_controller_and_resumes_exactly() -> None:
    for found in run_ranks(2, _compared):
        assert [name for name, equal in found.items() if not equal] == []


def test_groups_of_equal_settings_have_permutations_of_their_own() -> None:
    params = [{"params": [nn.Parameter(torch.ones(3))]} for _ in range(2)]
    scheduler = OneCycleAutoLR(torch.optim.AdamW(params, lr=0.1), 0.1, 10, model_sync_interval=1)
    scheduler.optimizer.step()
    scheduler.step(1.0)
    assert list(scheduler.history[0].base) == ["lr/0", "lr/1"]


def test_one_process_works_without_a_process_group() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([param], lr=0.1)
    scheduler = OneCycleAutoLR(optimizer, 0.1, 10, ensemble_lr_spread_ratio=0.0)
    for _ in range(10):
        optimizer.step()
        scheduler.step(torch.tensor(1.0))
    with pytest.raises(ValueError, match="world_size"):
        OneCycleAutoLR(optimizer, 0.1, 10, world_size=4)
    with pytest.raises(TypeError, match="max_lr"):
        OneCycleAutoLR(optimizer, None, 10)  # type: ignore[arg-type]
