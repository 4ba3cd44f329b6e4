"""All ranks get the same bits from torch's own collectives over gloo: averages rely on it."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist

from hdet_kernels import Buckets, Converger, ProcessEnsemble
from hdet_kernels.converge import Report
from tests.ranks import Cases

# Sizes below, at and above the segments that gloo cuts a tensor into; odd ones divide by no number of ranks.
SIZES = (1, 3, 1023, 100_003, 1_000_003)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)


def reduced(rank: int, dtype: torch.dtype) -> list[bytes]:
    """Return hashes of sums and of largest values, of numbers so different that the order of summation shows."""
    found = []
    for size in SIZES:
        generator = torch.Generator().manual_seed(100 * size + rank)
        values = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-3, 4, (size,), generator=generator)
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            tensor = (values.abs() * 7 if not dtype.is_floating_point else values).clamp(-60000, 60000).to(dtype)
            dist.all_reduce(tensor, op=operation)
            found.append(hashlib.blake2b(tensor.view(torch.uint8).numpy().tobytes()).digest())
    return found


RANKS = {n: Cases(n, reduced, [(dtype,) for dtype in DTYPES]) for n in (2, 3, 4)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 4))])
def test_all_reduce_has_equal_bits_on_all_ranks(ranks: int, dtype: torch.dtype) -> None:
    first, *others = RANKS[ranks][(dtype,)]
    assert all(other == first for other in others)
    assert len(set(first[4:])) == 2 * len(SIZES[2:])  # short integers may all be equal


def recorded(rank: int, homed: bool) -> list[tuple[float | None, bytes]]:
    """Return the distance that a sync records and a hash of the parameters after it, with a backup and without."""
    found = []
    for backup in (True, False):
        generator = torch.Generator().manual_seed(rank)
        params = [torch.randn(size, generator=generator) for size in (100_003, 70_000, 5)]
        converger = Converger(Buckets(params) if homed else params, ProcessEnsemble(), backup=backup)
        distance = converger.converge(Report(step=0)).distance
        found.append((distance, torch.cat([param.flatten() for param in params]).numpy().tobytes()))
    return found


RECORDED = Cases(3, recorded, [(True,), (False,)])


@pytest.mark.parametrize("homed", [True, False], ids=["buckets", "loose"])
def test_a_sync_records_the_same_bits_with_a_backup_and_without(homed: bool) -> None:
    for kept, in_place in RECORDED[(homed,)]:
        assert kept[0] is not None
        assert kept == in_place
