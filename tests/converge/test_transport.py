"""The transport: buckets, the order of transfers, and the mean that they make, also of huge values."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hdet_kernels import Buckets, Converger, ProcessEnsemble
from hdet_kernels.converge import Report
from hdet_kernels.converge.plan import AverageRequest, decide
from hdet_kernels.converge.transport import (
    IN_FLIGHT,
    Averaged,
    Cost,
    Mean,
    Transport,
    run_transfers,
    take_first,
    take_largest,
)
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from hdet_kernels.ops.operators import why_not
from tests.converge.agreements import agreement
from tests.converge.threads import ThreadEnsemble, run_threads
from tests.ranks import Cases

CPU = torch.device("cpu")


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

        def steps() -> Generator[Noted, None, Callable[[], None]]:
            try:
                for number in range(collectives):
                    log.note(f"{name}{number} starts")
                    yield Noted(number)
                return lambda: log.events.append(f"{name} written")
            finally:
                log.events.append(f"{name} closed")

        return steps()


def test_two_transfers_run_at_a_time() -> None:
    log = Log()
    cost = run_transfers((log.transfer(name), 10 * number) for number, name in enumerate("abc", start=1))
    assert IN_FLIGHT == 2
    assert cost == Cost(60, 3)
    assert log.events == [
        "a0 starts", "b0 starts", "a0 ends", "a closed", "a written", "c0 starts", "b0 ends", "b closed", "b written",
        "c0 ends", "c closed", "c written",
    ]  # fmt: skip


def test_writes_can_be_deferred_and_are_completed_even_if_they_are_interrupted() -> None:
    log, writes = Log(), list[Any]()
    run_transfers([(log.transfer(name), 1) for name in "ab"], writes)
    assert not any("written" in event for event in log.events)

    def interrupted() -> None:
        log.events.append("interrupted")
        if log.events.count("interrupted") == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Transport(SingleReplica(), 8, None).write([writes[0], interrupted, writes[1]])
    assert log.events[-4:] == ["b written", "interrupted", "a written", "interrupted"]


def test_the_second_collective_of_a_transfer_starts_when_its_first_has_ended() -> None:
    log = Log()
    assert run_transfers([(log.transfer("a", 2), 1), (log.transfer("b", 2), 1)]) == Cost(2, 4)
    for name in "ab":
        own = [event for event in log.events if event.startswith(name)]
        assert own == [
            f"{name}0 starts",
            f"{name}0 ends",
            f"{name}1 starts",
            f"{name}1 ends",
            f"{name} closed",
            f"{name} written",
        ]


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
        return own, Transport(ensemble, bucket_bytes, None).average([[own[0]], [own[1]]], np.array(included)).cost

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
    averaged = Transport(RowEnsemble(3), 4, None).average([[tensor]], np.array([True, True, False]), measured=1)
    assert tensor.tolist() == [[2.0, 4.0]] * 3
    assert averaged == Averaged(Cost(), {0: 4.0, 1: 16.0})
    assert averaged.norm == pytest.approx(20.0**0.5, rel=1e-15)


@pytest.mark.parametrize("included", [[True, True, True], [True, False, True]], ids=["all", "one_left_out"])
@pytest.mark.parametrize("sizes", [(100,), (5000, 6000)], ids=["whole", "pieces"])
@pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")
def test_staged_copies_give_the_bits_of_an_average_without_them(sizes: tuple[int, ...], included: list[bool]) -> None:
    def run(ensemble: ThreadEnsemble) -> tuple[list[Tensor], list[Tensor], list[float]]:
        generator = torch.Generator().manual_seed(ensemble.replica)
        own = [torch.randn(size, generator=generator) for size in sizes]
        if not included[ensemble.replica]:
            own[0][2] = torch.nan
        plain = [tensor.clone() for tensor in own]
        transport, writes, kept = Transport(ensemble, 40_000, None), [], [tensor.clone() for tensor in own]
        staged = transport.stage([own])
        assert staged is not None
        norm = torch.cat(own).double().norm()
        assert staged.norm.item() == pytest.approx(norm.item(), rel=1e-14, nan_ok=True)
        arguments = {"included": np.array(included), "measured": len(sizes)}
        averaged = transport.average([own], **arguments, writes=writes, staged=staged)
        assert all(map(torch.equal, map(Tensor.nan_to_num, own), map(Tensor.nan_to_num, kept)))
        transport.write(writes)
        assert not transport.staging.lent
        return own, plain, [averaged.norm, transport.average([plain], **arguments).norm]

    found = run_threads(3, run)
    for own, plain, norms in found:
        assert all(map(torch.equal, own, plain))
        assert all(map(torch.equal, own, found[0][0]))
        assert norms == [found[0][2][0]] * 2
        assert norms[0] == pytest.approx(torch.cat(own).double().norm().item(), rel=1e-14)


@pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")
def test_what_was_staged_in_vain_is_free_again() -> None:
    def run(ensemble: ThreadEnsemble) -> bool:
        own, other = torch.ones(10), torch.full((10,), 1.0 + ensemble.replica)
        transport = Transport(ensemble, 16_000, None)
        transport.average([[other]], np.array([True] * 3), writes=[], staged=transport.stage([[own]]))
        assert transport.stage([[torch.ones(5, dtype=torch.float64)]]) is None
        return transport.staging.lent

    assert run_threads(3, run) == [False] * 3


def test_one_replica_alone_is_left_as_it_is() -> None:
    tensor = torch.tensor([torch.nan])
    assert Transport(SingleReplica(), 4, None).average([[tensor]], np.array([True])).cost == Cost()
    assert tensor.isnan().all()


# Buckets


def test_the_first_row_is_copied() -> None:
    transport = Transport(RowEnsemble(2), 100, None)
    region = [torch.tensor([[1.0, 2.0], [5.0, 6.0]]), torch.tensor([[3.0], [7.0]])]
    ((_, bucket),) = transport.cut([region])
    assert transport.first_row(region, bucket).tolist() == [1.0, 2.0, 3.0]
    out = torch.zeros(3)
    assert transport.first_row(region, bucket, out) is out
    assert out.tolist() == [1.0, 2.0, 3.0]


def test_buckets_and_packers_are_cached_and_their_number_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdet_kernels.converge.transport.MOST_CACHED", 2)
    transport = Transport(SingleReplica(), 100, None)
    found = []
    for size, dtype in ((1, torch.float32), (1, torch.float64), (1, torch.float32), (3, torch.float32)):
        region = [torch.ones(size, dtype=dtype), torch.ones(1, dtype=dtype)]
        ((_, bucket),) = transport.cut([region])
        assert (bucket.numel, bucket.dtype) == (size + 1, dtype)
        found.append((bucket, transport._packer(region, bucket)[0]))
    assert found[0] == found[2]
    assert len(transport._cuts) == len(transport._packs) == 1, "cleared when a third layout came"


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
    assert list(transport.cut([])) == []


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
