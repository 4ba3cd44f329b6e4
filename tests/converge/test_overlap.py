"""The overlapped average starts after step t₀ and lands after step t₀ + k: it moves every replica by the difference
between the mean and the replica's own values at t₀. Training does not wait for it."""

from __future__ import annotations

import copy
import inspect
import io
import math
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from hdet_kernels import Converger, ProcessEnsemble
from hdet_kernels.converge import AverageRequest, Report
from hdet_kernels.converge.overlap import Correction
from hdet_kernels.converge.payload import ModelTensors
from hdet_kernels.ensemble import SingleReplica
from hdet_kernels.optim import FusedAdamW, FusedSGD
from tests.ranks import Cases, run_ranks
from tests.schedule.undo_runs import Early
from tests.training import Trainer, batch, network, same, with_averaging

TOTAL, SYNC, LR = 11, 4, 0.05
OPTIMIZERS: dict[str, Any] = {
    "sgd loose": torch.optim.SGD,
    "sgd homed": FusedSGD,
    "adam loose": torch.optim.AdamW,
    "adam homed": FusedAdamW,
    "adam masters": FusedAdamW,
    "sgd masters": FusedSGD,
}
Numbers = dict[str, Tensor]


class Replica(Trainer):
    """A replica with BatchNorm and an integer buffer of its own, that notes all its numbers before and after every
    scheduler.step()."""

    def __init__(self, rank: int, kind: str, overlap_steps: int, *, ddp: bool = False, **options: Any) -> None:
        self.rank, self.device, self.rates = rank, "cpu", []
        self.dtype = torch.bfloat16 if kind.endswith("masters") else torch.float32
        self.module = network(batch_norm=True).to(self.dtype)
        self.module.register_buffer("count", torch.full((2,), 10 * (rank + 1)))
        self.model: nn.Module = self.module
        if ddp:
            self.model = DistributedDataParallel(self.module, broadcast_buffers=False)
        self.optimizer = OPTIMIZERS[kind](self.module.parameters(), lr=LR)
        settings: dict[str, Any] = {"total_steps": TOTAL, "sync_every": SYNC, "spread": 0.5, "auto_lr": False}
        self.scheduler = hk.HDETScheduler(
            torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0),
            model=self.module,
            **with_averaging({**settings, "overlap_steps": overlap_steps, **options}),
        )
        self.before: dict[int, Numbers] = {}
        self.after: dict[int, Numbers] = {}

    def loss(self) -> Tensor:
        x, y = batch(self.rank, self.step)
        return self.loss_on(x, y)

    def loss_on(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x.to(self.dtype)), y.to(self.dtype))

    def train(self, steps: int, before_step: Callable[[Any], None] | None = None) -> Replica:
        for _ in range(steps):
            at = self.step + 1

            def note(_: Trainer, at: int = at) -> None:
                self.module.get_buffer("count").add_(self.rank + 1)
                if before_step is not None:
                    before_step(self)
                self.before[at] = self.numbers()

            super().train(1, before_step=note)
            self.after[at] = self.numbers()
        return self

    def numbers(self) -> Numbers:
        """Parameters (where there are masters, those), state and buffers, by kind and name."""
        found: Numbers = {}
        for name, param in self.module.named_parameters():
            state = dict(self.optimizer.state[param])
            found[f"param {name}"] = state.pop("master", param)
            found |= {f"{'step' if key == 'step' else 'state'} {key} {name}": value for key, value in state.items()}
        for name, buffer in self.module.named_buffers():
            found[f"{'buffer' if buffer.is_floating_point() else 'integer'} {name}"] = buffer
        return {name: torch.as_tensor(value).detach().clone() for name, value in found.items() if value is not None}

    def roundings(self) -> bool:
        """Return whether the parameters are the roundings of their masters."""
        states = [self.optimizer.state[param] for param in self.module.parameters()]
        pairs = zip(self.module.parameters(), states, strict=True)
        return all(torch.equal(param, state["master"].to(param.dtype)) for param, state in pairs if "master" in state)

    def result(self) -> dict[str, Any]:
        history = [{**record.to_dict(), "seconds": 0.0} for record in self.scheduler.history]
        return {
            "before": self.before, "after": self.after, "rates": self.rates, "history": history,
            "control": self.scheduler.cycle.spread.controller_state, "roundings": self.roundings(),
        }  # fmt: skip

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (self.module, self.optimizer, self.scheduler)], file)
        return file.getvalue()

    def load(self, saved: bytes) -> Replica:
        parts = (self.module, self.optimizer, self.scheduler)
        for part, state in zip(parts, torch.load(io.BytesIO(saved), weights_only=True), strict=True):
            part.load_state_dict(state)
        return self


def lands(k: int) -> dict[int, int]:
    """Return, by the step after which an average lands, the step after which it started."""
    return {min(start + k, TOTAL): start for start in range(SYNC, TOTAL, SYNC)}


