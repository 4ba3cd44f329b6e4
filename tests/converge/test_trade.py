"""The average over gloo in two phases: what the mean is, that all agree on it, and that a failure changes nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

import hdet_kernels as hk
from hdet_kernels.converge.trade import PACKED_BYTES, Trade
from hdet_kernels.converge.transport import Transport
from tests.converge.dying import second_average
from tests.ranks import run_ranks

#: Elements of the tensors. There are fewer than ranks in one, and no number of ranks divides them all.
SIZES = (1, 2, 100, 17, 33)


def values(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in SIZES]


def trade_of(ensemble: hk.ProcessEnsemble, bucket_bytes: int) -> Trade:
    return Trade(Transport(ensemble, bucket_bytes, None), ensemble)


def by_hand(included: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The sum in the order of the ranks, then the quotient, in float32 or float64."""
    every = [[t.to(torch.promote_types(dtype, torch.float32)) for t in values(rank, dtype)] for rank in included]
    sums = [sum(tensors[1:], start=tensors[0]) for tensors in zip(*every, strict=True)]
    return [(total / len(included)).to(dtype) for total in sums]


def own_norms(included: list[int], dtype: torch.dtype) -> NDArray[np.float64]:
    """The norms of the first four tensors of every rank."""
    every = [values(rank, dtype)[:4] for rank in included]
    return np.array([math.sqrt(sum(float(t.double().square().sum()) for t in own)) for own in every])


def _averaged(rank: int) -> list[str]:
    """All ways to average, each compared with the mean by hand; returns what was wrong."""
    ensemble, size, wrong = hk.ProcessEnsemble(), dist.get_world_size(), []
    for bucket_bytes in (20, 100, 2**20):
        for included in (list(range(size)), [size - 1], list(range(1, size))):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                trade, own = trade_of(ensemble, bucket_bytes), values(rank, dtype)
                mask = np.isin(np.arange(size), included)
                regions = [own[:3], [own[3]], [own[4]]]
                cost, write = trade.average(regions, mask, rescaled=False, measured=4)
                case = f"{bucket_bytes} bytes, {included}, {dtype}"
                if not all(map(torch.equal, own, values(rank, dtype))):
                    wrong.append(f"{case}: something was written before the end")
                write()
                expected = by_hand(included, dtype)
                if not all(map(torch.equal, own, expected)):
                    wrong.append(f"{case}: another mean")
                norm = math.sqrt(sum(float(t.double().square().sum()) for t in expected[:4]))
                found = trade.norm(own_norms(included, dtype))
                if not math.isclose(found, norm, rel_tol=1e-2 if dtype == torch.bfloat16 else 1e-6):
                    wrong.append(f"{case}: norm {found}, expected {norm}")
                wide = torch.promote_types(dtype, torch.float32).itemsize
                if cost.bytes != wide * sum(SIZES):
                    wrong.append(f"{case}: {cost}")
    return wrong


def _huge(rank: int) -> list[float]:
    """The largest numbers: their sum is not finite, their mean is."""
    own = [torch.full((5,), torch.finfo(torch.float32).max), torch.full((3,), 1.0 + rank)]
    trade = trade_of(hk.ProcessEnsemble(), 2**20)
    _, write = trade.average([own], np.ones(3, dtype=bool), rescaled=True, measured=0)
    write()
    return [*own[0].tolist(), *own[1].tolist()]


def _memory(rank: int) -> list[bool]:
    """The memory of the means stays from one average to the next, and is given up after a failure."""
    ensemble = hk.ProcessEnsemble()
    trade, own, every = trade_of(ensemble, 2**20), values(rank), np.ones(3, dtype=bool)
    trade.average([own], every, rescaled=False, measured=0)
    first = [tensor.data_ptr() for tensor in trade._room._kept]
    trade.average([own], every, rescaled=False, measured=0)
    kept = [tensor.data_ptr() for tensor in trade._room._kept] == first
    original, calls = ensemble.trade, []

    def failing(sent: Any, received: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("cable")
        return original(sent, received)

    ensemble.trade = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="cable"):
        trade.average([own], every, rescaled=False, measured=0)
    ensemble.trade = original  # type: ignore[method-assign]
    given_up, intact = trade._room._kept == [], all(map(torch.equal, own, values(rank)))
    _, write = trade.average([own], every, rescaled=False, measured=0)  # on all ranks: they are still in step
    write()
    return [kept, given_up, intact, all(map(torch.equal, own, by_hand([0, 1, 2])))]


def _interrupted(rank: int) -> bool:
    """An interrupt while the means are written: nothing is left half written."""
    own = values(rank)
    trade = trade_of(hk.ProcessEnsemble(), 100)
    _, write = trade.average([own], np.ones(3, dtype=bool), rescaled=False, measured=0)
    original, calls = trade._write, []

    def interrupted(*args: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        original(*args)

    trade._write = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        write()
    return all(map(torch.equal, own, by_hand([0, 1, 2])))


def _all(rank: int) -> tuple[Any, ...]:
    return _averaged(rank), _huge(rank), _memory(rank), _interrupted(rank)


def test_the_mean_is_exact_equal_on_all_ranks_and_written_all_at_once() -> None:
    for wrong, huge, memory, interrupted in run_ranks(3, _all):
        assert wrong == []
        assert huge == [torch.finfo(torch.float32).max] * 5 + [2.0] * 3
        assert memory == [True, True, True, True]
        assert interrupted


def _dies(rank: int, last: int, homed: bool) -> dict[str, Any]:
    intact, message = second_average(rank, last, homed, [values(rank), values(rank + 10)], bucket_bytes=40)
    return {"intact": intact, "message": message}


@pytest.mark.parametrize(
    ("last", "homed"),
    [
        pytest.param(6, True, id="between buckets"),
        pytest.param(1, False, id="at once", marks=pytest.mark.full),
        pytest.param(7, False, id="within a round", marks=pytest.mark.full),
        # Some 20 buckets of two rounds to two ranks each.
        pytest.param(4 * 15, True, id="last bucket", marks=pytest.mark.full),
    ],
)
def test_a_peer_that_dies_in_the_middle_leaves_the_parameters_of_the_last_step(last: int, homed: bool) -> None:
    results = run_ranks(3, _dies, last, homed, expect_dead=1)
    assert results[1] is None
    assert [result["intact"] for result in (results[0], results[2])] == [True, True], results


def test_packed_buckets_are_small_and_others_as_large_as_allowed() -> None:
    trade = trade_of(hk.ensemble.SingleReplica(), 4 * PACKED_BYTES)  # type: ignore[arg-type]
    one, two = [torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]
    assert (trade._bucket_bytes(one), trade._bucket_bytes(two)) == (4 * PACKED_BYTES, PACKED_BYTES)
    assert not trade_of(hk.ensemble.SingleReplica(), 2).fits([one]), "there is nobody to trade with"
