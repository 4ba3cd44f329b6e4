"""Means of huge finite values are finite, although their sum is not: in rows, over ranks, compressed or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hdet_kernels import Buckets, Converger, ProcessEnsemble
from hdet_kernels.converge import Report
from hdet_kernels.converge.plan import AverageRequest, decide
from hdet_kernels.converge.transport import Transport
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from tests.converge.agreements import agreement
from tests.ranks import Cases

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def huge(dtype: torch.dtype) -> float:
    return {torch.float64: 1.5e308, torch.float16: 6e4}.get(dtype, 2e38)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", DTYPES)
def test_a_mean_of_finite_rows_is_finite(name: str, device: str) -> None:
    dtype = DTYPES[name]
    largest = torch.finfo(dtype).max
    for count in range(2, 12):
        rows = torch.tensor([[largest, -largest, 3.0]] * count, dtype=dtype, device=device)
        rows[0, 2] = 3.0 + count
        expected = torch.tensor([[largest, -largest, 4.0]] * count, dtype=dtype)
        Transport(RowEnsemble(count), 8, None).average([[rows]], np.ones(count, dtype=bool), rescaled=True)
        torch.testing.assert_close(rows.cpu(), expected)


def test_rescaled_means_are_bit_for_bit_those_of_a_plain_sum() -> None:
    for count in (2, 3, 5, 8):
        plain = torch.randn(count, 1000) * torch.logspace(-20, 20, 1000)
        rescaled = plain.clone()
        included = np.arange(count) != 1 if count > 2 else np.ones(count, dtype=bool)
        for tensor, choice in ((plain, False), (rescaled, True)):
            Transport(RowEnsemble(count), 2**20, None).average([[tensor]], included, rescaled=choice)
        assert torch.equal(plain, rescaled)


def test_huge_values_are_rescaled_and_travel_in_full() -> None:
    plan = decide(agreement(may_overflow=True), AverageRequest(), merge="mean", compresses=True)
    assert (plan.rescaled, plan.compressed, plan.remembered) == (True, False, True)
    assert not decide(agreement(), AverageRequest(), merge="mean", compresses=True).rescaled


def _averaged(rank: int, dtype: str, homed: bool, rows: int, compress: Any) -> tuple[list[Any], list[bool]]:
    """Average twice: ordinary values, then huge ones with one that tells the replicas apart."""
    kind = DTYPES[dtype]
    ensemble = RowEnsemble(rows, ProcessEnsemble()) if rows > 1 else ProcessEnsemble()
    shape = (rows, 2) if rows > 1 else (2,)
    params = [nn.Parameter(torch.zeros(shape, dtype=kind)), nn.Parameter(torch.ones(shape, dtype=kind))]
    converger = Converger(Buckets(params) if homed else params, ensemble, compress=compress)
    converger.converge(Report(step=1))
    with torch.no_grad():
        params[0].fill_(huge(kind))
        params[1].fill_(-huge(kind))
        params[1][..., 1] = float(rank)
    outcome = converger.converge(Report(step=2))
    return [param.tolist() for param in params], outcome.healthy.tolist()


OVER_RANKS = Cases(
    3,
    _averaged,
    [
        ("fp32", True, 1, None),
        ("fp32", False, 1, None),
        ("fp32", False, 2, None),
        ("fp32", False, 2, "int8"),
        ("fp32", True, 1, "bf16"),
        ("bf16", False, 1, None),
        ("fp16", False, 2, None),
        ("fp64", False, 1, None),
    ],
)


@pytest.mark.parametrize(("dtype", "homed", "rows", "compress"), OVER_RANKS.params())
def test_the_mean_of_huge_finite_replicas_is_finite(dtype: str, homed: bool, rows: int, compress: Any) -> None:
    kind = DTYPES[dtype]
    large = torch.tensor(huge(kind), dtype=kind).item()
    for values, healthy in OVER_RANKS[dtype, homed, rows, compress]:
        expected = [[large, large], [-large, 1.0]]
        assert values == (expected if rows == 1 else [[each] * rows for each in expected])
        assert healthy == [True] * 3 * rows


def test_one_replica_alone_keeps_huge_values() -> None:
    param = nn.Parameter(torch.tensor([3e38]))
    Converger([param], SingleReplica()).converge(Report(step=1))
    assert param.item() == torch.tensor(3e38).item()