def forgotten(now: Tensor, then: Tensor, mean: Tensor) -> Tensor:
    """Return now + ρ·(mean − then) in fp64. For tensors that are nowhere negative ρ = now/then, at most 1, and 1 where
    ``then`` is 0. For all others ρ = 1."""
    now, then = now.double(), then.double()
    nowhere_negative = bool((now >= 0).all() and (then >= 0).all())
    ratio = torch.where((then == 0) | (not nowhere_negative), 1.0, (now / then).clamp(max=1))
    return now + ratio * (mean.double() - then)


# What lands, and when


def check_landing(name: str, rank: int, start: list[Numbers], now: Numbers, landed: Numbers, averaged: bool) -> None:
    """``start``: the numbers of both replicas at t₀; ``now`` and ``landed``: of ``rank`` around the landing."""
    then = [numbers[name] for numbers in start]
    kind = name.split()[0]
    if kind == "param":
        mean = (then[0] + then[1]) / 2  # the sum of two is the same in whatever order
        assert torch.equal(landed[name], now[name] + (mean - then[rank])), name
    elif kind == "integer":
        assert torch.equal(landed[name], now[name] + (then[0] - then[rank])), name
    elif kind == "step" or (kind == "state" and not averaged):
        assert torch.equal(landed[name], now[name]), name
    else:
        mean = ((then[0].double() + then[1].double()) / 2).to(landed[name].dtype)
        expected = forgotten(now[name], then[rank], mean)
        rough = landed[name].dtype == torch.bfloat16  # a buffer of eight digits, whose mean and sum are rounded
        rtol, atol = (2.0**-7, 2.0**-8) if rough else (1e-5, 1e-7)
        torch.testing.assert_close(landed[name].double(), expected, rtol=rtol, atol=atol)
        if "sq" in name:
            assert (landed[name] >= 0).all(), name


def _landings(rank: int, kind: str, ddp: bool) -> dict[int, dict[str, Any]]:
    overlaps = (1, 2, SYNC - 1) if kind.startswith("sgd") else (2,)
    return {k: Replica(rank, kind, k, ddp=ddp).train(TOTAL).result() for k in overlaps}


QUICK = [("sgd homed", False), ("adam loose", True), ("adam masters", False)]
LANDINGS = Cases(
    2,
    _landings,
    QUICK,
    full=[(kind, ddp) for kind in OPTIMIZERS for ddp in (False, True) if (kind, ddp) not in QUICK],
)


@pytest.mark.parametrize(("kind", "ddp"), LANDINGS.params())
def test_a_replica_moves_by_the_difference_that_it_had_at_the_sync(kind: str, ddp: bool) -> None:
    for k, results in _by_key(LANDINGS[kind, ddp]).items():
        assert all(r["roundings"] for r in results)
        for rank, r in enumerate(results):
            assert [(h["step"], h["landed"]) for h in r["history"]] == [(4, 4 + k), (8, min(8 + k, TOTAL)), (11, 11)]
            assert [h["gradients"] for h in r["history"]] == ["shared" if ddp else "local"] * 3
            for step in range(1, TOTAL):
                now, landed = r["before"][step], r["after"][step]
                if step not in lands(k):
                    assert same(now, landed), f"k={k}, step {step}: nothing is due"
                    continue
                start = [other["before"][lands(k)[step]] for other in results]
                assert not torch.equal(start[0]["param outer.weight"], start[1]["param outer.weight"])
                for name in now:
                    check_landing(name, rank, start, now, landed, averaged=not ddp)
        assert same(results[0]["after"][TOTAL], results[1]["after"][TOTAL]), "the last one is not overlapped"


def _by_key(results: list[dict[Any, Any]]) -> dict[Any, list[Any]]:
    return {key: [result[key] for result in results] for key in results[0]}


def _simulated(k: int, rates: list[list[float]]) -> list[Tensor]:
    """Two replicas in one process: SGD, and at the landing θ ← θ + (mean at t₀ − θ at t₀)."""
    models = [network(batch_norm=True) for _ in range(2)]
    start: list[list[Tensor]] = []
    due: int | None = None

    def average(tensors: list[list[Tensor]]) -> list[Tensor]:
        return [(a + b) / 2 for a, b in zip(*tensors, strict=True)]

    for step in range(1, TOTAL + 1):
        for replica, model in enumerate(models):
            x, y = batch(replica, step - 1)
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for param in model.parameters():
                    assert param.grad is not None
                    param.add_(param.grad, alpha=-rates[replica][step - 1])
        with torch.no_grad():
            params: list[list[Tensor]] = [[param.detach() for param in model.parameters()] for model in models]
            if due is not None and step in (due, TOTAL):
                due = None
                for now, then in zip(params, start, strict=True):
                    for own, old, mean in zip(now, then, average(start), strict=True):
                        own.add_(mean - old)
            if step % SYNC == 0 and step != TOTAL:
                start, due = [[own.clone() for own in each] for each in params], step + k
            if step == TOTAL:
                means = average(params)
                for now in params:
                    for own, mean in zip(now, means, strict=True):
                        own.copy_(mean)
    return [torch.cat([param.detach().reshape(-1) for param in model.parameters()]) for model in models]


