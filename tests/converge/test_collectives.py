"""The collectives of a sync, counted where it calls them: how many, of what, in which order, in which memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import hdet_kernels as hk
from hdet_kernels import Buckets, Converger, ProcessEnsemble
from hdet_kernels.converge import Report
from hdet_kernels.converge.handshake import COLUMNS
from hdet_kernels.ops.wire import GRAIN
from hdet_kernels.optim import FusedAdamW, FusedSGD
from tests.ranks import Cases, run_ranks
from tests.training import Trainer

OPTIMIZERS: dict[str, Any] = {"torch": torch.optim.AdamW, "ours": FusedAdamW}


class Wire:
    """Notes every collective of this process: ``calls`` by name and bytes, ``events`` with the waits between them, and
    the number of different ``buffers`` that all-reduced tensors lay in so far."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.events: list[tuple[str, int]] = []
        self.addresses: list[int] = []
        self.buffers: list[int] = []
        self._memory: set[int] = set()
        for name in ("all_reduce", "broadcast", "all_to_all_single"):
            setattr(dist, name, self._watched(name, getattr(dist, name)))
        of_processes = hk.ensemble.processes
        of_processes._all_gather = self._watched("all_gather", of_processes._all_gather)

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(tensor: Tensor, *args: Any, **keywords: Any) -> Any:
            number = len(self.calls)
            self.calls.append((name, tensor.nbytes))
            self.events.append((f"start {name}", number))
            self.addresses.append(tensor.data_ptr())
            if name == "all_reduce":
                self._memory.add(tensor.untyped_storage().data_ptr())
                self.buffers.append(len(self._memory))
            work = original(tensor, *args, **keywords)
            return work if work is None else Watched(work, lambda: self.events.append((f"wait {name}", number)))

        return watched

    def clear(self) -> None:
        for noted in (self.calls, self.events, self.addresses, self.buffers, self._memory):
            noted.clear()

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class Watched:
    """A started collective whose end is noted."""

    def __init__(self, work: Any, note: Callable[[], None]) -> None:
        self.work, self.note = work, note

    def wait(self, *timeout: Any) -> Any:
        self.note()
        return self.work.wait(*timeout)


# How many, and of what


