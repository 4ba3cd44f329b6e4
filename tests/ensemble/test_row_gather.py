"""The gather of rows: the same bits as an all-gather, in the messages that the cost model counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.cost_model import ROW_BYTES, exchanges
from hdet_kernels.ensemble import ProcessEnsemble
from hdet_kernels.ensemble.row_gather import gather_by_doubling, gather_by_sum, grid
from tests.ranks import run_ranks
from tests.threaded_ranks import run_threads


@pytest.mark.parametrize(
    ("processes", "dimensions"), [(1, [1]), (2, [1, 2]), (3, [3]), (12, [3, 2, 2]), (1000, [125, 2, 2, 2])]
)
def test_the_grid(processes: int, dimensions: list[int]) -> None:
    assert grid(processes) == dimensions
    # Rounding up the odd factor alone costs no hop more than rounding up the whole.
    hops = sum(math.ceil(math.log2(size)) for size in dimensions)
    assert hops == math.ceil(math.log2(processes))


def _own_row(rank: int) -> Tensor:
    """Return a row of 20 numbers: special ones, and one that tells whose it is."""
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 2.0**48 - 1, float(rank)]
    row = torch.tensor(special, dtype=torch.float64)
    payloads = torch.tensor([0x7FF8000000000001 + rank, -0x7FFFFFFFFFF0 - rank, 0x7FF0000000000001], dtype=torch.int64)
    return torch.cat([row, payloads.view(torch.float64), torch.full((9,), math.pi * rank, dtype=torch.float64)])


def _bits(row: Tensor) -> Tensor:
    return row.contiguous().view(torch.uint8)


def _gathered(rank: int) -> list[bool]:
    """Return, by kind of row and way to gather it, whether the bits are those of torch's all-gather."""
    size = dist.get_world_size()
    found = []
    for row in (_own_row(rank), _own_row(rank).float(), torch.arange(7, dtype=torch.uint8) + rank, torch.ones(1)):
        parts = [torch.empty_like(row) for _ in range(size)]
        dist.all_gather(parts, row)
        expected = torch.stack([_bits(part) for part in parts])
        by_sum = gather_by_sum(row, rank, size, dist.all_reduce)
        by_pairs = ProcessEnsemble().gather(row[None])
        assert by_sum.dtype == by_pairs.dtype == row.dtype
        assert by_pairs.shape == (size, 1, len(row)) == (by_sum.shape[0], 1, by_sum.shape[1])
        found += [torch.equal(_bits(by_sum), expected), torch.equal(_bits(by_pairs.flatten(1)), expected)]
    return found


@pytest.mark.parametrize(
    "ranks", [3, pytest.param(8, marks=pytest.mark.full), pytest.param(12, marks=pytest.mark.full)]
)
def test_all_bits_arrive_over_gloo(ranks: int) -> None:
    assert run_ranks(ranks, _gathered) == [[True] * 8] * ranks


def _numbered(rank: int) -> bool:
    gathered = ProcessEnsemble().gather(torch.full((1, ROW_BYTES // 8), float(rank), dtype=torch.float64))
    return gathered[:, 0].tolist() == [[float(number)] * (ROW_BYTES // 8) for number in range(len(gathered))]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 8, 12, 24, 33, 96])
def test_messages_are_those_of_the_cost_model(ranks: int) -> None:
    found, traffic = run_threads(ranks, _numbered)
    assert found == [True] * ranks
    for node in (1, 4, 8):
        if ranks % node:
            continue
        expected = exchanges(ranks, node)
        for rank in range(ranks):
            near = [size for to, size in traffic.messages[rank] if to // node == rank // node]
            far = [size for to, size in traffic.messages[rank] if to // node != rank // node]
            assert (len(far), len(near)) == (expected.outside, expected.inside)
            assert (sum(far), sum(near)) == (ROW_BYTES * expected.rows_outside, ROW_BYTES * expected.rows_inside)


def test_a_sum_is_one_all_reduce_of_the_table() -> None:
    def of_rank(rank: int) -> list[Any]:
        gathered = gather_by_sum(_own_row(rank), rank, dist.get_world_size(), dist.all_reduce)
        return [torch.equal(_bits(row), _bits(_own_row(number))) for number, row in enumerate(gathered)]

    found, traffic = run_threads(64, of_rank)
    assert found == [[True] * 64] * 64
    assert not traffic.messages
    assert traffic.all_reduced == [64 * len(_bits(_own_row(0)))]


def test_a_row_alone_needs_no_message() -> None:
    row = _own_row(0)
    for gathered in (gather_by_doubling(row, 0, 1, _no_message), gather_by_sum(row, 0, 1, lambda table: table)):
        assert torch.equal(_bits(gathered[0]), _bits(row))


def _no_message(*_: Any) -> None:
    raise AssertionError("a process alone has nobody to send to")