def _early(rank: int, k: int) -> dict[int, int | None]:
    controlled = {"auto_lr": Early(undo=0), "total_steps": 160, "sync_every": 16}
    replica = Replica(rank, "adam homed", k, **controlled)
    replica.train(20)
    return {record.step: record.landed for record in replica.scheduler.history}


EARLY = Cases(2, _early, [(1,), (3,), (15,)])


@pytest.mark.parametrize("k", [1, 3, 15])
def test_an_early_average_lands_before_the_next(k: int) -> None:
    landed = {step: min(step + k, following) for step, following in ((2, 4), (4, 8), (8, 16), (16, 20 + k))}
    if k > 4:
        del landed[16]  # still on its way
    assert EARLY[(k,)] == [landed] * 2


def _trained(rank: int, kind: str, k: int) -> tuple[Tensor, list[list[float]], list[Tensor]]:
    """Parameters after a run, the learning rates of both replicas, and their parameters as simulated here. Buffers stay
    the replica's own, as in the simulation."""
    replica = Replica(rank, kind, k, average_buffers=False).train(TOTAL)
    rates: list[Any] = [None, None]
    dist.all_gather_object(rates, [rate for (rate,) in replica.rates])
    return replica.parameters(), rates, _simulated(k, rates)


TRAINED = Cases(2, _trained, [(kind, k) for kind in ("sgd loose", "sgd homed") for k in (1, 2, SYNC - 1)])


@pytest.mark.parametrize("k", [1, 2, SYNC - 1])
def test_a_whole_run_is_that_of_two_replicas_simulated_in_one_process(k: int) -> None:
    for kind in ("sgd loose", "sgd homed"):
        results = TRAINED[kind, k]
        (_, rates, (expected, other)), _ = results
        assert torch.equal(expected, other)
        assert rates[0] != rates[1], "the replicas have learning rates of their own"
        for parameters, _, _ in results:
            if kind == "sgd loose":
                assert torch.equal(parameters, expected)
            # A fused step may multiply and add with one rounding instead of two.
            torch.testing.assert_close(parameters, expected)


def _moments(rank: int) -> tuple[Tensor, ...]:
    """Second moments that grow, shrink or vanish while the average is on its way, by any factor that fp32 can hold."""
    generator = torch.Generator().manual_seed(rank)

    def sizes() -> Tensor:
        values = 10 ** (torch.rand(4000, generator=generator, dtype=torch.float64) * 36 - 26)
        return torch.where(torch.rand(4000, generator=generator) < 0.1, 0.0, values).float()

    moment = sizes()
    converger = Converger([torch.ones(3)], ProcessEnsemble(), state=lambda: {"exp_avg_sq": moment})
    flight = converger.start(Report(step=1), AverageRequest(average_state=True))
    then, now = moment.clone(), sizes()
    moment.copy_(now)
    converger.land(flight)
    return then, now, moment


@pytest.mark.parametrize("n", [3, pytest.param(2, marks=pytest.mark.full)])
def test_second_moments_never_become_negative(n: int) -> None:
    results = run_ranks(n, _moments)
    mean = torch.stack([then.double() for then, _, _ in results]).mean(dim=0)
    for then, now, landed in results:
        assert torch.isfinite(landed).all()
        assert (landed >= 0).all()
        torch.testing.assert_close(landed.double(), forgotten(now, then, mean), rtol=1e-5, atol=0)


def _counted(rank: int, kind: str) -> list[list[float]]:
    """Rank 1 skips its second step; the counts differ until the average lands."""
    replica = Replica(rank, kind, 2)
    seen = []
    for step in range(1, TOTAL + 1):
        replica.optimizer.zero_grad()
        replica.loss().backward()
        if not (rank == 1 and step == 2):
            replica.optimizer.step()
        replica.scheduler.step(1.0)
        seen.append([float(state["step"]) for state in replica.optimizer.state.values()])
    return seen


COUNTED = Cases(2, _counted, [("adam loose",), ("adam homed",)])


@pytest.mark.parametrize("kind", ["adam loose", "adam homed"])
def test_step_counts_become_the_largest_where_the_average_lands(kind: str) -> None:
    whole, skipped = COUNTED[(kind,)]
    assert [set(counts) for counts in whole] == [{float(step)} for step in range(1, TOTAL + 1)]
    behind = [1, 1, 2, 3, 4]  # until it lands after step 6
    assert [set(counts) for counts in skipped] == [{float(c)} for c in (*behind, *range(6, TOTAL + 1))]


