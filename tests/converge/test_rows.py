"""Several replicas in one process, as the rows of its tensors: their mean is that of as many processes, at the cost of
one row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_kernels import Converger, ProcessEnsemble
from hdet_kernels.converge import AverageRequest, Report
from hdet_kernels.converge.handshake import COLUMNS
from hdet_kernels.ensemble import RowEnsemble
from tests.converge.rounding import EPS, most_owed
from tests.ranks import Cases, run_ranks

ROWS, PROCESSES = 2, 2
REPLICAS = ROWS * PROCESSES
HANDSHAKE_BYTES = 8 * len(COLUMNS)
#: By name, the shape of one row and the dtype.
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "matrix": ((37, 5), torch.float32),
    "vector": ((300,), torch.float32),
    "scalar": ((), torch.float32),
    "half": ((33,), torch.bfloat16),
    "wide": ((9,), torch.float64),
    "state": ((37, 5), torch.float32),
    "buffer": ((6,), torch.float32),
}
PARAMS = ("matrix", "vector", "scalar", "half", "wide")
#: What travels for one row: half precision as fp32.
ROW_BYTES = sum((8 if dtype == torch.float64 else 4) * math.prod(shape) for shape, dtype in SHAPES.values())
Tensors = dict[str, Tensor]


def replica(number: int, sync: int = 0) -> Tensors:
    """The numbers of one replica."""
    generator = torch.Generator().manual_seed(100 * number + sync)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def stacked(rows: list[Tensors]) -> Tensors:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def converger_of(own: Tensors, ensemble: Any, integers: tuple[Tensor, ...] = (), **options: Any) -> Converger:
    return Converger(
        [own[name] for name in PARAMS],
        ensemble,
        state=lambda: {"moment": own["state"]},
        buffers=lambda: [own["buffer"], *integers],
        **options,
    )


def check_mean(found: Tensor, values: list[Tensor], name: str) -> None:
    """The mean of the values, formed in fp32 (or fp64) and rounded once to the dtype."""
    mean = torch.stack([value.double() for value in values]).mean(dim=0)
    largest = float(torch.stack([value.double() for value in values]).abs().max())
    sums = len(values) * (2.0**-53 if found.dtype == torch.float64 else EPS) * largest
    rounding = 2.0**-8 * (largest + sums) if found.dtype == torch.bfloat16 else 0.0
    assert float((found.double() - mean).abs().max()) <= sums + rounding, name


def own_rows(process: int) -> list[int]:
    return list(range(ROWS * process, ROWS * (process + 1)))


# The mean


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_rows_of_one_process_become_their_mean(rows: int) -> None:
    replicas = [replica(number) for number in range(rows)]
    own = stacked(replicas)
    outcome = converger_of(own, RowEnsemble(rows), bucket_bytes=256).converge(
        Report(step=1), AverageRequest(average_state=True)
    )
    assert outcome.healthy.tolist() == [True] * rows
    for name, tensor in own.items():
        for row in tensor:
            assert torch.equal(row, tensor[0]), name
            check_mean(row, [each[name] for each in replicas], name)


def test_rows_of_one_process_send_nothing() -> None:
    outcome = converger_of(stacked([replica(0), replica(1)]), RowEnsemble(2)).converge(Report(step=1))
    assert (outcome.bytes, outcome.collectives) == (0, 0)


def _in_rows(rank: int) -> tuple[Tensors, int, int]:
    own = stacked([replica(number) for number in own_rows(rank)])
    converger = converger_of(own, RowEnsemble(ROWS, ProcessEnsemble()), bucket_bytes=256)
    outcome = converger.converge(Report(step=1), AverageRequest(average_state=True))
    return own, outcome.bytes, outcome.collectives


def _in_processes(rank: int) -> tuple[Tensors, int, int]:
    own = replica(rank)
    outcome = converger_of(own, ProcessEnsemble(), bucket_bytes=256).converge(
        Report(step=1), AverageRequest(average_state=True)
    )
    return own, outcome.bytes, outcome.collectives


def test_rows_of_several_processes_are_as_many_processes() -> None:
    in_rows, in_processes = run_ranks(PROCESSES, _in_rows), run_ranks(REPLICAS, _in_processes)
    replicas = [replica(number) for number in range(REPLICAS)]
    for name in SHAPES:
        for own, _, _ in in_rows:
            for row in own[name]:
                assert torch.equal(row, in_rows[0][0][name][0]), "all rows of all processes are equal"
        check_mean(in_rows[0][0][name][0], [each[name] for each in replicas], name)
        check_mean(in_processes[0][0][name], [each[name] for each in replicas], name)
    assert [sent for _, sent, _ in in_rows] == [ROW_BYTES + ROWS * HANDSHAKE_BYTES] * PROCESSES, "one row, not all"
    assert [sent for _, sent, _ in in_processes] == [ROW_BYTES + HANDSHAKE_BYTES] * REPLICAS
    assert in_rows[0][2] == in_processes[0][2], "as many collectives"


# Rows that are not finite


def _sick(rank: int, what: str, bad: tuple[int, ...]) -> tuple[Tensors, list[bool], list[float], list[int]]:
    replicas = [replica(number) for number in own_rows(rank)]
    integers = torch.tensor([[10 * number, 1] for number in own_rows(rank)])
    losses = torch.tensor([float(number) for number in own_rows(rank)])
    for index, number in enumerate(own_rows(rank)):
        if number in bad and what == "loss":
            losses[index] = math.nan
        elif number in bad:
            replicas[index][what].view(-1)[-1] = math.inf
    own = stacked(replicas)
    ensemble = RowEnsemble(ROWS, ProcessEnsemble())
    converger = converger_of(own, ensemble, (integers,), bucket_bytes=256)
    outcome = converger.converge(Report(step=1, loss_sum=losses, loss_count=1))
    return own, outcome.healthy.tolist(), outcome.losses.tolist(), integers.tolist()


BAD = [(0,), (1, 2), (0, 1), (0, 2, 3)]
SICK = Cases(PROCESSES, _sick, [(what, bad) for what in ("loss", "matrix", "state") for bad in BAD])


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("what", ["loss", "matrix", "state"])
def test_rows_that_are_not_finite_are_left_out_and_healed(what: str, bad: tuple[int, ...]) -> None:
    results = SICK[what, bad]
    good = [number for number in range(REPLICAS) if number not in bad]
    for own, healthy, losses, integers in results:
        assert healthy == [number in good for number in range(REPLICAS)]
        for number, loss in enumerate(losses):
            assert math.isnan(loss) if what == "loss" and number in bad else loss == float(number)
        for name, tensor in own.items():
            for row in tensor:
                assert torch.equal(row, results[0][0][name][0]), name
            check_mean(tensor[0], [replica(number)[name] for number in good], name)
        assert integers == [[10 * good[0], 1]] * ROWS, "of the first sound row"


def test_when_all_rows_are_bad_nothing_is_overwritten() -> None:
    own = stacked([replica(number) for number in range(3)])
    before = {name: tensor.clone() for name, tensor in own.items()}
    report = Report(step=7, loss_sum=torch.full((3,), math.nan), loss_count=1)
    with pytest.raises(RuntimeError, match=r"no replica is sound at step 7; not finite: the loss on replicas 0, 1, 2"):
        converger_of(own, RowEnsemble(3)).converge(report)
    assert all(torch.equal(own[name], before[name]) for name in own)


# Integer buffers


def test_integers_of_rows_that_agree_stay() -> None:
    own = stacked([replica(number) for number in range(2)])
    integers = torch.tensor([[5, 6], [5, 6]])
    converger_of(own, RowEnsemble(2), (integers,)).converge(Report(step=1))
    assert integers.tolist() == [[5, 6], [5, 6]]


def _same_rows(rank: int) -> list[int]:
    own = stacked([replica(number) for number in own_rows(rank)])
    integers = torch.tensor([[5], [7]])
    converger_of(own, RowEnsemble(ROWS, ProcessEnsemble()), (integers,)).converge(Report(step=1))
    return integers.view(-1).tolist()


def test_integers_of_rows_that_differ_within_a_process_become_the_first() -> None:
    assert run_ranks(PROCESSES, _same_rows) == [[5, 5]] * PROCESSES


def test_integers_of_rows_of_the_only_process_become_the_first() -> None:
    own = stacked([replica(number) for number in range(3)])
    integers = torch.tensor([[5], [7], [9]])
    converger_of(own, RowEnsemble(3), (integers,)).converge(Report(step=1))
    assert integers.tolist() == [[5]] * 3


# Consensus, overlap and compression


def _modes(rank: int, compress: Any) -> list[dict[str, Any]]:
    """Three averages; with a look at the consensus before each."""
    own = {"weights": torch.stack([replica(number)["vector"] for number in own_rows(rank)])}
    ensemble = RowEnsemble(ROWS, ProcessEnsemble())
    converger = Converger(list(own.values()), ensemble, bucket_bytes=256, compress=compress)
    found = []
    for sync in range(3):
        for index, number in enumerate(own_rows(rank)):
            own["weights"][index] += 0.01 * replica(number, 1 + sync)["vector"]
        before = own["weights"].clone()
        with converger.consensus(Report(step=sync)):
            inside = own["weights"].clone()
        assert torch.equal(own["weights"], before), "every row has its own again"
        outcome = converger.converge(Report(step=sync))
        found.append(
            {"before": before, "inside": inside, "after": own["weights"].clone(), "collectives": outcome.collectives}
        )
    return found


MODES = Cases(PROCESSES, _modes, [(compress,) for compress in (None, "bf16", "int8")])


@pytest.mark.parametrize("compress", [None, "bf16", "int8"])
def test_rows_are_compressed_as_one(compress: str | None) -> None:
    results = MODES[(compress,)]
    buckets = math.ceil(4 * 300 / 256)
    largest = 0.0
    for sync in range(3):
        now = [result[sync] for result in results]
        rows = [row for r in now for row in r["before"]]
        for name in ("inside", "after"):
            for r in now:
                for row in r[name]:
                    assert torch.equal(row, now[0][name][0]), (sync, name)
        check_mean(now[0]["inside"][0], rows, "the consensus is in full")
        if compress is None or sync == 0:
            check_mean(now[0]["after"][0], rows, f"sync {sync}")
            assert now[0]["collectives"] == 1 + buckets
            continue
        # A process sends the mean of its rows, which is no further from the consensus than the furthest of them.
        consensus = results[0][sync - 1]["after"][0]
        largest = max(largest, *(float((row - consensus).abs().max()) for row in rows))
        mean = torch.stack(rows).double().mean(dim=0)
        off = float((now[0]["after"][0].double() - mean).abs().max())
        assert off <= 2 * most_owed(compress, largest) + 2 * REPLICAS * EPS * float(torch.stack(rows).abs().max())
        assert now[0]["collectives"] == 1 + 2 * buckets


def _overlapped(rank: int, bad: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that go on by one while their average is on its way."""
    weights = torch.stack([replica(number)["vector"] for number in own_rows(rank)])
    converger = Converger([weights], RowEnsemble(ROWS, ProcessEnsemble()))
    losses = torch.tensor([math.nan if number == bad else 1.0 for number in own_rows(rank)])
    then = weights.clone()
    flight = converger.start(Report(step=1, loss_sum=losses, loss_count=1))
    weights += 1.0
    now = weights.clone()
    converger.land(flight)
    return then, now, weights


def check_landed(results: list[tuple[Tensor, Tensor, Tensor]], bad: int | None) -> None:
    rows = [row for then, _, _ in results for row in then]
    mean = torch.stack([row.double() for number, row in enumerate(rows) if number != bad]).mean(dim=0)
    for process, (then, now, landed) in enumerate(results):
        for index, number in enumerate(own_rows(process)):
            expected = mean if number == bad else now[index].double() + mean - then[index].double()
            torch.testing.assert_close(landed[index].double(), expected, rtol=0, atol=16 * EPS * 5)


OVERLAPPED = Cases(PROCESSES, _overlapped, [(None,), (1,)])


@pytest.mark.parametrize("bad", [None, 1], ids=["all healthy", "beside a bad one"])
def test_every_row_moves_by_its_own_difference(bad: int | None) -> None:
    check_landed(OVERLAPPED[(bad,)], bad)
