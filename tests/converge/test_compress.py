"""The compressed average over real gloo groups: equal everywhere, within the bound of its rounding, and without drift.

With e, what the rounding of a replica's difference takes, and e′, what that of a shard's mean takes, a sync with error
feedback gives mean(θ) + mean(e_old) − mean(e) + e′_old − e′. The rounding takes at most ``SHARE`` of the largest
number that is rounded (``rounding.py``). So e and e′ have bounds, and with them all that is asserted here.
"""

from __future__ import annotations

import io
import math
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hdet_kernels as hk
from hdet_kernels import Buckets, Converger, ProcessEnsemble
from hdet_kernels.converge import AverageRequest, Report
from hdet_kernels.converge.handshake import COLUMNS
from hdet_kernels.ensemble import SingleReplica
from hdet_kernels.ops.wire import BLOCK, GRAIN
from hdet_kernels.optim import FusedAdamW
from tests.converge.rounding import EPS, all_equal, mean, most_owed
from tests.ranks import Cases, run_ranks
from tests.training import Trainer, same

FORMATS = ("bf16", "int8")
OPTIMIZERS: dict[str, Any] = {"loose": torch.optim.AdamW, "homed": FusedAdamW}

HANDSHAKE_BYTES = 8 * len(COLUMNS)


def noise(rank: int, sync: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(10_000 * rank + sync))


# One average after another

SHAPES = ((37, 29), (3,), (1500,), (2, 700), (1,))
EXCLUDING, SYNCS = 3, 6


def _again_and_again(rank: int, homed: bool, format: Any) -> list[dict[str, Any]]:
    """Averages with a little training between them; at one of them rank 1 is not finite."""
    numels = [math.prod(shape) for shape in SHAPES]

    def converger(compress: Any) -> tuple[list[nn.Parameter], Converger]:
        params = [nn.Parameter(noise(rank, i, numel).view(SHAPES[i])) for i, numel in enumerate(numels)]
        source = Buckets(params) if homed else params
        return params, Converger(source, ProcessEnsemble(), bucket_bytes=4096, compress=compress)

    (params, compressed), (plain_params, plain) = converger(format), converger(None)
    found = []
    for sync in range(SYNCS):
        with torch.no_grad():
            for param, update in zip(params, noise(rank, 100 + sync, sum(numels)).split(numels), strict=True):
                # The next differences are small against this one only if they refer to what it led to.
                param.add_(update.view(param.shape), alpha=(1.0 if sync == EXCLUDING else 0.01) * (rank + 1))
            if sync == EXCLUDING and rank == 1:
                params[2][7] = math.nan
            for param, copied in zip(params, plain_params, strict=True):
                copied.copy_(param)
        before, owed = _flat(params), _owed(compressed)
        outcome = compressed.converge(Report(step=sync))
        exact = plain.converge(Report(step=sync))
        found.append(
            {
                "before": before, "after": _flat(params), "exact": _flat(plain_params), "bytes": outcome.bytes,
                "collectives": outcome.collectives, "in full": exact.collectives, "bytes in full": exact.bytes,
                "healthy": outcome.healthy.tolist(), "owed before": owed, "owed after": _owed(compressed),
            }
        )  # fmt: skip
    return found


def _owed(converger: Converger) -> list[Tensor]:
    """Return the errors of this process's roundings, of every bucket."""
    state = converger.state_dict() or {"error": [], "shard_error": []}
    return [error.clone() for error in (*state["error"], *state["shard_error"])]


def _flat(params: list[nn.Parameter]) -> Tensor:
    return torch.cat([param.detach().reshape(-1) for param in params])


AVERAGES = {
    n: Cases(n, _again_and_again, [(homed, format) for homed in (False, True) for format in FORMATS]) for n in (2, 3, 4)
}