class Masked(nn.Module):
    """A module with buffers of booleans and of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("bytes", torch.tensor([250, 3], dtype=torch.uint8))


def _other_buffers(rank: int, kinds: list[str]) -> list[Any]:
    torch.manual_seed(0)
    model = Masked()
    for name in ("mask", "bytes"):
        if name not in kinds:
            delattr(model, name)
    if rank == 1:
        for buffer in model.buffers():
            buffer.copy_(buffer.flip(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        0.1,
        8,
        sync_every=4,
        auto_lr=False,
        cycle_momentum=False,
        model=model,
        averaging=hk.Averaging(overlap_steps=2),
    )
    for _ in range(6):
        optimizer.zero_grad()
        model.linear(torch.ones(2, 6) + rank).sum().backward()
        optimizer.step()
        scheduler.step()
    return [buffer.tolist() for buffer in model.buffers()]


OTHER_BUFFERS = Cases(2, _other_buffers, {"bytes": (["bytes"],), "mask": (["mask"],)})


def test_differences_of_bytes_wrap_around() -> None:
    assert OTHER_BUFFERS["bytes"] == [[[250, 3]]] * 2


def test_masks_are_those_of_the_first_replica() -> None:
    assert OTHER_BUFFERS["mask"] == [[[True, False]]] * 2


def _late_state(rank: int) -> list[float]:
    """A parameter that has its first gradient, and so its state, while an average is on its way."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    scheduler = hk.HDETOneCycleLR(
        optimizer, 0.01, 8, sync_every=4, auto_lr=False, gradients="local", averaging=hk.Averaging(overlap_steps=2)
    )
    for step in range(8):
        for number, param in enumerate(params):
            param.grad = torch.full((2,), 1.0 + rank) if number == 0 or step >= 4 else None
        optimizer.step()
        scheduler.step()
    return [float(param.detach()[0]) for param in params]


def test_a_parameter_may_be_unfrozen_while_an_average_is_on_its_way() -> None:
    first, second = run_ranks(2, _late_state)
    assert first == second


# Training does not wait

#: In seconds; a rank that waits for an average which waits for the rank ends here.
DEADLOCK = 60


def _late_rank(rank: int) -> list[int]:
    """Rank 1 does not reach its second sync, at step 8, before rank 0 has made steps 8, 9 and 10."""
    replica = Replica(rank, "sgd homed", SYNC - 1)
    replica.train(2 * SYNC - 1)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 went on"], timedelta(seconds=DEADLOCK))
    replica.train(3)
    store.set("rank 0 went on", "")
    replica.train(1)
    return [record.landed for record in replica.scheduler.history]


def test_training_does_not_wait_for_a_late_rank() -> None:
    assert run_ranks(2, _late_rank) == [[7, 11, 11]] * 2


def _slow_collective(rank: int) -> dict[int, list[bool]]:
    """Collectives of the second sync do not start before steps 8, 9 and 10 are made. By overlap_steps, for each of
    them, whether it ran in the main thread."""
    original = dist.all_reduce
    in_main: dict[int, list[bool]] = {}
    for overlap_steps in (SYNC - 1, 0):
        replica = Replica(rank, "sgd homed", overlap_steps)
        replica.train(2 * SYNC - 1)
        went_on = threading.Event()

        def all_reduce(*args: Any, k: int = overlap_steps, went_on: threading.Event = went_on, **keywords: Any) -> Any:
            in_main.setdefault(k, []).append(threading.current_thread() is threading.main_thread())
            if k and not went_on.wait(DEADLOCK):
                raise RuntimeError("training waits for the collective")
            return original(*args, **keywords)

        dist.all_reduce = all_reduce
        replica.train(3)
        went_on.set()
        dist.barrier()
        replica.train(1)
        dist.all_reduce = original
    return in_main


def test_training_does_not_wait_for_a_slow_collective() -> None:
    for in_main in run_ranks(2, _slow_collective):
        overlapped, at_once = in_main[SYNC - 1], in_main[0]
        assert overlapped[0] is False, "in a thread of its own"
        assert overlapped[-1] is True, "the last average of the run does not overlap"
        assert all(at_once)


# Checkpoints

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "local, homed": {"kind": "adam homed"},
    "shared, loose": {"kind": "adam loose", "ddp": True},
    "auto_lr": {"kind": "sgd homed", "auto_lr": hk.RegressionController(start_at=0.0, stop_at=1.0)},
    "excluded": {"kind": "adam homed"},
}
#: Right after the second sync, and while its average is on its way; the first is landed.
SAVED_AT = (2 * SYNC, 2 * SYNC + 1)


def _spoiled(variant: str) -> Callable[[Any], None] | None:
    def spoil(replica: Replica) -> None:
        if replica.rank == 1 and replica.step == 2 * SYNC - 1:
            replica.scheduler.record_loss(math.nan)

    return spoil if variant == "excluded" else None


def _uninterrupted(rank: int, variant: str) -> tuple[dict[str, Any], dict[int, bytes]]:
    """A whole run, and what was saved at two of its steps."""
    replica = Replica(rank, overlap_steps=SYNC - 2, **CHECKPOINTS[variant])
    files = {}
    for at in SAVED_AT:
        files[at] = replica.train(at - replica.step, _spoiled(variant)).save()
    return replica.train(TOTAL - replica.step).result(), files


def _resumed(rank: int, variant: str, at: int, saved: bytes) -> dict[str, Any]:
    torch.manual_seed(55 + rank)
    replica = Replica(rank, overlap_steps=SYNC - 2, **CHECKPOINTS[variant])
    return replica.load(saved).train(TOTAL - at).result()


def _saved_and_resumed(rank: int, variant: str) -> dict[Any, Any]:
    """A run, its files, and the runs that resume from each of them."""
    whole, files = _uninterrupted(rank, variant)
    resumed = {at: _resumed(rank, variant, at, saved) for at, saved in files.items()}
    return {"whole": whole, "files": files, **resumed}