def _counted(rank: int, bucket_bytes: int, shared: bool) -> dict[str, Any]:
    wire = Wire()
    trainer = Trainer(
        rank, ddp=False, auto_lr=False, make_optimizer=FusedAdamW, bucket_bytes=bucket_bytes,
        gradients="shared" if shared else "local", average_state=not shared,
    )  # fmt: skip
    trainer.train(3)
    wire.clear()
    trainer.train(1)
    buckets = trainer.optimizer.buckets
    homes = [(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in buckets.flats]
    inside = [any(low <= address < high for low, high in homes) for address in wire.addresses]
    record = trainer.scheduler.history[0]
    return {
        "calls": list(wire.calls), "inside": inside, "addresses": list(wire.addresses), "home": homes,
        "nbytes": sum(flat.nbytes for flat in buckets.flats), "recorded": (record.bytes, record.collectives),
    }  # fmt: skip


COUNTED = Cases(2, _counted, [(2**20, True), (640, True), (100, True), (640, False)])


def of_kind(result: dict[str, Any], wanted: str) -> list[Any]:
    """Bytes, and whether they lay in the memory of the parameters, of all messages of a kind."""
    noted = zip(result["calls"], result["inside"], strict=True)
    return [(nbytes, inside) for (name, nbytes), inside in noted if name == wanted]


@pytest.mark.parametrize("bucket_bytes", [2**20, 640, 100])
def test_every_bucket_is_one_all_reduce_beside_the_parameters_between_two_gathers(bucket_bytes: int) -> None:
    for result in COUNTED[bucket_bytes, True]:
        count = math.ceil(result["nbytes"] / (bucket_bytes // 4 * 4))
        assert [name for name, _ in result["calls"]] == ["all_gather", *["all_reduce"] * count, "all_gather"]
        assert sum(nbytes for nbytes, _ in of_kind(result, "all_reduce")) == result["nbytes"]
        assert not any(result["inside"]), "what is received is not written before all have confirmed"
        assert result["recorded"] == (result["nbytes"] + 8 * len(COLUMNS), 1 + count)


def test_state_travels_behind_the_parameters() -> None:
    for result in COUNTED[640, False]:
        reduced = of_kind(result, "all_reduce")
        assert len(reduced) == math.ceil(result["nbytes"] / 640) + math.ceil(2 * result["nbytes"] / 640)
        assert sum(nbytes for nbytes, _ in reduced) == 3 * result["nbytes"]


def _integers(rank: int, model: str) -> dict[str, Any]:
    """A sync of a model with BatchNorm, whose integer buffers agree or do not."""
    wire = Wire()
    modes: dict[str, Any] = {"ddp": False, "batch_norm": True, "average_buffers": True}
    trainer = Trainer(rank, auto_lr=False, gradients="local", **modes)
    trainer.train(3)
    tracked = dict(trainer.module.named_buffers())["norm.num_batches_tracked"]
    if model == "differs":
        tracked.add_(7 * rank)
    wire.clear()
    trainer.train(1)
    return {"calls": wire.names(), "tracked": int(tracked), "bytes": wire.calls[-2][1]}


def test_integers_are_sent_only_where_they_differ() -> None:
    found = Cases(2, _integers, [("agrees",), ("differs",)])
    for result in found[("agrees",)]:
        assert result["calls"] == ONE_BUCKET, "parameters, state and statistics"
        assert result["tracked"] == 4
    for result in found[("differs",)]:
        assert result["calls"] == ["all_gather", "all_reduce", "broadcast", "all_gather"]
        assert (result["tracked"], result["bytes"]) == (4, 8), "rank 0's"


#: The collectives of a sync that has one bucket: the rows of the handshake, the values, the confirmation.
ONE_BUCKET = ["all_gather", "all_reduce", "all_gather"]


def _compressed(rank: int) -> list[Any]:
    wire = Wire()
    params = [nn.Parameter(torch.randn(3 * GRAIN)), nn.Parameter(torch.randn(GRAIN + 5))]
    converger = Converger(Buckets(params), ProcessEnsemble(), bucket_bytes=4 * 2 * GRAIN, compress="int8")
    found = []
    for sync in range(2):
        wire.clear()
        outcome = converger.converge(Report(step=sync))
        found.append((sorted(wire.names()), outcome.collectives))
    return found


def test_a_compressed_bucket_takes_an_exchange_and_a_gather() -> None:
    buckets = 3  # of 4 · 1024 + 5 elements, 2 · 1024 in each
    for first, second in run_ranks(2, _compressed):
        assert first == (["all_gather"] * 2 + ["all_reduce"] * buckets, 1 + buckets)
        assert second == (["all_gather"] * (2 + buckets) + ["all_to_all_single"] * buckets, 1 + 2 * buckets)


# Memory

COUNT, NUMEL, BUCKET = 64, 1001, 2**14


def largest_allocation(function: Callable[[], Any]) -> int:
    """The most bytes that torch allocated in one piece on the CPU while the function ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = recorded.profiler.kineto_results.events()
    return max((event.nbytes() for event in events if event.name() == "[memory]"), default=0)


def _allocated(rank: int, homed: bool, backup: bool) -> tuple[int, bool]:
    params = [nn.Parameter(torch.full((NUMEL,), float(rank))) for _ in range(COUNT)]
    converger = Converger(Buckets(params) if homed else params, ProcessEnsemble(), bucket_bytes=BUCKET, backup=backup)
    converger.converge(Report(step=0))  # tables of the layout are made the first time
    with torch.no_grad():
        for param in params:
            param.fill_(2.0 * rank)
    largest = largest_allocation(lambda: converger.converge(Report(step=1)))
    return largest, all(torch.equal(param, torch.ones(NUMEL)) for param in params)


ALLOCATED = Cases(2, _allocated, [(True, False), (True, True), (False, False)])


def test_the_memory_of_an_average() -> None:
    for largest, right in ALLOCATED[False, False]:
        assert right
        assert largest == BUCKET, "staging buffers alone"
    for backup in (True, False):  # the memory of the first average is kept; in place
        for largest, right in ALLOCATED[True, backup]:
            assert right
            assert 0 < largest < BUCKET // 4


def _staged(rank: int) -> dict[str, Any]:
    """Twelve buckets of two tensors each."""
    wire = Wire()
    params = [nn.Parameter(torch.full((100,), float(rank + i))) for i in range(24)]
    converger = Converger(params, ProcessEnsemble(), bucket_bytes=800, backup=False)
    converger.converge(Report(step=0))
    for pack in converger._transport._packs.values():
        _note_packing(pack, wire)
    wire.clear()
    converger.converge(Report(step=1))
    return {"buffers": list(wire.buffers), "events": list(wire.events), "calls": wire.names()}


def _note_packing(pack: Any, wire: Wire) -> None:
    original = pack.pack

    def noted(*args: Any, **keywords: Any) -> None:
        wire.events.append(("pack", len(wire.calls)))
        original(*args, **keywords)

    pack.pack = noted


def test_two_staging_buffers_take_turns() -> None:
    for result in run_ranks(2, _staged):
        assert result["calls"] == ["all_gather", *["all_reduce"] * 12, "all_gather"]
        assert result["buffers"] == [1] + [2] * 11, "different ones until then"
        order = {event: place for place, event in enumerate(result["events"])}
        for number in range(1, 12):
            assert order["pack", number + 1] < order["wait all_reduce", number], "packed while the one before travels"
            assert order["start all_reduce", number + 1] < order["wait all_reduce", number]
        for number in range(1, 11):
            assert order["wait all_reduce", number] < order["pack", number + 2], "a third one has to wait"


# Layouts that cannot be averaged in place


def _gapped(rank: int, compress: Any, overlapped: bool) -> list[Tensor]:
    """Parameters that are parts of larger tensors."""
    big = torch.full((4, 5), 100.0 + rank)
    columns = nn.Parameter(big[:, :3])
    row = torch.full((12,), -1.0 - rank)
    every_other = nn.Parameter(row[::2])
    assert columns.data_ptr() == big.data_ptr()
    optimizer = torch.optim.SGD([columns, every_other], lr=1.0)
    scheduler = hk.HDETScheduler(
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), total_steps=6, sync_every=2, spread=0.0, auto_lr=False,
        gradients="local", averaging=hk.Averaging(compress, int(overlapped)),
    )  # fmt: skip
    seen = []
    for step in range(6):
        for param in (columns, every_other):
            param.grad = torch.full_like(param, float(rank + step))
        optimizer.step()
        scheduler.step()
        seen.append(torch.cat([columns.detach().reshape(-1), every_other.detach()]))
    return [*seen, big, row]


GAPPED = Cases(2, _gapped, [(compress, overlapped) for compress in (None, "bf16") for overlapped in (False, True)])


@pytest.mark.parametrize("overlapped", [False, True], ids=["at once", "overlapped"])
@pytest.mark.parametrize("compress", [None, "bf16"])
def test_parameters_with_gaps_are_averaged_and_their_neighbours_are_not(compress: Any, overlapped: bool) -> None:
    results = GAPPED[compress, overlapped]
    # After six steps with gradients rank + step: halves, of which every sum is exact.
    columns, every_other = (start - sum(step + 0.5 for step in range(6)) for start in (100.5, -1.5))
    assert not torch.equal(results[0][0], results[1][0])
    for rank, (*seen, big, row) in enumerate(results):
        assert torch.equal(seen[-1], torch.tensor([columns] * 12 + [every_other] * 6))
        assert torch.equal(big[:, :3], torch.full((4, 3), columns)), "the parameter is a part of it"
        assert torch.equal(big[:, 3:], torch.full((4, 2), 100.0 + rank)), "the rest of it is not"
        assert torch.equal(row[::2], torch.full((6,), every_other))
        assert torch.equal(row[1::2], torch.full((6,), -1.0 - rank))


# State that an optimizer does not have


def _stateless(rank: int, ours: bool) -> list[str]:
    wire = Wire()
    param = nn.Parameter(torch.full((3,), float(rank)))
    optimizer = (FusedSGD if ours else torch.optim.SGD)([param], lr=0.1)
    scheduler = hk.HDETOneCycleLR(
        optimizer, 0.1, 4, sync_every=2, auto_lr=False, cycle_momentum=False, gradients="local"
    )
    for step in range(2):
        param.grad = torch.ones(3)
        if not (rank == 1 and step == 1):
            optimizer.step()
        scheduler.step()
    return wire.names()


def test_plain_sgd_has_no_state_to_bring_along() -> None:
    found = Cases(2, _stateless, [(False,), (True,)])
    for case in found.cases:
        assert found[case] == [ONE_BUCKET] * 2
