"""Averages over NCCL: two and four ranks that share one GPU. Runs by itself: ``pytest`` with this file."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels.converge import AverageRequest, Report, converger_of
from tests.ranks import Cases, nccl_group, run_ranks

pytestmark = pytest.mark.gpu

#: Seconds that a rank waits for one that has died.
TIMEOUT = 20.0


@cache
def nccl(timeout: float = 120.0) -> hk.ProcessEnsemble:
    """Return the ensemble of all ranks over NCCL, each on the first GPU."""
    return hk.ProcessEnsemble(nccl_group(timeout))


def parameters(rank: int, seed: int = 0) -> list[nn.Parameter]:
    """Return parameters that differ between ranks, of odd sizes, in fp32 and bf16."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    shapes = [(1001,), (37, 5), (3,), (300, 301)]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(v.to("cuda", dtype)) for v, dtype in zip(values, dtypes, strict=True)]


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().cpu().clone() for tensor in tensors]


def means(ranks: Sequence[int], seed: int = 0) -> list[Tensor]:
    every = [[each.detach().float().cpu() for each in parameters(rank, seed)] for rank in ranks]
    return [torch.stack(same).mean(dim=0) for same in zip(*every, strict=True)]


def _plain(rank: int, homed: bool, backup: bool) -> Any:
    params = parameters(rank)
    converger = hk.Converger(hk.Buckets(params) if homed else params, nccl(), backup=backup, bucket_bytes=100_000)
    outcome = converger.converge(Report(step=1, loss_sum=float(rank), loss_count=1))
    return on_cpu(params), outcome.healthy.tolist(), outcome.losses.tolist(), outcome.distance, outcome.collectives


def _disagreeing(rank: int) -> Any:
    params = parameters(rank)
    before = on_cpu(params)
    with pytest.raises(RuntimeError, match="disagree on the step") as error:
        hk.Converger(params, nccl()).converge(Report(step=2 if rank == 1 else 1))
    return all(map(torch.equal, on_cpu(params), before)), str(error.value)


def _overlapped(rank: int) -> Any:
    params = parameters(rank)
    converger = hk.Converger(hk.Buckets(params), nccl())
    average = converger.start(Report(step=1))
    with torch.no_grad():
        for param in params:
            param.add_(1.0)  # the training that goes on
    outcome = converger.land(average)
    return on_cpu(params), outcome.healthy.tolist()


def _compressed(rank: int, compress: Any) -> Any:
    params = parameters(rank)
    converger = hk.Converger(hk.Buckets(params), nccl(), compress=compress)
    converger.converge(Report(step=0))  # in full
    with torch.no_grad():
        for param, own in zip(params, parameters(rank, seed=1), strict=True):
            param.add_(own * 0.01)
    outcome = converger.converge(Report(step=1))
    return on_cpu(params), outcome.bytes, outcome.collectives


def _not_finite(rank: int) -> Any:
    params = parameters(rank)
    optimizer = hk.FusedAdamW(params, lr=1e-3)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    own = on_cpu(params)
    if rank == 1:
        params[0].data[7] = torch.nan
    outcome = converger_of(optimizer, nccl()).converge(Report(step=1), AverageRequest(average_state=True))
    finite = all(bool(flat.isfinite().all()) for flat in optimizer.state_flats().values())
    return own, on_cpu(params), outcome.healthy.tolist(), finite


def _case(rank: int, name: str) -> Any:
    cases = {
        "homed": lambda: _plain(rank, True, True),
        "loose": lambda: _plain(rank, False, True),
        "homed, no backup": lambda: _plain(rank, True, False),
        "disagreement": lambda: _disagreeing(rank),
        "overlap": lambda: _overlapped(rank),
        "bf16": lambda: _compressed(rank, "bf16"),
        "int8": lambda: _compressed(rank, "int8"),
        "not finite": lambda: _not_finite(rank),
    }
    return cases[name]()


NAMES = ("homed", "loose", "homed, no backup", "disagreement", "overlap", "bf16", "int8", "not finite")
RANKS = {n: Cases(n, _case, [(name,) for name in NAMES]) for n in (2, 4)}