QUICK_CHECKPOINTS = ("local, homed", "excluded")
RESUMED = Cases(
    2,
    _saved_and_resumed,
    {variant: (variant,) for variant in QUICK_CHECKPOINTS},
    full={variant: (variant,) for variant in CHECKPOINTS if variant not in QUICK_CHECKPOINTS},
)


@pytest.mark.parametrize("variant", RESUMED.params())
def test_a_run_saved_while_an_average_is_on_its_way_resumes_bit_for_bit(variant: str) -> None:
    whole = [result["whole"] for result in RESUMED[variant]]
    assert whole[0]["history"][1]["landed"] == 2 * SYNC + 2
    assert whole[0]["history"][1]["excluded"] == ([1] if variant == "excluded" else [])
    for at in SAVED_AT:
        for a, b in zip(whole, [result[at] for result in RESUMED[variant]], strict=True):
            later = {name: {step: v for step, v in a[name].items() if step > at} for name in ("before", "after")}
            assert same({**a, **later, "rates": a["rates"][at:]}, b), at


def test_rank_0s_file_serves_all_ranks_while_an_average_is_on_its_way() -> None:
    first = RESUMED["local, homed"][0]["files"][SAVED_AT[1]]
    resumed = run_ranks(2, _resumed, "local, homed", SAVED_AT[1], first)
    assert same(resumed[0]["after"][TOTAL], resumed[1]["after"][TOTAL])
    assert [(h["step"], h["landed"]) for h in resumed[1]["history"]] == [(4, 6), (8, 10), (11, 11)]


def _shared_and_excluded(rank: int) -> bytes:
    replica = Replica(rank, "adam homed", 2, ddp=True, gradients="shared")
    return replica.train(2 * SYNC, _spoiled("excluded")).save()


def _another_size(rank: int, saved: bytes) -> Numbers:
    replica = Replica(rank, "adam homed", 2, ddp=True, gradients="shared").load(saved)
    return replica.train(TOTAL - replica.step).numbers()


def test_another_number_of_ranks_resumes_after_a_replica_was_left_out() -> None:
    saved, _ = run_ranks(2, _shared_and_excluded)
    first, *others = run_ranks(3, _another_size, saved)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first if name.startswith("param"))


# Beside an average that is on its way


