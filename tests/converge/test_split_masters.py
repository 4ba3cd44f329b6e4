"""Averages of split masters: in float32, as those of float32 copies, bit for bit, and the memory that they take."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hdet_kernels as hk
from bench.memory_tracker import MemoryTracker
from hdet_kernels.converge import AverageRequest, Report, converger_of
from hdet_kernels.converge.split_masters import SplitRegion
from hdet_kernels.converge.transport import Transport
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from hdet_kernels.ops.halves import read_halves
from hdet_kernels.split_master import split
from tests.ranks import Cases, run_ranks
from tests.training import same, with_averaging

BF16 = torch.bfloat16

#: Options of the scheduler, and the rows of a stack (0: none).
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 0),
    "in buckets": ({"bucket_bytes": 64}, 0),
    "overlapped": ({"overlap_steps": 1}, 0),
    "compressed": ({"compress": "int8"}, 0),
    "compressed, in buckets": ({"compress": "bf16", "bucket_bytes": 64}, 0),
    "outer": ({"outer": hk.Outer()}, 0),
    "outer, in buckets": ({"outer": hk.Outer(), "bucket_bytes": 64}, 0),
    "stacks": ({}, 2),
    "stacks, compressed, outer, in buckets": ({"compress": "int8", "outer": hk.Outer(), "bucket_bytes": 64}, 2),
}


class Run:
    """A model on gradients that do not depend on it, so that a parameter rounded otherwise changes nothing else."""

    def __init__(self, rank: int, way: str, master_weights: Any) -> None:
        options, self.rows = WAYS[way]
        torch.manual_seed(0)
        self.model: Any = torch.nn.Linear(37, 5).to(BF16)
        if self.rows:
            self.model = hk.ReplicaStack(self.model, self.rows, gradients="local")
            options = {**options, "ensemble": self.model.ensemble}
        else:
            options = {**options, "gradients": "local"}
        self.rank = rank
        self.optimizer = hk.FusedAdamW(self.model.parameters(), lr=1e-3, master_weights=master_weights)
        base = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)
        self.scheduler = hk.HDETScheduler(
            base, total_steps=12, sync_every=3, auto_lr=False, spread=0.5, **with_averaging(options)
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(10 * self.scheduler.last_epoch + self.rank)
            for param in self.model.parameters():
                param.grad = torch.randn(param.shape, generator=generator).to(BF16)
            self.optimizer.step()
            self.scheduler.step(torch.ones(self.rows) if self.rows else 1.0)

    def numbers(self) -> tuple[Tensor, Tensor]:
        """The parameters in full, and as they are."""
        (full,), (flat,) = self.optimizer.buckets.full, self.optimizer.buckets.flats
        return full.clone(), flat.clone()


def _averaged(rank: int, ways: list[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for way in ways:
        found[way] = []
        for kind in (True, "split"):
            run = Run(rank, way, kind)
            run.train(2)
            before = run.numbers()
            with run.scheduler.consensus():
                inside = run.numbers()
            after = run.numbers()
            run.train(8)
            apart = [record.distance for record in run.scheduler.history]
            found[way].append(
                {"before": before, "inside": inside, "after": after, "end": run.numbers(), "distances": apart}
            )
    return found


def check_averages(ways: list[str]) -> None:
    ranks = run_ranks(2, _averaged, ways)
    for way in ways:
        for found in ranks:
            copies, ours = found[way]
            for when in ("before", "inside", "end"):
                assert same(ours[when][0], copies[when][0]), f"{way}, {when}"
                assert same(ours[when][1], split(copies[when][0])[0]), f"{way}, {when}"
            assert same(ours["after"], ours["before"]), f"{way}: every digit of this replica comes back"
            assert len(ours["distances"]) >= 2
            assert ours["distances"] == pytest.approx(copies["distances"], abs=1e-5), way
        first, second = (found[way][1] for found in ranks)
        assert not same(first["before"][0], second["before"][0])
        assert same(first["inside"], second["inside"])
        if way == "plain":
            mean = (first["before"][0] + second["before"][0]) / 2
            assert (first["inside"][0] - mean).abs().max() <= 2.0**-24 * mean.abs().max(), "not a mean of roundings"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_split_masters_are_divided_as_copies_are(device: str) -> None:
    """Exactly: on a GPU, torch multiplies with the reciprocal of a number, which rounds twice."""
    masters = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    expected = torch.from_numpy(masters.numpy() / np.float32(3))
    region = SplitRegion(*split(masters.to(device)))
    transport = Transport(SingleReplica(), 2**20, None)
    ((_, bucket),) = transport.cut([region])
    packed = torch.empty(1000, device=device)
    transport.pack(region, bucket, packed, divisor=3.0)
    assert same(packed.cpu(), expected)
    transport.unpack(region, bucket, masters.to(device), divisor=3.0)
    assert same(region.read().cpu(), expected)


def test_split_masters_are_averaged_like_copies() -> None:
    check_averages(["plain", "overlapped", "stacks"])


@pytest.mark.full
def test_split_masters_are_averaged_like_copies_in_every_way() -> None:
    check_averages([way for way in WAYS if way not in ("plain", "overlapped", "stacks")])


# The memory of an average

#: Elements, and the bytes of a bucket: a 20th of the masters in float32.
NUMEL, BUCKET = 400_000, 80_000
#: All of them as float32, which is also what a copy of both halves takes.
WHOLE = 4 * NUMEL
#: What one part takes: in float32, what joins and splits it, what arrives from another process.
PART = 12 * BUCKET


def _split_buckets(rank: int) -> hk.Buckets:
    generator = torch.Generator().manual_seed(rank)
    buckets = hk.Buckets([nn.Parameter(torch.randn(NUMEL, generator=generator).to(BF16))])
    buckets.keep_masters(lambda dtype: dtype == BF16, split=True)
    buckets.masters[0].copy_(torch.randint(-(2**15), 2**15, (NUMEL,), generator=generator))  # type: ignore[union-attr]
    return buckets


def _tracked(rank: int) -> tuple[dict[str, tuple[int, int]], dict[str, bool]]:
    """Average and look at the consensus. Return peaks and held bytes by phase, and whether the values are right."""
    bytes_of, right = {}, {}
    for backup in (True, False):
        buckets, other = _split_buckets(rank), _split_buckets(1 - rank)
        mean = (buckets.full[0] + other.full[0]) / 2
        converger = hk.Converger(buckets, hk.ProcessEnsemble(), backup=backup, bucket_bytes=BUCKET)
        tracker = MemoryTracker("cpu")
        if backup:
            with tracker.phase("consensus"), converger.consensus(Report(step=0)):
                first = read_halves(*(halves[:9] for halves in buckets.split_masters[0]))
                right["consensus"] = same(first, mean[:9])
        with tracker.phase(f"sync, {backup}"):
            outcome = converger.converge(Report(step=0))
        right[f"sync, {backup}"] = same(buckets.full[0], mean) and outcome.collectives == 1 + WHOLE // BUCKET
        bytes_of |= {phase: (tracker.peaks[phase], tracker.held[phase]) for phase in tracker.peaks}
    return bytes_of, right


def test_a_backup_is_one_copy_of_the_masters_and_the_only_one() -> None:
    for bytes_of, right in run_ranks(2, _tracked):
        assert all(right.values()), right
        # The block of a consensus has both halves of this replica beside those of the mean.
        copies = {"consensus": (1, 0), "sync, True": (1, 1), "sync, False": (0, 0)}
        for phase, (peak, held) in bytes_of.items():
            assert peak < copies[phase][0] * WHOLE + PART, phase
            assert held < copies[phase][1] * WHOLE + PART, phase


#: Options of a converger; the copies that it keeps from one average to the next, a backup among them; how many more an
#: average takes, with
#: the messages; and what carries the parts.
OPTIONS: dict[str, tuple[dict[str, Any], float, float, str]] = {
    "compressed": ({"compress": "int8", "backup": False}, 2.5, 0.3, "exchange"),
    "compressed, with backup": ({"compress": "int8"}, 2.5, 1.5 + 0.3, "exchange"),
    "outer": ({"outer": hk.Outer()}, 3, 1, "all_reduce"),
}


def _with_option(rank: int, name: str) -> dict[str, Any]:
    """Average three times, tracked; then once more, which fails after half of the parts and is repeated."""
    options, _, _, carrier = OPTIONS[name]
    buckets, ensemble, tracker = _split_buckets(0), hk.ProcessEnsemble(), MemoryTracker("cpu")
    with tracker.phase("begin"):
        converger = hk.Converger(buckets, ensemble, bucket_bytes=BUCKET, **options)
    ((param, low),) = buckets.split_masters.values()

    def train(step: int) -> None:
        param.mul_(1 + 2.0**-6 * (step + rank))

    for step in range(3):
        train(step)
        with tracker.phase(f"sync {step}"):
            converger.converge(Report(step=step))
    train(3)
    saved = [param.clone(), low.clone(), converger.outer_state_dict()]
    errors = converger.state_dict()
    original, calls = getattr(ensemble, carrier), itertools.count(1)

    def failing(*args: Any) -> Any:
        if next(calls) == WHOLE // BUCKET // 2:
            raise RuntimeError("the peer is gone")
        return original(*args)

    setattr(ensemble, carrier, failing)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        converger.converge(Report(step=3))
    setattr(ensemble, carrier, original)
    after, errors_after = [param, low, converger.outer_state_dict()], converger.state_dict()
    unharmed = same(saved, after)
    converger.converge(Report(step=3))
    return {
        "peak": tracker.peaks["sync 2"] - tracker.held["sync 1"], "held": tracker.held["sync 2"],
        "unharmed": unharmed, "kept": errors_after and same(errors, errors_after), "end": buckets.full[0],
    }  # fmt: skip


AVERAGED = Cases(2, _with_option, [("compressed",), ("outer",)], full=[("compressed, with backup",)])


@pytest.mark.parametrize("name", AVERAGED.params())
def test_a_consensus_that_is_kept_needs_no_joined_masters_beside_it(name: str) -> None:
    first, second = AVERAGED[(name,)]
    _, kept, more, _ = OPTIONS[name]
    assert same(first["end"], second["end"])
    for found in (first, second):
        assert found["held"] < kept * WHOLE + PART
        assert found["peak"] < more * WHOLE + PART
        assert found["unharmed"]
        # Without a backup the errors of compression are lost, and the next average is in full.
        assert found["kept"] is (True if name == "compressed, with backup" else None)


def _left_alone(rank: int) -> tuple[bool, str]:
    """Average; rank 1 ends itself after half of the parts. Return whether both halves are as before, and the error."""
    buckets = _split_buckets(rank)
    before = [halves.clone() for halves in buckets.split_masters[0]]
    converger = hk.Converger(buckets, hk.ProcessEnsemble(), bucket_bytes=BUCKET)
    if rank == 1:
        original, count = dist.all_reduce, [0]

        def all_reduce(*args: Any, **keywords: Any) -> Any:
            count[0] += 1
            if count[0] == WHOLE // BUCKET // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **keywords)

        dist.all_reduce = all_reduce
    with pytest.raises(RuntimeError, match="rank 1 has ended") as error:
        converger.converge(Report(step=1))
    return same(list(buckets.split_masters[0]), before), str(error.value)


@pytest.mark.full
def test_a_peer_that_dies_between_the_parts_leaves_all_of_them_as_they_were() -> None:
    (unchanged, message), _ = run_ranks(2, _left_alone, expect_dead=1)
    assert unchanged, message


def test_without_another_process_one_bucket_is_joined_at_a_time() -> None:
    stack = hk.ReplicaStack(nn.Linear(400, 500, bias=False).to(BF16), 2, gradients="local")
    optimizer = hk.FusedAdamW(stack.parameters(), lr=1e-3, master_weights="split")
    with torch.no_grad():
        for param in stack.parameters():
            param[1].mul_(2)
    (full,) = optimizer.buckets.full
    converger = converger_of(optimizer, stack.ensemble, bucket_bytes=BUCKET)
    tracker = MemoryTracker("cpu")
    with tracker.phase("sync"):
        outcome = converger.converge(Report(step=0), AverageRequest(include_state=False))
    assert same(optimizer.buckets.full[0], full.mean(dim=0).expand_as(full))
    assert outcome.distance == pytest.approx(1 / 3, rel=1e-6)
    assert tracker.peaks["sync"] < WHOLE / 2
    assert tracker.held["sync"] < BUCKET


@pytest.mark.parametrize("rows", [1, 3])
def test_buckets_are_those_of_the_joined_masters(rows: int) -> None:
    joined = torch.arange(1.0, 8.0 * rows)[: 7 * rows].view(rows, 7) / 3
    joined = joined if rows > 1 else joined[0]
    region = SplitRegion(*split(joined))
    transport = Transport(SingleReplica() if rows == 1 else RowEnsemble(rows), 12, None)
    ours, plain = list(transport.cut([region])), list(transport.cut([[joined]]))
    assert [bucket.numel for _, bucket in ours] == [3, 3, 1]
    assert [bucket.pieces for _, bucket in ours] == [bucket.pieces for _, bucket in plain]
    for (_, bucket), (tensors, _) in zip(ours, plain, strict=True):
        assert transport.in_place(region, bucket) is None
        assert same(transport.first_row(region, bucket), transport.first_row(tensors, bucket))
        mean, expected = torch.empty(bucket.numel), torch.empty(bucket.numel)
        for each, out in ((region, mean), (tensors, expected)):
            transport.pack(each, bucket, out, divisor=rows)
        assert same(mean, expected)
        for each in (region, tensors):
            transport.unpack(each, bucket, -mean, 0.5)
    assert same(read_halves(region.param, region.low), joined), "written in all rows"
    assert same(torch.cat(list(region.parts(12)), dim=-1), joined)