every_size = pytest.mark.parametrize("n", RANKS)


def check_equal(results: Sequence[list[Tensor]]) -> None:
    """Check that all ranks have the same bits."""
    assert all(torch.equal(a, b) for other in results for a, b in zip(results[0], other, strict=True))


def check_close(found: Tensor, expected: Tensor) -> None:
    half = found.dtype == torch.bfloat16  # rounded once or twice
    torch.testing.assert_close(found.float(), expected, rtol=2**-7 if half else 1e-5, atol=2**-7 if half else 1e-5)


@every_size
@pytest.mark.parametrize("name", ["homed", "loose", "homed, no backup"])
def test_replicas_become_their_mean(name: str, n: int) -> None:
    results = RANKS[n][(name,)]
    check_equal([params for params, *_ in results])
    for params, healthy, losses, distance, _ in results:
        for found, mean in zip(params, means(range(n)), strict=True):
            check_close(found, mean)
        assert healthy == [True] * n
        assert losses == list(range(n))
        assert distance == results[0][3]
        assert distance > 0.1


@every_size
def test_a_disagreement_names_the_rank_and_changes_nothing(n: int) -> None:
    results = RANKS[n][("disagreement",)]
    assert all(unchanged for unchanged, _ in results)
    assert len({message for _, message in results}) == 1
    assert "rank 1: step 2" in results[0][1]


@every_size
def test_an_overlapped_average_adds_its_correction_to_the_training_since(n: int) -> None:
    for params, healthy in RANKS[n][("overlap",)]:
        assert healthy == [True] * n
        for found, mean in zip(params, means(range(n)), strict=True):
            check_close(found, mean + 1)


@every_size
@pytest.mark.parametrize(("compress", "share"), [("bf16", 0.5), ("int8", 0.25)])
def test_compressed_averages_are_equal_everywhere_and_near_the_mean(compress: str, share: float, n: int) -> None:
    results = RANKS[n][(compress,)]
    check_equal([params for params, *_ in results])
    moved = means(range(n), seed=1)
    full = 4 * sum(mean.numel() for mean in moved)
    for params, nbytes, _ in results:
        assert nbytes < 1.3 * share * full + 4096
        for found, start, move in zip(params, means(range(n)), moved, strict=True):
            error = 2**-7 if found.dtype == torch.bfloat16 else 0.01 * 4 / (100 if compress == "int8" else 200)
            torch.testing.assert_close(found.float(), start + 0.01 * move, rtol=2**-7, atol=error)


@every_size
def test_a_replica_that_is_not_finite_is_left_out_and_takes_the_mean_of_the_others(n: int) -> None:
    results = RANKS[n][("not finite",)]
    check_equal([params for _, params, *_ in results])
    sound = [own for rank, (own, *_) in enumerate(results) if rank != 1]
    for _, params, healthy, finite in results:
        assert healthy == [rank != 1 for rank in range(n)]
        assert finite
        for found, each in zip(params, zip(*sound, strict=True), strict=True):
            mean = torch.stack([tensor.float() for tensor in each]).mean(dim=0)
            check_close(found, mean)


def _dying(rank: int) -> Any:
    ensemble, params = nccl(TIMEOUT), parameters(rank)
    converger = hk.Converger(hk.Buckets(params), ensemble, bucket_bytes=100_000)
    converger.converge(Report(step=0))
    with torch.no_grad():
        for param in params:
            param.add_(float(rank))
    before = on_cpu(params)
    if rank == 1:
        original, calls = ensemble.all_reduce, []

        def all_reduce(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        ensemble.all_reduce = all_reduce  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as error:
        converger.converge(Report(step=1))
    return all(map(torch.equal, on_cpu(params), before)), str(error.value)


@every_size
def test_a_dead_rank_is_an_error_on_the_others_with_their_parameters_intact(n: int) -> None:
    results = run_ranks(n, _dying, expect_dead=1)
    assert results[1] is None
    for unchanged, message in (result for rank, result in enumerate(results) if rank != 1):
        assert unchanged, message
        assert "rank 1 came and then gave no sign" in message