def _evaluated(rank: int, kind: str, evaluate: bool) -> dict[str, Any]:
    """Where it is evaluated, after every step; an average is on its way until the step after which it lands."""
    replica = Replica(rank, kind, 2)
    original = dist.all_reduce
    due = threading.Event()

    def all_reduce(*args: Any, **keywords: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and not due.wait(DEADLOCK):
            raise RuntimeError("the average was not waited for")
        return original(*args, **keywords)

    dist.all_reduce = all_reduce
    inside = []
    for step in range(1, TOTAL + 1):
        due.set() if step in lands(2) else due.clear()
        replica.train(1)
        if evaluate:
            own = replica.numbers()
            with replica.scheduler.consensus():
                inside.append((own, replica.numbers()))
            assert same(own, replica.numbers())
    dist.all_reduce = original
    return {**replica.result(), "inside": inside}


def test_consensus_is_the_mean_of_now_and_disturbs_nothing() -> None:
    found = Cases(2, _evaluated, [("sgd masters", True), ("sgd masters", False)])
    evaluated, plain = found["sgd masters", True], found["sgd masters", False]
    for a, b in zip(evaluated, plain, strict=True):
        assert same({**a, "inside": []}, b)
    for (own0, inside0), (own1, inside1) in zip(*(r["inside"] for r in evaluated), strict=True):
        for name in own0:
            if name.startswith(("param", "buffer")):
                assert torch.equal(inside0[name], inside1[name]), name
            if name.startswith("param"):
                assert torch.equal(inside0[name], (own0[name] + own1[name]) / 2), name


def _by_hand(rank: int, kind: str) -> dict[str, Any]:
    replica = Replica(rank, kind, SYNC - 1)
    replica.train(SYNC + 1)
    replica.scheduler.converge()
    middle = replica.numbers()
    replica.train(TOTAL - replica.step)
    return {**replica.result(), "middle": middle}


BY_HAND = Cases(2, _by_hand, [("adam homed",), ("sgd loose",)])


@pytest.mark.parametrize("kind", ["adam homed", "sgd loose"])
def test_an_average_by_hand_lands_the_one_on_its_way_first(kind: str) -> None:
    results = BY_HAND[(kind,)]
    assert same(results[0]["middle"], results[1]["middle"])
    for r in results:
        found = [(h["kind"], h["step"], h["landed"]) for h in r["history"]]
        assert found == [("sync", 4, 5), ("manual", 5, 5), ("sync", 8, 11), ("last", 11, 11)]
        assert same(r["before"][7], r["after"][7]), "what was due after step 7 has landed already"
        for name in (name for name in r["middle"] if name.startswith("param")):
            # The corrections add up to nothing.
            mean = sum(other["after"][5][name].double() for other in results) / 2
            torch.testing.assert_close(r["middle"][name].double(), mean, rtol=0, atol=8 * 2.0**-24)


# Replicas that are not finite


#: The second sync, and before and after its landing.
AROUND = (("before", 8), ("before", 10), ("after", 10))


def _excluded(rank: int, kind: str, ddp: bool) -> dict[str, Any]:
    """At the second sync rank 0's loss is bad, and its moments are not those that it should have."""

    def spoil(replica: Replica) -> None:
        if rank == 0 and replica.step == 2 * SYNC - 1:
            replica.scheduler.record_loss(math.nan)
            for state in replica.optimizer.state.values():
                state["exp_avg"].mul_(3.0)
                state["exp_avg_sq"].mul_(5.0)

    return Replica(rank, kind, 2, ddp=ddp).train(TOTAL, spoil).result()


EXCLUDED = Cases(
    3,
    _excluded,
    [("adam homed", True), ("adam loose", False)],
    full=[("adam homed", False), ("adam loose", True)],
)


@pytest.mark.parametrize(("kind", "ddp"), EXCLUDED.params())
def test_a_replica_that_was_left_out_takes_the_mean_where_it_lands(kind: str, ddp: bool) -> None:
    results = EXCLUDED[kind, ddp]
    start, now, landed = ([r[when][step] for r in results] for when, step in AROUND)
    for name in start[0]:
        kind_of = name.split()[0]
        mean = (start[1][name] + start[2][name]) / 2
        if kind_of == "param":
            assert torch.equal(landed[0][name], mean), name
            for rank in (1, 2):
                assert torch.equal(landed[rank][name], now[rank][name] + (mean - start[rank][name])), name
        elif kind_of == "buffer" or (kind_of == "state" and not ddp):
            assert torch.equal(landed[0][name], mean), name
        elif kind_of == "state":  # which does not travel with shared gradients, but where it lands
            for each in landed:
                assert torch.equal(each[name], (now[1][name] + now[2][name]) / 2), name
        elif kind_of == "integer":
            assert torch.equal(landed[0][name], start[1][name]), "of the first sound replica"
    for r in results:
        found = [(h["excluded"], h["step"], h["landed"]) for h in r["history"]]
        assert found == [([], 4, 6), ([0], 8, 10), ([], 11, 11)]
        assert math.isnan(r["history"][1]["losses"][0])
        assert all(torch.isfinite(value).all() for value in r["after"][TOTAL].values())


def _broken_on_the_way(rank: int, kind: str) -> dict[str, Any]:
    """The parameters of rank 1 turn bad at step 5, when the average of step 4 is on its way."""

    def spoil(replica: Replica) -> None:
        if rank == 1 and replica.step == SYNC:
            with torch.no_grad():
                replica.module.inner.weight[0, 0] = math.nan

    return Replica(rank, kind, 2).train(TOTAL, spoil).result()


BROKEN = Cases(3, _broken_on_the_way, [("adam homed",), ("adam masters",)], full=[("adam loose",)])


@pytest.mark.parametrize("kind", BROKEN.params())
def test_a_replica_that_breaks_before_the_landing_is_left_out_at_the_next_sync(kind: str) -> None:
    results = BROKEN[(kind,)]
    for r in results:
        assert [h["excluded"] for h in r["history"]][:2] == [[], [1]]
    for rank in (0, 2):
        assert all(torch.isfinite(v).all() for step in results[rank]["after"].values() for v in step.values())
    name = "param inner.weight"
    bad = [step for step, numbers in results[1]["after"].items() if not torch.isfinite(numbers[name]).all()]
    first = 6 if kind == "adam masters" else 5  # a master follows when its parameter is next looked at
    assert bad == list(range(first, 10)), "until the average of step 8 lands after step 10"
    start, _, landed = ([r[when][step] for r in results] for when, step in AROUND)
    assert torch.equal(landed[1][name], (start[0][name] + start[2][name]) / 2)
    assert all(torch.isfinite(value).all() for value in landed[1].values())
    assert same(results[0]["after"][TOTAL], results[1]["after"][TOTAL])


def test_a_healed_replica_takes_part_in_the_next_average() -> None:
    """Its parameters are finite from step 10 on, and so is its loss at step 11."""
    for r in BROKEN[("adam homed",)]:
        assert r["history"][2]["excluded"] == []


def _bad_end(rank: int) -> tuple[list[str], list[bool], list[int], int]:
    """All losses are bad at the last step, after which an average lands too; and it is tried twice."""
    replica = Replica(rank, "sgd homed", SYNC - 1).train(TOTAL - 1)
    replica.optimizer.step()
    messages, same_as_before, records = [], [], []
    for _ in range(2):
        before, known = replica.numbers(), len(replica.scheduler.history)
        with pytest.raises(RuntimeError) as error:
            replica.scheduler.step(math.nan)
        messages.append(str(error.value))
        same_as_before.append(same(before, replica.numbers()))
        records.append(len(replica.scheduler.history) - known)
    return messages, same_as_before, records, replica.step


def test_what_has_landed_stays_when_the_last_sync_fails() -> None:
    for messages, unchanged, records, step in run_ranks(2, _bad_end):
        assert all("no replica is sound at step 11" in message for message in messages)
        assert unchanged == [False, True], "the average of the sync before lands once"
        assert records == [1, 0]
        assert step == TOTAL - 1


# The controller


def _controlled(rank: int, overlap_steps: int) -> dict[str, Any]:
    """Losses that depend on rank and step alone."""
    trainer = Trainer(
        rank, ddp=False, groups=True, total_steps=20, sync_every=5, spread=0.5, overlap_steps=overlap_steps,
        tie_groups=False, gradients="local", auto_lr=hk.RegressionController(start_at=0.0, stop_at=1.0, trust=None),
        explore=[hk.Explore("weight_decay", spread=0.5)],
    )  # fmt: skip
    controls, scheduled = [], []
    for step in range(20):
        trainer.rates.append([float(group["lr"]) for group in trainer.optimizer.param_groups])
        trainer.optimizer.zero_grad()
        trainer.loss().backward()
        trainer.optimizer.step()
        trainer.scheduler.step(1.0 + math.sin(7.0 * step + 3.0 * rank))
        controls.append(trainer.scheduler.cycle.spread.state_dict()["controller"])
        scheduled.append([float(rate) for rate in trainer.scheduler.cycle.spread.scheduled])
    history = [record.to_dict() for record in trainer.scheduler.history]
    return {"rates": trainer.rates, "controls": controls, "scheduled": scheduled, "history": history}


def test_the_controller_moves_at_the_landing_as_it_would_have_at_the_sync() -> None:
    k, controller = 2, hk.RegressionController()
    found = Cases(3, _controlled, [(0,), (k,)])
    for plain, overlapped in zip(found[(0,)], found[(k,)], strict=True):
        for before, after in zip(plain["history"], overlapped["history"], strict=True):
            for name in ("step", "cycle", "kind", "losses", "base", "values", "excluded", "gradients"):
                assert before[name] == after[name], name
        assert [h["landed"] for h in overlapped["history"]] == [7, 12, 17, 20]
        late, moved = overlapped["controls"], plain["controls"]
        assert all(moved[step - 1] != moved[step] for step in (4, 9, 14)), "it moves at every sync"
        on_its_way = [step for start in (5, 10, 15) for step in range(start, start + k)]  # steps that are finished
        for step in range(1, 20):
            last = step - step % 5 - 1 if step in on_its_way else step
            assert late[step - 1] == moved[last - 1], step
        # The rate of a step is the one that was written at the end of the step before.
        ratio = np.array(overlapped["rates"]) / np.array(plain["rates"])  # [step, group]
        for step in range(1, 20):
            for group, scheduled in enumerate(plain["scheduled"][step - 1]):
                here, there = (controller.base(control[step - 1], group, scheduled) for control in (late, moved))
                np.testing.assert_allclose(ratio[step, group], here / there, rtol=1e-12)


# Together with compression


def _compressed(rank: int, format: Any) -> dict[str, Any]:
    return Replica(rank, "sgd homed", 2, compress=format, bucket_bytes=256, spread=0.9).train(TOTAL).result()


COMPRESSED = Cases(2, _compressed, [("bf16",), ("int8",)])


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_a_compressed_average_lands_too(format: str) -> None:
    """The first travels in full. The second is off by the rounding of a replica's difference and that of their mean,
    each at most this share of the largest difference to the first."""
    share = {"bf16": 2.0**-8, "int8": 1 / 254}[format]
    results = COMPRESSED[(format,)]

    def flat(rank: int, when: str, step: int) -> Tensor:
        numbers = results[rank][when][step]
        return torch.cat([v.double().reshape(-1) for name, v in numbers.items() if name.startswith("param")])

    mean = {start: (flat(0, "before", start) + flat(1, "before", start)) / 2 for start in (4, 8)}
    largest = max(float((flat(rank, "before", 8) - mean[4]).abs().max()) for rank in range(2))
    bound = {4: 0.0, 8: share * largest + share * largest * (1 + share)}
    for start in (4, 8):
        rounding = 8 * 2.0**-24 * (float(mean[start].abs().max()) + 1)
        for rank in range(2):
            reached = flat(rank, "before", start) + flat(rank, "after", start + 2) - flat(rank, "before", start + 2)
            off = float((reached - mean[start]).abs().max())
            assert off <= bound[start] + rounding, (start, rank)
            assert (off > rounding) is (start == 8), "the second is rounded"
    assert same(results[0]["after"][TOTAL], results[1]["after"][TOTAL])


# What is refused, and one replica alone


def test_the_hypergradient_controller_needs_the_average_at_the_sync() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match=r"HypergradientController needs the averaged parameters .* overlap_steps=2"):
        hk.HDETOneCycleLR(
            optimizer,
            0.1,
            40,
            sync_every=4,
            auto_lr=hk.HypergradientController(),
            averaging=hk.Averaging(overlap_steps=2),
        )


