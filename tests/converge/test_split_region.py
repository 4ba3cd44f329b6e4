"""A region of split masters: buckets of it are read and written as those of the joined masters are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hdet_kernels.converge.split_region import SplitRegion
from hdet_kernels.converge.transport import Transport
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from hdet_kernels.split_master import read_split, split
from tests.training import same


def masters(rows: int) -> Tensor:
    values = torch.arange(1.0, 8.0 * rows) / 3
    return values[: 7 * rows].view(rows, 7) if rows > 1 else values[:7]


@pytest.mark.parametrize("rows", [1, 3])
def test_buckets_are_those_of_the_joined_masters(rows: int) -> None:
    joined = masters(rows)
    region = SplitRegion(*split(joined))
    transport = Transport(SingleReplica() if rows == 1 else RowEnsemble(rows), 12, None)
    ours, plain = list(transport.cut([region])), list(transport.cut([[joined]]))
    assert [bucket.numel for _, bucket in ours] == [3, 3, 1]
    assert [bucket for _, bucket in ours] == [bucket for _, bucket in plain]
    for (_, bucket), (tensors, _) in zip(ours, plain, strict=True):
        assert transport.in_place(region, bucket) is None
        assert same(transport.first_row(region, bucket), transport.first_row(tensors, bucket))
        mean, expected = torch.empty(bucket.numel), torch.empty(bucket.numel)
        transport.mean_of_rows(region, bucket, mean)
        transport.mean_of_rows(tensors, bucket, expected)
        assert same(mean, expected)
        transport.write(region, bucket, -mean)
        transport.write(tensors, bucket, -mean)
    assert same(read_split(region.param, region.low), joined), "written in all rows"
    assert same(region.param, split(joined)[0])


@pytest.mark.parametrize("rows", [1, 3])
def test_masters_that_are_kept_are_read_and_written_in_place_of_the_halves(rows: int) -> None:
    joined = masters(rows)
    before, new = split(joined), torch.full(joined[..., 3:6].shape, 7.0)
    region = SplitRegion(*(half.clone() for half in before), {3: new})
    transport = Transport(SingleReplica() if rows == 1 else RowEnsemble(rows), 12, None)
    _, second, _ = (bucket for _, bucket in transport.cut([region]))
    assert transport.first_row(region, second).tolist() == [7.0] * 3
    assert transport.in_place(region, second) is (new if rows == 1 else None)
    transport.write(region, second, torch.tensor([1.0, 2.0, 3.0]))
    assert new.view(rows, 3).tolist() == [[1.0, 2.0, 3.0]] * rows
    assert same((region.param, region.low), before)


def test_what_is_read_is_written_to_a_given_tensor() -> None:
    joined = masters(2)
    region, transport = SplitRegion(*split(joined)), Transport(RowEnsemble(2), 100, None)
    ((_, bucket),) = transport.cut([region])
    assert same(region.joined(bucket), joined)
    out = torch.zeros(2, 7)
    assert region.joined(bucket, out) is out
    assert same(out, joined)
    assert region.first(bucket, out[1]).data_ptr() == out[1].data_ptr()
    assert same(out[1], joined[0])