@pytest.mark.parametrize("homed", [False, True], ids=["loose", "homed"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n", [3, pytest.param(2, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_every_average_is_the_same_everywhere_and_within_its_rounding(n: int, format: str, homed: bool) -> None:
    results = AVERAGES[n][homed, format]
    largest = 0.0
    for sync in range(SYNCS):
        now = [result[sync] for result in results]
        assert all_equal([r["after"] for r in now]), f"sync {sync}"
        if sync in (0, EXCLUDING):
            assert all(torch.equal(r["after"], r["exact"]) for r in now), "in full, to the bit"
            assert [(r["bytes"], r["collectives"]) for r in now] == [(r["bytes in full"], r["in full"]) for r in now]
            assert [r["healthy"] for r in now] == [[not sync or rank != 1 for rank in range(n)]] * n
            for rank, r in enumerate(now):
                kept = sync == EXCLUDING and rank != 1
                assert same(r["owed after"], r["owed before"]) if kept else not any(e.any() for e in r["owed after"])
            continue
        consensus = results[0][sync - 1]["after"]
        largest = max(largest, *(float((r["before"] - consensus).abs().max()) for r in now))
        exact = mean([r["before"] for r in now])
        off = float((now[0]["after"].double() - exact).abs().max())
        rounding = 4 * EPS * float(exact.abs().max())  # θ − c, the mean of n and its addition to c, in fp32
        assert off <= 2 * most_owed(format, largest) + rounding, f"sync {sync}"
        assert off > rounding, "something was rounded, or this test shows nothing"
        buckets = now[0]["in full"] - 1
        assert [r["collectives"] for r in now] == [1 + 2 * buckets] * n
        assert all(any(error.any() for error in r["owed after"]) for r in now)


def _kinds(rank: int, format: Any) -> list[dict[str, Any]]:
    """Parameters of three dtypes, state and buffers: once compressed, once in full."""

    def tensors() -> dict[str, Tensor]:
        def random(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return noise(rank, number, 300).to(dtype)

        return {
            "fp32": random(0), "bf16": random(1, torch.bfloat16), "fp64": random(2, torch.float64),
            "state": random(3), "buffer": random(4), "wide buffer": random(5, torch.float64),
        }  # fmt: skip

    both = []
    for compress in (format, None):
        own = tensors()
        converger = Converger(
            [own[name] for name in ("fp32", "bf16", "fp64")],
            ProcessEnsemble(),
            state=lambda own=own: {"moment": own["state"]},  # type: ignore[misc]
            buffers=lambda own=own: [own["buffer"], own["wide buffer"]],  # type: ignore[misc]
            bucket_bytes=512,
            compress=compress,
        )
        both.append((own, converger))
    found = []
    for sync in range(3):
        for number, tensor in enumerate(both[0][0].values()):
            tensor.add_(noise(rank, 50 + 10 * sync + number, 300).to(tensor.dtype), alpha=0.01)
        for name, tensor in both[1][0].items():
            tensor.copy_(both[0][0][name])
        before = {name: tensor.clone() for name, tensor in both[0][0].items()}
        for _, converger in both:
            converger.converge(Report(step=sync), AverageRequest(average_state=True))
        compressed, full = ({name: t.clone() for name, t in own.items()} for own, _ in both)
        found.append({"before": before, "compressed": compressed, "full": full})
    return found


KINDS = Cases(2, _kinds, [(format,) for format in FORMATS])  # two ranks: their sum is the same in whatever order


@pytest.mark.parametrize("format", FORMATS)
def test_only_fp32_and_half_precision_parameters_are_compressed(format: str) -> None:
    results = KINDS[(format,)]
    for sync in range(3):
        now = [result[sync] for result in results]
        for name in now[0]["before"]:
            assert all_equal([r["compressed"][name] for r in now]), (sync, name)
            in_full = sync == 0 or name not in ("fp32", "bf16")
            assert torch.equal(now[0]["compressed"][name], now[0]["full"][name]) is in_full, (sync, name)
    for sync in (1, 2):
        for name in ("fp32", "bf16"):
            last = results[0][sync - 1]["compressed"]
            # A bf16 parameter is the rounding of its fp32 consensus, by half a unit of its last digit.
            rounded = 2.0**-8 * float(last[name].double().abs().max()) if name == "bf16" else 0.0
            largest = max(
                float((r[sync]["before"][other] - last[other]).double().abs().max())
                for r in results
                for other in ("fp32", "bf16")  # which share buckets
            )
            exact = mean([r[sync]["before"][name] for r in results])
            off = float((results[0][sync]["compressed"][name].double() - exact).abs().max())
            bound = 2 * most_owed(format, largest + rounded) + 2 * rounded + 4 * EPS * float(exact.abs().max())
            assert off <= bound, (sync, name)


# Drift

DRIFT_NUMEL = 600


def _drift(rank: int, syncs: int) -> dict[str, Any]:
    """How far the consensus is from the exact mean after every sync, by format; the largest update, and the furthest
    that the mean went."""
    n = dist.get_world_size()
    variants = {}
    for name in ("in full", *FORMATS):
        param = torch.zeros(DRIFT_NUMEL)
        converger = Converger([param], ProcessEnsemble(), compress=name if name in FORMATS else None)
        converger.converge(Report(step=0))  # in full
        variants[name] = param, converger
    exact = torch.zeros(DRIFT_NUMEL, dtype=torch.float64)
    drift: dict[str, list[float]] = {name: [] for name in variants}
    largest = furthest = 0.0
    for sync in range(1, syncs + 1):
        updates = [noise(r, sync, DRIFT_NUMEL) for r in range(n)]
        exact += mean(updates)
        largest = max(largest, *(float(update.abs().max()) for update in updates))
        furthest = max(furthest, float(exact.abs().max()))
        for name, (param, converger) in variants.items():
            if name in FORMATS or sync <= 50:
                param.add_(updates[rank])
                converger.converge(Report(step=sync))
                drift[name].append(float((param - exact).abs().max()))
    return {"drift": drift, "largest": largest, "furthest": furthest}


@pytest.mark.full
def test_many_averages_do_not_drift() -> None:
    syncs = 500
    results = run_ranks(2, _drift, syncs)
    assert results[0] == results[1]
    drift, largest, furthest = (results[0][name] for name in ("drift", "largest", "furthest"))
    # A sync rounds θ + u, sum and quotient of the mean, and c + mean to fp32: at worst all of them one way.
    rounding = 4 * EPS * (furthest + 2 * largest)
    assert max(drift["in full"]) <= 50 * rounding
    for format in FORMATS:
        # A replica is as far from the consensus as its update, and the rounding of one sync.
        owed = most_owed(format, largest + rounding)
        assert max(drift[format]) <= owed + syncs * rounding, "at every sync"
        early, late = max(drift[format][: syncs // 10]), max(drift[format][-(syncs // 10) :])
        assert late <= early + syncs * rounding, "in the end as in the beginning"
        # Without error feedback the losses add up as a random walk does: √10 as far after ten times as many.
        assert late > 100 * rounding, "something was rounded, or this test shows nothing"


LOST_SYNCS = 40


def _lost(rank: int) -> dict[Any, Tensor]:
    """Updates of which the part that does not cancel is below what the rounding keeps."""
    found = {}
    for compress in (None, *FORMATS):
        param = torch.zeros(BLOCK)
        converger = Converger([param], ProcessEnsemble(), compress=compress)  # type: ignore[arg-type]
        converger.converge(Report(step=0))
        for sync in range(1, LOST_SYNCS + 1):
            sign = 1.0 if sync % 2 else -1.0
            param[0] += sign  # the largest of its block
            param[1:] += sign if compress == "bf16" else 0.0
            param[1:] += 2.0**-10
            converger.converge(Report(step=sync))
        found[compress] = param.clone()
    return found


def test_updates_below_the_rounding_arrive() -> None:
    """1 + 2⁻¹⁰ and −1 + 2⁻¹⁰ are ±1 in bf16, whose numbers below 1 are 2⁻⁸ apart, and 2⁻¹⁰ is no multiple of 1/127:
    without error feedback nothing of them would arrive."""
    results = run_ranks(2, _lost)
    exact = LOST_SYNCS * 2.0**-10
    for format in (None, *FORMATS):
        assert all_equal([result[format] for result in results])
        arrived = results[0][format][1:].double()
        owed = 0.0 if format is None else most_owed(format, 1 + 2.0**-10)
        assert (arrived - exact).abs().max() <= owed + LOST_SYNCS * 4 * EPS * 2, format


# What it costs


def _large(rank: int, compress: Any) -> list[tuple[int, int]]:
    model = nn.Linear(500, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        0.1,
        6,
        sync_every=2,
        auto_lr=False,
        cycle_momentum=False,
        gradients="local",
        averaging=hk.Averaging(compress),
    )
    for step in range(6):
        optimizer.zero_grad()
        model(noise(rank, step, 500)).sum().backward()
        optimizer.step()
        scheduler.step()
    return [(record.bytes, record.collectives) for record in scheduler.history]


def test_half_and_a_quarter_of_the_bytes() -> None:
    numel = 500 * 300 + 300
    padded = math.ceil(numel / (2 * GRAIN)) * 2 * GRAIN
    expected = {None: 4 * numel, "bf16": 2 * padded, "int8": padded + 4 * padded // BLOCK}
    found = Cases(2, _large, [(compress,) for compress in expected])
    for compress, payload in expected.items():
        for history in found[(compress,)]:
            assert history[0] == (4 * numel + HANDSHAKE_BYTES, 2), "the first travels in full"
            assert history[1:] == [(payload + HANDSHAKE_BYTES, 2 if compress is None else 3)] * 2
    assert expected["bf16"] / expected[None] == pytest.approx(1 / 2, rel=0.01)
    assert expected["int8"] / expected[None] == pytest.approx((1 + 4 / BLOCK) / 4, rel=0.01)


# In training, and over a restart

TOTAL, SYNC, BOUNDARY, WITHIN = 20, 5, 10, 12


class Watched(Trainer):
    """A replica on local gradients, with BatchNorm, that notes its parameters around every sync."""

    def __init__(self, rank: int, kind: str, **options: Any) -> None:
        settings = {"total_steps": TOTAL, "sync_every": SYNC, "auto_lr": False, "bucket_bytes": 256, **options}
        modes = {"ddp": False, "batch_norm": True, "average_buffers": True}
        super().__init__(rank, make_optimizer=OPTIMIZERS[kind], **modes, **settings)
        self.syncs: list[tuple[int, Tensor, Tensor]] = []

    def train(self, steps: int, before_step: Any = None) -> Watched:
        for _ in range(steps):
            before: list[Tensor] = []
            super().train(1, before_step=lambda _: before.append(self.parameters()))  # noqa: B023
            if self.step % SYNC == 0:
                self.syncs.append((self.step, before[0], self.parameters()))
        return self

    def result(self) -> dict[str, Any]:
        history = [{**record.to_dict(), "seconds": 0.0} for record in self.scheduler.history]
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        return {
            "parameters": self.parameters(), "moments": self.moments(), "buffers": buffers, "history": history,
            "compression": self.scheduler.state_dict()["hdet"][0]["compression"], "syncs": self.syncs,
        }  # fmt: skip

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (self.module, self.optimizer, self.scheduler)], file)
        return file.getvalue()

    def load(self, saved: bytes) -> Watched:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip((self.module, self.optimizer, self.scheduler), states, strict=True):
            part.load_state_dict(state)
        return self


def _saved(rank: int, kind: str, compress: Any) -> tuple[dict[str, Any], dict[int, bytes]]:
    """A whole run, and what was saved at two of its steps."""
    replica = Watched(rank, kind, compress=compress)
    files = {}
    for at in (BOUNDARY, WITHIN):
        files[at] = replica.train(at - replica.step).save()
    return replica.train(TOTAL - WITHIN).result(), files


def _resumed(rank: int, kind: str, compress: Any, at: int, saved: bytes) -> dict[str, Any]:
    torch.manual_seed(99 + rank)
    replica = Watched(rank, kind, compress=compress).load(saved)
    start = replica.parameters()
    return {**replica.train(TOTAL - at).result(), "start": start}


def _saved_and_resumed(rank: int, kind: str, before: Any, after: Any) -> dict[Any, dict[str, Any]]:
    """A run with compression ``before``, and from each of its files a run with compression ``after``."""
    whole, files = _saved(rank, kind, before)
    return {"whole": whole, **{at: _resumed(rank, kind, after, at, saved) for at, saved in files.items()}}


def check_syncs(results: list[dict[str, Any]], format: str, consensus: Tensor | None) -> None:
    """Every sync of all replicas is within the bound; the first in full, if there is no ``consensus`` yet."""
    largest = 0.0
    for number, (step, *_) in enumerate(results[0]["syncs"]):
        befores, afters = zip(*(r["syncs"][number][1:] for r in results), strict=True)
        assert all_equal(list(afters)), step
        exact = mean(list(befores))
        off = float((afters[0].double() - exact).abs().max())
        rounding = 4 * EPS * float(exact.abs().max())
        if consensus is None:
            assert off <= rounding, step
        else:
            largest = max(largest, *(float((before - consensus).abs().max()) for before in befores))
            assert rounding < off <= 2 * most_owed(format, largest) + rounding, step
        consensus = afters[0]


#: Kind, and compression before and after.
RESUMED = Cases(
    2,
    _saved_and_resumed,
    [("homed", None, "int8"), ("homed", "int8", None)],
)


@pytest.mark.parametrize(
    ("n", "format"),
    [
        (3, "int8"),
        pytest.param(2, "int8", marks=pytest.mark.full),
        pytest.param(3, "bf16", marks=pytest.mark.full),
    ],
)
def test_rank_0s_file_serves_any_number_of_ranks_at_a_boundary(n: int, format: str) -> None:
    (whole, files), _ = run_ranks(2, _saved, "homed", format)
    results = run_ranks(n, _resumed, "homed", format, BOUNDARY, files[BOUNDARY])
    consensus = whole["syncs"][1][2]
    assert all(torch.equal(r["start"], consensus) for r in results)
    check_syncs(results, format, consensus)


def test_compression_can_be_switched_on_and_off_in_a_resumed_run() -> None:
    whole, on = ([result[what] for result in RESUMED["homed", None, "int8"]] for what in ("whole", BOUNDARY))
    assert whole[0]["compression"] is None
    check_syncs(on, "int8", None)
    assert on[0]["syncs"][0][2].equal(whole[0]["syncs"][2][2]), "the first one travels in full"
    off = [result[BOUNDARY] for result in RESUMED["homed", "int8", None]]
    assert [r["compression"] for r in off] == [None, None]
    for number in range(2):
        exact = mean([r["syncs"][number][1] for r in off])
        assert (off[0]["syncs"][number][2] - exact).abs().max() <= 4 * EPS * exact.abs().max()


# What goes wrong


def _killed(rank: int) -> bool:
    """Rank 1 is killed in the middle of the third sync; whether the others owe what they owed before."""
    replica = Watched(rank, "homed", compress="int8")
    replica.train(3 * SYNC - 1)
    replica.optimizer.zero_grad()
    replica.loss().backward()
    replica.optimizer.step()
    before = replica.scheduler.state_dict()["hdet"][0]["compression"]
    original, calls = dist.all_to_all_single, []

    def all_to_all_single(*args: Any, **keywords: Any) -> Any:
        calls.append(args)
        if rank == 1 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **keywords)

    dist.all_to_all_single = all_to_all_single
    with pytest.raises(RuntimeError):
        replica.scheduler.step(1.0)
    return same(before, replica.scheduler.state_dict()["hdet"][0]["compression"])


@pytest.mark.full
def test_the_survivors_of_a_killed_rank_still_owe_what_they_owed() -> None:
    assert run_ranks(3, _killed, expect_dead=1) == [True, None, True]


def _forgetful(rank: int) -> Tensor:
    """Rank 1 does not remember the consensus, as after an average that failed there and did not elsewhere."""
    param = nn.Parameter(noise(rank, 0, 50))
    converger = Converger([param], ProcessEnsemble(), compress="int8")
    converger.converge(Report(step=1))
    if rank == 1:
        converger.load_state_dict(None, own=True)
    with torch.no_grad():
        param.add_(rank)
    before = param.detach().clone()
    converger.converge(Report(step=2))
    return torch.stack([before, param.detach()])


def test_replicas_that_do_not_all_remember_the_consensus_average_in_full() -> None:
    (before0, after0), (before1, after1) = run_ranks(2, _forgetful)
    assert torch.equal(after0, after1)
    assert torch.equal(after0, (before0 + before1) / 2)


def _alone(rank: int, talks: bool) -> list[Any]:
    ensemble = ProcessEnsemble() if talks else SingleReplica()
    options = {"compress": "int8", "ensemble": ensemble}
    return [Watched(rank, "homed", **each).train(TOTAL).result() for each in (options, {})]


def test_one_replica_alone() -> None:
    found = Cases(1, _alone, [(False,), (True,)])
    ((compressed, plain),) = found[(False,)]
    assert same(compressed, plain)
    ((compressed, _),) = found[(True,)]
    check_syncs([compressed], "int8", None)  # what a group of one averages is rounded all the same