def _alone(rank: int, talks: bool) -> list[Any]:
    ensemble = ProcessEnsemble() if talks else None
    plain, overlapped = (Replica(rank, "adam homed", k, ensemble=ensemble).train(TOTAL) for k in (0, 2))
    return [same(plain.numbers(), overlapped.numbers()), [record.landed for record in overlapped.scheduler.history]]


def test_one_replica_alone_has_nothing_to_wait_for() -> None:
    found = Cases(1, _alone, [(False,), (True,)])
    assert found[(False,)] == [[True, [4, 8, 11]]]
    assert found[(True,)] == [[True, [6, 10, 11]]], "a group of one averages with itself"


# Around an average that is on its way


def _saved_in_the_consensus(rank: int) -> tuple[Tensor, Tensor, list[int]]:
    settings: dict[str, Any] = {"ddp": False, "overlap_steps": 2, "auto_lr": False, "spread": 0.5}
    trainer = Trainer(rank, **settings).train(4)
    with trainer.scheduler.consensus():
        parts = (trainer.module, trainer.optimizer, trainer.scheduler)
        files = [copy.deepcopy([part.state_dict() for part in parts])]
        saved = trainer.parameters()
    dist.broadcast_object_list(files, src=0)
    resumed = Trainer(rank, **settings)
    for part, state in zip((resumed.module, resumed.optimizer, resumed.scheduler), files[0], strict=True):
        part.load_state_dict(state)
    resumed.scheduler.converge()
    return saved, resumed.parameters(), [record.step for record in resumed.scheduler.history]


