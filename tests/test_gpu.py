"""Training on a CUDA device: several ranks over gloo share it (NCCL does not allow that), or one rank over NCCL."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdet_kernels as hk
from hdet_kernels.converge import Report
from hdet_kernels.optim import FusedAdamW
from tests.ranks import run_ranks
from tests.schedule.checkpoints import SETTINGS, load, result, save
from tests.training import Trainer, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

OPTIMIZERS: dict[str, Any] = {"torch": torch.optim.AdamW, "ours": FusedAdamW}


def _make_deterministic() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)


#: Options of averaging.
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_bytes": 64},
    "int8": {"compress": "int8"},
    "overlapped": {"overlap_steps": 2},
    "int8 overlapped": {"compress": "int8", "overlap_steps": 3},
}


def _train(rank: int, kind: str, ddp: bool, mode: str) -> dict[str, Any]:
    _make_deterministic()
    options = {"make_optimizer": OPTIMIZERS[kind], "ddp": ddp, "auto_lr": False, **MODES[mode]}
    trainer = Trainer(rank, device="cuda", **options)
    within = trainer.train(3).parameters()
    synced = trainer.train(1).parameters()
    trainer.train(8)
    record = trainer.scheduler.history[0].to_dict()
    return {"within": within.cpu(), "synced": synced.cpu(), "end": trainer.parameters().cpu(), "record": record}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ddp", [True, False], ids=["shared", "local"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ranks_on_one_device_diverge_and_converge(kind: str, ddp: bool, mode: str) -> None:
    results = run_ranks(3, _train, kind, ddp, mode)
    assert not torch.equal(results[0]["within"], results[1]["within"])
    at_once = not MODES[mode].get("overlap_steps")
    assert all(torch.equal(r["synced"], results[0]["synced"]) for r in results[1:]) == at_once
    assert all(torch.equal(r["end"], results[0]["end"]) for r in results)
    assert results[0]["record"]["gradients"] == ("shared" if ddp else "local")
    on_cpu = run_ranks(3, _on_cpu, kind, ddp, mode)
    torch.testing.assert_close(results[0]["end"], on_cpu[0], rtol=1e-3, atol=1e-4)


def _on_cpu(rank: int, kind: str, ddp: bool, mode: str) -> torch.Tensor:
    options = {"make_optimizer": OPTIMIZERS[kind], "ddp": ddp, "auto_lr": False, **MODES[mode]}
    return Trainer(rank, **options).train(12).parameters()


def _interrupted(rank: int, kind: str, folder: Path) -> bool:
    _make_deterministic()
    options = {**SETTINGS, "device": "cuda", "make_optimizer": OPTIMIZERS[kind], "ddp": False}
    whole = Trainer(rank, **options)
    whole.train(12)
    save(whole, folder / f"{rank}.pt")
    expected = result(whole.train(28))
    resumed = load(Trainer(rank, **options), folder / f"{rank}.pt").train(28)
    return same({**expected, "rates": expected["rates"][12:]}, result(resumed))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_run_equals_the_uninterrupted_run(kind: str, tmp_path: Path) -> None:
    assert run_ranks(2, _interrupted, kind, tmp_path) == [True, True]


def _nccl(_: int) -> dict[str, Any]:
    dist.destroy_process_group()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        trainer = Trainer(0, device="cuda", make_optimizer=FusedAdamW, auto_lr=False)
        trainer.train(12)
        params = [torch.randn(1000, device="cuda") for _ in range(400)]
        ensemble = hk.ProcessEnsemble()
        before = [p.clone() for p in params]
        ensemble.all_reduce(params[0], "mean").wait()
        rows = ensemble.gather(torch.arange(3.0, dtype=torch.float64).view(1, 3))
        outcome = hk.Converger(params, ensemble).converge(Report(step=0))
        equal = all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        return {"equal": equal, "rows": rows.tolist(), "healthy": outcome.healthy.tolist(), "step": trainer.step}


def _nccl_modes(_: int) -> list[Any]:
    """Average in every mode with one rank: nothing changes, and the collectives run over NCCL."""
    dist.destroy_process_group()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for in_buckets in (True, False):
            for options in ({}, {"compress": "bf16"}, {"bucket_bytes": 1024}, {"backup": False}):
                params = [torch.randn(1000, device="cuda") for _ in range(7)]
                before = [p.clone() for p in params]
                converger = hk.Converger(hk.Buckets(params) if in_buckets else params, hk.ProcessEnsemble(), **options)
                counts = []
                for step in range(3):
                    counts.append(converger.converge(Report(step=step)).collectives)
                    counts.append(converger.land(converger.start(Report(step=step))).collectives)
                equal = all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
                found.append((in_buckets, options, equal, counts))
    return found


def test_all_modes_of_averaging_run_over_nccl() -> None:
    (found,) = run_ranks(1, _nccl_modes)
    for in_buckets, options, equal, counts in found:
        assert equal, (in_buckets, options)
        buckets = 7 * (1024 if in_buckets else 1000) * 4 / options.get("bucket_bytes", 2**29)
        full = 1 + int(-(-buckets // 1))
        assert counts == [full, *[3 if "compress" in options else full] * 5], (in_buckets, options)


def test_one_rank_over_nccl() -> None:
    assert run_ranks(1, _nccl) == [{"equal": True, "rows": [[[0.0, 1.0, 2.0]]], "healthy": [True], "step": 12}]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_nothing_waits_for_the_device_between_syncs(kind: str) -> None:
    trainer = Trainer(0, device="cuda", ddp=False, make_optimizer=OPTIMIZERS[kind], total_steps=100, sync_every=20)
    trainer.train(2)
    x, y = (t.cuda() for t in torch.randn(2, 8, 6).split(1))
    x, y = x[0], y[0, :, :1].contiguous()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            trainer.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(trainer.model(x), y)
            loss.backward()
            trainer.optimizer.step()
            trainer.scheduler.step(loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.step == 12


def test_warm_noisy_initialisation_is_the_same_on_any_device() -> None:
    on_cpu = [torch.nn.Parameter(torch.linspace(-1, 1, 1000).reshape(20, 50))]
    on_gpu = [torch.nn.Parameter(on_cpu[0].detach().cuda())]
    hk.warm_noisy_init_(on_cpu, seed=3)
    hk.warm_noisy_init_(on_gpu, seed=3)
    torch.testing.assert_close(on_gpu[0].detach().cpu(), on_cpu[0].detach(), rtol=1e-6, atol=1e-7)
