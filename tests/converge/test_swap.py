"""The average of two processes by a swap: what the mean is, whose memory is sent, and that a failure is harmless."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hdet_kernels as hk
from hdet_kernels.converge import swap
from hdet_kernels.converge.swap import Swap
from hdet_kernels.converge.trade import Trade
from hdet_kernels.converge.transport import Staging, Transport
from tests.converge.dying import second_average
from tests.ranks import run_ranks

#: Elements of the tensors. Those of 300 and more are sent from their own memory here, in messages of 100 elements.
SIZES = (5, 300, 1, 17, 450, 40, 333)
ALONE, MESSAGE = 4 * 300, 4 * 100


def values(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in SIZES]


def by_hand(dtype: torch.dtype = torch.float32, first: int = 0) -> list[Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    pairs = zip(values(first, dtype), values(first + 1, dtype), strict=True)
    return [((a.to(wide) + b.to(wide)) / 2).to(dtype) for a, b in pairs]


def shrink_limits() -> None:
    swap.ALONE_BYTES, swap.MESSAGE_BYTES, swap.PACKED_BYTES = ALONE, MESSAGE, MESSAGE


def _averaged(rank: int) -> list[str]:
    """All ways to average, each compared with the mean by hand; returns what was wrong."""
    wrong = []
    ensemble, every = hk.ProcessEnsemble(), np.ones(2, dtype=bool)
    for bucket_bytes in (4 * 30, 4 * 500, 2**20):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for measured in (2, 7):
                trade, own = Trade(Transport(ensemble, bucket_bytes, None), ensemble), values(rank, dtype)
                case = f"{bucket_bytes} bytes, {dtype}, {measured} measured"
                for time in range(2):  # the second one with what the first one planned
                    for tensor, value in zip(own, values(rank, dtype), strict=True):
                        tensor.copy_(value)
                    regions = [own[:4], [own[4]], own[5:]]
                    cost, write = trade.average(regions, every, rescaled=False, measured=measured)
                    if not all(map(torch.equal, own, values(rank, dtype))):
                        wrong.append(f"{case}: something was written before the end")
                    write()
                    if not all(map(torch.equal, own, by_hand(dtype))):
                        wrong.append(f"{case}: another mean, time {time}")
                both = [torch.cat(values(r, dtype)[:measured] or [torch.zeros(1)]).double() for r in range(2)]
                norm, norms = float(((both[0] + both[1]) / 2).norm()), np.array([float(b.norm()) for b in both])
                if not math.isclose(found := trade.norm(norms), norm, rel_tol=1e-6, abs_tol=1e-12):
                    wrong.append(f"{case}: norm {found}, expected {norm}")
                wide = torch.promote_types(dtype, torch.float32).itemsize
                if cost.bytes != wide * sum(SIZES):
                    wrong.append(f"{case}: {cost}")
    return wrong


def _left_out(rank: int) -> bool:
    """With one replica left out, both take the other one."""
    ensemble, own = hk.ProcessEnsemble(), values(rank)
    trade = Trade(Transport(ensemble, 2**20, None), ensemble)
    _, write = trade.average([own], np.array([False, True]), rescaled=False, measured=0)
    write()
    return all(map(torch.equal, own, values(1)))


def _copied(rank: int) -> tuple[int, bool]:
    """The largest number of elements that was staged, and whether all large tensors were sent from their own memory."""
    ensemble, own = hk.ProcessEnsemble(), values(rank)
    lent: list[int] = []
    original, buffer = ensemble.trade, Staging.buffer
    sent: list[int] = []

    def trade(tensors: Any, places: Any) -> Any:
        sent.append(tensors[0].data_ptr())
        return original(tensors, places)

    def counted(self: Staging, bucket: Any) -> Any:
        lent.append(bucket.numel)
        return buffer(self, bucket)

    ensemble.trade = trade  # type: ignore[method-assign]
    Staging.buffer = counted  # type: ignore[method-assign]
    try:
        Swap(Transport(ensemble, 2**20, None), ensemble, keeps_memory=True).average([own], measured=0)
    finally:
        Staging.buffer = buffer  # type: ignore[method-assign]
    return sum(lent), all(tensor.data_ptr() in sent for tensor in own if tensor.nbytes >= ALONE)


def _all(rank: int) -> tuple[Any, ...]:
    shrink_limits()
    return _averaged(rank), _left_out(rank), _copied(rank)


def test_the_mean_of_two_is_exact_and_large_tensors_are_not_copied() -> None:
    for wrong, left_out, copied in run_ranks(2, _all):
        assert wrong == []
        assert left_out
        assert copied == (sum(size for size in SIZES if size < 300), True)


def _dies(rank: int, last: int, homed: bool) -> bool:
    shrink_limits()
    intact, _ = second_average(rank, last, homed, [values(rank), values(rank + 10)])
    return intact


@pytest.mark.parametrize(
    ("last", "homed"),
    [
        # Of 1 message of the handshake, 12 of large tensors in parts of 100 elements, 1 packed and 1 to confirm.
        pytest.param(15, False, id="before it confirms"),
        pytest.param(5, False, id="within a tensor", marks=pytest.mark.full),
        pytest.param(14, False, id="before what is packed", marks=pytest.mark.full),
        pytest.param(7, True, id="within a flat buffer", marks=pytest.mark.full),
    ],
)
def test_a_peer_that_dies_in_the_middle_leaves_the_parameters_of_the_last_step(last: int, homed: bool) -> None:
    intact = run_ranks(2, _dies, last, homed, expect_dead=1)
    assert intact == [True, None]
