"""The transport: buckets, the order of transfers, and the mean that they make; replicas are rows or threads here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hdet_kernels.buckets import cut
from hdet_kernels.converge.transport import (
    IN_FLIGHT,
    Cost,
    Mean,
    Staging,
    Transport,
    run_transfers,
    take_first,
    take_largest,
)
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from tests.converge.threads import ThreadEnsemble, run_threads

CPU = torch.device("cpu")


def test_costs_add_up() -> None:
    assert Cost() == Cost(0, 0)
    assert Cost(3, 1) + Cost(4, 2) == Cost(7, 3)


# The order of transfers


class Log:
    """Transfers that note what happens to them; ``fails``: events that raise."""

    def __init__(self, *fails: str) -> None:
        self.events: list[str] = []
        self.fails = fails

    def note(self, event: str) -> None:
        self.events.append(event)
        if event in self.fails:
            raise RuntimeError(event)

    def transfer(self, name: str, collectives: int = 1) -> Any:
        log = self

        class Noted:
            def __init__(self, number: int) -> None:
                self.number = number

            def wait(self) -> None:
                log.note(f"{name}{self.number} ends")

        def steps() -> Iterator[Noted]:
            try:
                for number in range(collectives):
                    log.note(f"{name}{number} starts")
                    yield Noted(number)
            finally:
                log.events.append(f"{name} closed")

        return steps()


def test_two_transfers_run_at_a_time() -> None:
    log = Log()
    cost = run_transfers((log.transfer(name), 10 * number) for number, name in enumerate("abc", start=1))
    assert IN_FLIGHT == 2
    assert cost == Cost(60, 3)
    assert log.events == [
        "a0 starts", "b0 starts", "a0 ends", "a closed", "c0 starts", "b0 ends", "b closed", "c0 ends", "c closed",
    ]  # fmt: skip


def test_the_second_collective_of_a_transfer_starts_when_its_first_has_ended() -> None:
    log = Log()
    assert run_transfers([(log.transfer("a", 2), 1), (log.transfer("b", 2), 1)]) == Cost(2, 4)
    for name in "ab":
        own = [event for event in log.events if event.startswith(name)]
        assert own == [f"{name}0 starts", f"{name}0 ends", f"{name}1 starts", f"{name}1 ends", f"{name} closed"]


def test_nothing_to_do_costs_nothing() -> None:
    assert run_transfers([]) == Cost(0, 0)


@pytest.mark.parametrize("fails", ["a0 ends", "b0 starts", "b0 ends", "c0 starts"])
def test_a_failure_is_raised_when_all_that_was_started_has_ended(fails: str) -> None:
    log = Log(fails)
    with pytest.raises(RuntimeError, match=fails):
        run_transfers((log.transfer(name), 1) for name in "abc")
    started = {event[:2] for event in log.events if event.endswith("starts") and event != fails}
    ended = {event[:2] for event in log.events if event.endswith("ends")}
    assert started == ended
    assert {event[0] for event in log.events} == {event[0] for event in log.events if event.endswith("closed")} | (
        {fails[0]} if fails.endswith("ends") else set()
    )


def test_failures_of_the_others_do_not_hide_the_first() -> None:
    log = Log("a0 ends", "b0 ends")
    with pytest.raises(RuntimeError, match="a0 ends"):
        run_transfers((log.transfer(name), 1) for name in "abc")
    assert "b closed" in log.events


# Staging buffers


def test_staging_buffers_are_used_again_where_they_fit() -> None:
    staging = Staging()
    large, small, double = (
        cut([torch.ones(8)])[0],
        cut([torch.ones(3)])[0],
        cut([torch.ones(2, dtype=torch.float64)])[0],
    )
    with staging.buffer(large) as first:
        assert first.shape == (8,)
        with staging.buffer(small) as second:
            assert second.data_ptr() != first.data_ptr(), "lent"
            assert second.shape == (3,)
    with staging.buffer(small) as again:
        assert again.shape == (3,)
        assert again.data_ptr() in (first.data_ptr(), second.data_ptr())
    with staging.buffer(double) as other:
        assert other.dtype == torch.float64


# The mean


@pytest.mark.parametrize(
    ("included", "divides", "expected"),
    [
        ([True] * 4, True, Mean((True, True), "mean", 2, 1)),
        ([True] * 4, False, Mean((True, True), "sum", 1, 4)),
        ([True, True, True, False], True, Mean((True, False), "sum", 1, 3)),
        ([True, False, False, False], False, Mean((False, False), "sum", 1, 1)),
    ],
)
def test_how_a_mean_is_made(included: list[bool], divides: bool, expected: Mean) -> None:
    class Second(SingleReplica):
        size, replica = 4, 2
        rows = 2

        def averages(self, device: torch.device) -> bool:
            return divides

    assert Mean.over(np.array(included), Second(), CPU) == expected


@pytest.mark.parametrize("bucket_bytes", [4, 20, 10**6])
@pytest.mark.parametrize("included", [[True, True, True], [True, False, True]], ids=["all", "one left out"])
def test_tensors_become_their_mean_over_the_included(included: list[bool], bucket_bytes: int) -> None:
    def values(replica: int) -> list[Tensor]:
        return [torch.arange(5.0) + 30 * replica, torch.full((3,), 6.0 * replica, dtype=torch.bfloat16)]

    def run(ensemble: ThreadEnsemble) -> tuple[list[Tensor], Cost]:
        own = values(ensemble.replica)
        if not included[ensemble.replica]:
            own[0][2] = torch.nan
        return own, Transport(ensemble, bucket_bytes, None).average([[own[0]], [own[1]]], np.array(included))

    chosen = [replica for replica in range(3) if included[replica]]
    mean = sum(chosen) / len(chosen)
    for own, cost in run_threads(3, run):
        assert own[0].tolist() == (torch.arange(5.0) + 30 * mean).tolist()
        assert own[1].tolist() == [6.0 * mean] * 3
        assert own[1].dtype == torch.bfloat16
        assert cost.bytes == 4 * 8, "half precision travels as fp32"
        assert cost.collectives == {4: 8, 20: 2, 10**6: 2}[bucket_bytes]


def test_rows_become_their_mean_without_a_collective() -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 6.0], [torch.nan, 0.0]])
    cost = Transport(RowEnsemble(3), 4, None).average([[tensor]], np.array([True, True, False]))
    assert tensor.tolist() == [[2.0, 4.0]] * 3
    assert cost == Cost()


def test_one_replica_alone_is_left_as_it_is() -> None:
    tensor = torch.tensor([torch.nan])
    assert Transport(SingleReplica(), 4, None).average([[tensor]], np.array([True])) == Cost()
    assert tensor.isnan().all()


# Buckets


def test_buckets_are_views_where_they_can_be() -> None:
    transport = Transport(SingleReplica(), 8, None)
    single, half = torch.arange(3.0), torch.ones(2, dtype=torch.bfloat16)
    found = [transport.in_place(region, bucket) for region, bucket in transport.cut([[single], [half]])]
    assert [None if view is None else view.tolist() for view in found] == [[0.0, 1.0], [2.0], None]
    assert found[0] is not None
    assert found[0].data_ptr() == single.data_ptr()
    ((region, bucket),) = transport.cut([[torch.ones(1), torch.ones(1)]])
    assert transport.in_place(region, bucket) is None, "two tensors have to be packed"
    rows = Transport(RowEnsemble(2), 8, None)
    ((region, bucket),) = rows.cut([[torch.ones(2, 2)]])
    assert bucket.numel == 2, "of one row"
    assert rows.in_place(region, bucket) is None


def test_the_first_row_is_copied() -> None:
    transport = Transport(RowEnsemble(2), 100, None)
    region = [torch.tensor([[1.0, 2.0], [5.0, 6.0]]), torch.tensor([[3.0], [7.0]])]
    ((_, bucket),) = transport.cut([region])
    assert transport.first_row(region, bucket).tolist() == [1.0, 2.0, 3.0]
    out = torch.zeros(3)
    assert transport.first_row(region, bucket, out) is out
    assert out.tolist() == [1.0, 2.0, 3.0]


def test_packers_are_cached_and_their_number_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdet_kernels.converge.transport.MOST_PACKS", 2)
    transport = Transport(SingleReplica(), 100, None)
    packers = []
    for size in (1, 2, 1, 3):
        region = [torch.ones(size), torch.ones(1)]
        ((_, bucket),) = transport.cut([region])
        packers.append(transport.packer(region, bucket)[0])
    assert packers[0] is packers[2]
    assert len(transport._packs) == 1, "cleared when a third layout came"


# Integers and step counts


@pytest.mark.parametrize("included", [[True, True, True], [False, True, True]], ids=["first", "second"])
def test_integers_become_those_of_the_first_included(included: list[bool]) -> None:
    def run(ensemble: ThreadEnsemble) -> tuple[list[Any], Cost]:
        count, mask = torch.tensor(2**40 + ensemble.replica), torch.tensor([ensemble.replica == 1] * 3)
        cost = run_transfers([take_first(ensemble, [mask, count], np.array(included))])
        return [int(count) - 2**40, *mask.tolist()], cost

    first = included.index(True)
    assert run_threads(3, run) == [([first, *[first == 1] * 3], Cost(11, 1))] * 3


@pytest.mark.parametrize("first", [0, 1, 2])
def test_integers_of_rows_become_those_of_the_first_included_row(first: int) -> None:
    integers = torch.tensor([[5, 6], [7, 8], [9, 10]], dtype=torch.int16)
    run_transfers([take_first(RowEnsemble(3), [integers], np.arange(3) >= first)])
    assert integers.tolist() == [[[5, 6], [7, 8], [9, 10]][first]] * 3


def test_step_counts_become_the_largest_of_the_included() -> None:
    def run(ensemble: ThreadEnsemble) -> tuple[list[float], Cost]:
        counts = torch.tensor([[4.0, 1.0], [2.0, 3.0], [9.0, 9.0]][ensemble.replica])
        cost = run_transfers([take_largest(ensemble, counts, np.array([True, True, False]), CPU)])
        return counts.tolist(), cost

    assert run_threads(3, run) == [([4.0, 3.0], Cost(8, 1))] * 3


def test_checksums_of_what_exists_once() -> None:
    transport = Transport(RowEnsemble(2), 100, None)
    assert transport.checksum([torch.tensor([[3.0], [4.0]])], CPU).tolist() == [3.0, 4.0]
    assert float(transport.checksum_of_one([torch.tensor([3.0, 4.0])], CPU)) == 5.0
    assert list(itertools.chain(transport.cut([]))) == []