def test_what_is_saved_in_the_consensus_has_nothing_left_to_correct() -> None:
    for saved, resumed, steps in run_ranks(2, _saved_in_the_consensus):
        assert torch.equal(saved, resumed)
        assert steps == [4, 4], "the sync that was on its way, and converge()"


def _rolled_back(rank: int, compress: Any) -> tuple[Tensor, list[tuple[int, int | None]]]:
    options: dict[str, Any] = {"overlap_steps": 1, "auto_lr": False, "total_steps": 20, "sync_every": 2}
    trainer = Trainer(rank, ddp=False, compress=compress, **options).train(7)
    parts = (trainer.module, trainer.optimizer, trainer.scheduler)
    saved = [copy.deepcopy(part.state_dict()) for part in parts]
    # Rank 1 makes the next step when rank 0 goes back, so that rank 0's average is still on its way then.
    store, key = dist.distributed_c10d._get_default_store(), f"rank 0 goes back, {compress}"
    if rank == 1:
        store.wait([key], timedelta(seconds=DEADLOCK))
    trainer.train(1)
    store.set(key, "")
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    trainer.train(13)
    return trainer.parameters(), [(record.step, record.landed) for record in trainer.scheduler.history]


ROLLED_BACK = Cases(2, _rolled_back, [(None,), ("int8",)])


@pytest.mark.parametrize("compress", [None, "int8"])
def test_going_back_while_an_average_is_on_its_way(compress: Any) -> None:
    results = ROLLED_BACK[(compress,)]
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == [(step, min(step + 1, 20)) for step in range(2, 21, 2)]


def _groups(rank: int, how: str) -> Any:
    options: dict[str, Any] = {}
    if how == "of some":
        dist.new_group([0, 1])  # a group that not all ranks belong to; the average is over all of them
    if how == "unsorted":
        made = [dist.new_group([2, 0, 1], sort_ranks=False) for _ in range(2)]
        options["ensemble"] = ProcessEnsemble(made[0])
        try:
            Trainer(rank, ddp=False, auto_lr=False, overlap_steps=1, **options).train(4)
        except RuntimeError as error:
            message = str(error)
        options["ensemble"] = ProcessEnsemble(made[0], overlap_group=made[1])
        return message, Trainer(rank, ddp=False, auto_lr=False, overlap_steps=1, **options).train(12).parameters()
    return Trainer(rank, ddp=False, auto_lr=False, overlap_steps=1, **options).train(12).parameters()


@pytest.mark.parametrize("how", [pytest.param("world", marks=pytest.mark.full), "of some"])
def test_a_second_group_is_made_whatever_groups_there_are(how: str) -> None:
    first, *others = run_ranks(3, _groups, how)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch has no groups whose ranks are not in order",
)
def test_a_group_in_another_order_needs_a_second_one() -> None:
    (message, first), *others = run_ranks(3, _groups, "unsorted")
    assert "not in order, [2, 0, 1]" in message
    assert "overlap_group" in message
    assert all(torch.equal(first, other) for _, other in others)


def test_differences_take_the_memory_of_the_averages() -> None:
    param, half = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    payload = ModelTensors([param, half], SingleReplica(), dict, None, tuple).payload(include_state=False)
    before, after = payload.copy(), payload.copy()
    for tensor in after.outlines:
        tensor.add_(0.5)
    averages = [tensor.data_ptr() for tensor in after.outlines]
    correction = Correction.between(before, after, sound=(True,), heal=False)
    assert [change.tolist() for change in correction.params] == [[0.5, 0.5], [0.5, 0.5]]
    assert [change.data_ptr() in averages for change in correction.params] == [True, False], "of bf16 it is float32"
    assert param.tolist() == [1.0, 2.0]
