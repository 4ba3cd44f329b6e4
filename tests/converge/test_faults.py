"""Faults in real processes: a rank that dies, hangs, raises, turns bad or was built otherwise.

The promise: an error on every remaining rank, within the timeout of the group, with everything as it was before the
sync, bit for bit. A replica that merely is not finite is left out, healed and recorded.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import hdet_kernels as hk
from hdet_kernels.optim import FusedAdamW
from tests.ranks import GROUP_TIMEOUT, Cases, run_ranks
from tests.training import Trainer, batch, network, with_averaging

#: The timeout of the group that averages, in seconds, where a test has to wait for it.
TIMEOUT = 3.0
#: An error that took longer than this came from the timeout of another group; less is not asked of a busy machine.
LATEST = GROUP_TIMEOUT / 2

OPTIMIZERS: dict[str, Any] = {
    "homed": FusedAdamW,
    "loose": torch.optim.AdamW,
    "masters": FusedAdamW,
    "fixed": lambda params, lr: FusedAdamW(params, lr=lr, gradients="fixed"),
    "no masters": lambda params, lr: FusedAdamW(params, lr=lr, master_weights=False),
}
KINDS = ("homed", "loose", "masters")
#: A sync at steps 2, 4, … with many buckets: the parameters alone are some 600 bytes.
SETTINGS: dict[str, Any] = {
    "max_lr": 0.01,
    "total_steps": 12,
    "sync_every": 2,
    "auto_lr": False,
    "gradients": "local",
    "bucket_bytes": 64,
}
#: A sync at steps 4, 8, 12; what starts at 4 and 8 lands at 6 and 10.
OVERLAPPED: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2}


class Replica(Trainer):
    """A replica on local gradients, with BatchNorm; its group has a timeout of its own on request."""

    def __init__(
        self, rank: int, kind: str, *, dtype: torch.dtype | None = None, timeout: float | None = None, **options: Any
    ) -> None:
        half = kind in ("masters", "no masters")
        self.rank, self.device = rank, "cpu"
        self.rates = []
        self.dtype = dtype or (torch.bfloat16 if half else torch.float32)
        self.module = network(batch_norm=True).to(self.dtype)
        self.model = self.module
        self.optimizer = OPTIMIZERS[kind](self.module.parameters(), lr=0.01)
        if timeout is not None:
            options["ensemble"] = hk.ProcessEnsemble(dist.new_group(timeout=timedelta(seconds=timeout)))
        self.scheduler = hk.HDETOneCycleLR(self.optimizer, model=self.module, **with_averaging({**SETTINGS, **options}))

    def loss(self) -> Tensor:
        x, y = batch(self.rank, self.step)
        return F.mse_loss(self.model(x.to(self.dtype)), y.to(self.dtype))

    def optimize(self, spoil: Callable[[], None] | None = None) -> Tensor:
        """The optimizer's part of a step; ``spoil`` is called between the gradients and the update."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        if spoil is not None:
            spoil()
        self.optimizer.step()
        return loss.detach()

    def numbers(self) -> dict[str, Tensor]:
        """Everything that a sync brings together: parameters, state with masters and step counts, buffers."""
        found: dict[str, Tensor] = {f"parameter {name}": param for name, param in self.module.named_parameters()}
        for name, param in self.module.named_parameters():
            found |= {f"{key} of {name}": value for key, value in self.optimizer.state[param].items()}
        found |= {f"buffer {name}": buffer for name, buffer in self.module.named_buffers()}
        return {name: tensor.detach().clone() for name, tensor in found.items()}


def bits(value: Any) -> Any:
    """Return a value that equals another one exactly if both have the same bits, NaN included."""
    if isinstance(value, Tensor):
        flat = value.detach().clone().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [bits(entry) for entry in value]
    return value.hex() if isinstance(value, float) else value


def snapshot(replica: Replica, in_flight: bool) -> dict[str, Any]:
    parts = {
        "numbers": replica.numbers(),
        "gradients": [param.grad for param in replica.module.parameters()],
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in replica.optimizer.param_groups],
        "step": replica.step,
        "last_lr": replica.scheduler.get_last_lr(),
        "base_lr": replica.scheduler.get_base_lr(),
        "history": [record.to_dict() for record in replica.scheduler.history],
    }
    if not in_flight:
        parts["scheduler"] = replica.scheduler.state_dict()
    return {name: bits(part) for name, part in parts.items()}


def attempt(replica: Replica, loss: float | Tensor = 1.0, in_flight: bool = False) -> dict[str, Any]:
    """Call ``scheduler.step()`` and return the error, its time, and the names of everything that changed."""
    before = snapshot(replica, in_flight)
    start = time.monotonic()
    error: Exception | None = None
    try:
        replica.scheduler.step(loss)
    except Exception as raised:
        error = raised
    seconds = time.monotonic() - start
    after = snapshot(replica, in_flight)
    changed = [name for name in before if before[name] != after[name]]
    return {
        "error": type(error).__name__, "is_runtime_error": isinstance(error, RuntimeError), "message": str(error),
        "seconds": seconds, "changed": changed, "step": replica.step,
    }  # fmt: skip


def attempts(replica: Replica, loss: float | Tensor) -> dict[str, Any]:
    """Return the first attempt that raises: an error of an overlapped average is raised when it lands."""
    result = attempt(replica, loss, in_flight=True)
    last = replica.step + 3
    while result["error"] == "NoneType" and replica.step < last:
        result = attempt(replica, replica.optimize(), in_flight=True)
    return result


def check_refused(result: dict[str, Any]) -> None:
    assert result["is_runtime_error"], result
    assert result["changed"] == [], result
    assert result["seconds"] < LATEST, result


def sabotage(number: int, act: Callable[[], None], instead: bool) -> None:
    """Act in this process after its ``number``-th all_reduce from now on is finished, or instead of it."""
    calls = itertools.count(1)

    def sabotaged(original: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, **keywords: Any) -> Any:
            here = next(calls) == number
            if here and instead:
                act()
            work = original(*args, **keywords)
            if here:
                if work is not None:
                    work.wait()
                act()
            return work

        return collective

    dist.all_reduce = sabotaged(dist.all_reduce)


def end_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Cable(Exception):
    """The error of the sabotaged collective."""


def pull_cable() -> NoReturn:
    raise Cable("pulled out")


# A rank that dies


def train_up_to_a_sync(replica: Replica, rank: int, after: int, act: Callable[[], None]) -> Any:
    """Return the loss at the sync at step 4, in which rank 1 acts after so many collectives: with 0 before it."""
    replica.train(3)
    loss = replica.optimize()
    if rank == 1:
        if not after:
            act()
        sabotage(after, act, instead=False)
    return loss


def _killed(rank: int, kind: str, after: int) -> dict[str, Any]:
    """Rank 1 is killed in or before the sync at step 4, to which rank 2 comes late if it is before."""
    replica = Replica(rank, kind)
    loss = train_up_to_a_sync(replica, rank, after, end_process)
    if rank == 2 and not after:
        time.sleep(1.0)
    return attempt(replica, loss)


@pytest.mark.parametrize(
    ("after", "kind"), [(0, "loose"), (3, "homed"), pytest.param(1, "masters", marks=pytest.mark.full)]
)
def test_a_killed_rank_is_an_error_on_the_others_with_everything_intact(after: int, kind: str) -> None:
    results = run_ranks(3, _killed, kind, after, expect_dead=1)
    assert results[1] is None
    seen = "after it came" if after else "it was last seen at sync at step 2"
    for result in (results[0], results[2]):
        check_refused(result)
        assert result["message"].startswith(f"sync at step 4 failed: rank 1 has ended ({seen})"), result["message"]
        assert re.findall(r"rank (\d)", result["message"]) == ["1"], "no rank that lives is accused"
        assert result["step"] == 3


def _killed_then_saved(rank: int, kind: str, folder: Path) -> Any:
    replica = Replica(rank, kind)
    attempt(replica, train_up_to_a_sync(replica, rank, 2, end_process))
    parts = (replica.module, replica.optimizer, replica.scheduler)
    torch.save([part.state_dict() for part in parts], folder / f"rank{rank}.pt")
    return replica.numbers()


def _go_on(rank: int, kind: str, folder: Path) -> Any:
    replica = Replica(rank, kind)
    model, optimizer, scheduler = torch.load(folder / f"rank{(0, 2)[rank]}.pt", weights_only=True)
    replica.module.load_state_dict(model)
    replica.optimizer.load_state_dict(optimizer)
    before = replica.numbers()
    try:
        replica.scheduler.load_state_dict(scheduler)
    except ValueError as error:
        return before, str(error)
    return before, ""


def test_what_a_survivor_saves_after_the_error_is_whole(tmp_path: Path) -> None:
    saved = run_ranks(3, _killed_then_saved, "homed", tmp_path, expect_dead=1)
    for numbers, (loaded, message) in zip((saved[0], saved[2]), run_ranks(2, _go_on, "homed", tmp_path), strict=True):
        assert bits(numbers) == bits(loaded)
        assert "has 3 replicas and was saved 1 steps into a cycle, this run has 2" in message


# A rank that hangs


def _stopped(rank: int, kind: str, after: int, folder: Path) -> dict[str, Any]:
    replica = Replica(rank, kind, timeout=TIMEOUT)
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    result = attempt(replica, train_up_to_a_sync(replica, rank, after, stop_process))
    (folder / f"done{rank}").touch()
    deadline = time.monotonic() + LATEST
    while rank == 0 and not (folder / "done2").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if rank == 0:
        os.kill(pids[1], signal.SIGKILL)
    return result


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.full), 2])
def test_a_rank_that_hangs_is_an_error_on_the_others_within_the_timeout(after: int, tmp_path: Path) -> None:
    results = run_ranks(3, _stopped, "homed", after, tmp_path, expect_dead=1)
    assert results[1] is None
    for result in (results[0], results[2]):
        check_refused(result)
        assert (
            f"rank 1 {'came and then gave no sign' if after else f'did not come within {TIMEOUT}'}" in result["message"]
        )
        assert re.findall(r"rank (\d)", result["message"]) == ["1"]
        assert result["step"] == 3


# A rank whose collective raises


def _raising(rank: int, kind: str, number: int) -> dict[str, Any]:
    replica = Replica(rank, kind, timeout=TIMEOUT)
    dist.barrier()
    replica.train(3)
    loss = replica.optimize()
    if rank == 1:
        sabotage(number, pull_cable, instead=True)
    result = attempt(replica, loss)
    dist.barrier()  # of the default group: the rank that raised is there as long as the others wait for it
    return result


@pytest.mark.parametrize(("number", "kind"), [(3, "loose"), pytest.param(1, "homed", marks=pytest.mark.full)])
def test_an_exception_in_the_collective_leaves_everything_intact_on_all_ranks(number: int, kind: str) -> None:
    results = run_ranks(3, _raising, kind, number)
    assert (results[1]["error"], results[1]["message"]) == ("Cable", "pulled out")
    assert results[1]["changed"] == []
    for result in (results[0], results[2]):
        check_refused(result)
        assert "rank 1 raised Cable: pulled out" in result["message"]


# A replica that is not finite


def _spoil(replica: Replica, what: str) -> None:
    if what == "master alone":
        replica.optimizer.state[replica.module.inner.weight]["master"][1, 1] = math.nan
    elif what == "moment":
        replica.optimizer.state[replica.module.inner.weight]["exp_avg_sq"][0, 0] = math.inf
    elif what == "buffer":
        dict(replica.module.named_buffers())["norm.running_var"][3] = math.inf
    elif what in ("loss", "skipped", "integer buffer"):
        replica.scheduler.record_loss(math.nan)


def _bad_gradient(replica: Replica) -> None:
    gradient = replica.module.inner.weight.grad
    assert gradient is not None
    gradient[1, 1] = math.nan


def _sick(rank: int, kind: str, what: str, options: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 turns bad at step 4. The others' integer buffers differ, and rank 0's differs from both."""
    replica = Replica(rank, kind, **options)
    replica.train(3)
    loss = replica.optimize((lambda: _bad_gradient(replica)) if what == "gradient" and rank == 0 else None)
    dict(replica.module.named_buffers())["norm.num_batches_tracked"].fill_((100, 20, 30)[rank])
    if rank == 0:
        _spoil(replica, what)
    before = replica.numbers()
    replica.scheduler.step(loss if what != "gradient" or rank else math.nan)
    after = replica.numbers()
    replica.train(4)
    return {
        "before": before, "after": after, "end": replica.numbers(),
        "excluded": [record.excluded for record in replica.scheduler.history],
    }  # fmt: skip


def check_healed(results: list[dict[str, Any]]) -> None:
    """Check that all ranks have the mean of ranks 1 and 2 and stay finite from there."""
    for name, tensor in results[0]["after"].items():
        assert torch.isfinite(tensor).all(), name
        for other in results[1:]:
            assert bits(tensor) == bits(other["after"][name]), name
        if name.startswith(("parameter", "master")):
            mean = (results[1]["before"][name].double() + results[2]["before"][name].double()) / 2
            rough = tensor.dtype == torch.bfloat16
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-2 if rough else 3e-7, atol=1e-7)
    for result in results:
        assert all(torch.isfinite(tensor).all() for tensor in result["end"].values())


QUICK = [("homed", "loss"), ("loose", "moment"), ("homed", "buffer"), ("masters", "gradient")]
SICK = [
    *itertools.product(["homed", "loose"], ["loss", "moment", "buffer"]),
    ("masters", "moment"),
    ("fixed", "gradient"),
]
HEALED = Cases(
    3,
    _sick,
    {case: (*case, {}) for case in QUICK},
    full={case: (*case, {}) for case in SICK if case not in QUICK},
)


@pytest.mark.parametrize(("kind", "what"), HEALED.params())
def test_a_bad_replica_is_left_out_and_healed_in_everything(kind: str, what: str) -> None:
    results = HEALED[kind, what]
    check_healed(results)
    for result in results:
        assert result["excluded"] == [[], [0], [], []]
        tracked = result["after"]["buffer norm.num_batches_tracked"]
        assert int(tracked) == 20, "an integer is the first healthy replica's"


def test_a_master_that_alone_is_bad_does_not_reach_the_mean() -> None:
    """Its parameter is finite: the replica is either left out, or its master is made of the parameter again."""
    results = run_ranks(3, _sick, "masters", "master alone", {})
    for name, tensor in results[0]["after"].items():
        assert torch.isfinite(tensor).all(), name
        assert name.startswith("buffer") or all(bits(tensor) == bits(other["after"][name]) for other in results), name
    for name, tensor in results[0]["after"].items():
        if name.startswith("parameter"):
            master = results[0]["after"][f"master of {name.removeprefix('parameter ')}"]
            assert torch.equal(tensor, master.to(torch.bfloat16)), name
    assert results[0]["excluded"] in ([[], [0], [], []], [[], [], [], []])


def _skipped(rank: int, kind: str) -> dict[str, Any]:
    """GradScaler makes rank 0 skip its second and third step; then its loss is bad."""
    replica = Replica(rank, kind, sync_every=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        replica.optimizer.zero_grad()
        loss = replica.loss()
        scaler.scale(loss).backward()
        if rank == 0 and step in (1, 2):
            _bad_gradient(replica)
        scaler.step(replica.optimizer)
        scaler.update()
        before = replica.numbers()
        replica.scheduler.step(math.nan if rank == 0 and step == 3 else loss.detach())
    after = replica.numbers()
    replica.train(4)
    excluded = [record.excluded for record in replica.scheduler.history]
    return {"before": before, "after": after, "end": replica.numbers(), "excluded": excluded}


SKIPPED = Cases(3, _skipped, [("homed",), ("loose",)])


@pytest.mark.parametrize("kind", ["homed", "loose"])
def test_a_healed_replica_has_the_step_counts_of_the_others(kind: str) -> None:
    results = SKIPPED[(kind,)]
    counts = [[float(r[when]["step of inner.weight"]) for r in results] for when in ("before", "after", "end")]
    assert counts == [[2.0, 4.0, 4.0], [4.0, 4.0, 4.0], [8.0, 8.0, 8.0]]
    check_healed(results)
    assert [result["excluded"] for result in results] == [[[0], []]] * 3


# Nobody is finite


def _all_bad(rank: int, kind: str, what: str, options: dict[str, Any]) -> dict[str, Any]:
    replica = Replica(rank, kind, **options)
    replica.train(7 if "overlap_steps" in options else 3)
    replica.optimize()
    _spoil(replica, ("buffer", "loss", "moment")[rank] if what == "one of each" else what)
    return attempts(replica, 1.0)


ALL_BAD = Cases(
    3,
    _all_bad,
    {**{kind: (kind, "one of each", {}) for kind in KINDS}, "overlapped": ("homed", "moment", OVERLAPPED)},
)


@pytest.mark.parametrize("kind", KINDS)
def test_when_all_are_bad_everything_is_as_it_was(kind: str) -> None:
    for result in ALL_BAD[kind]:
        check_refused(result)
        assert result["step"] == 3
        assert "no replica is sound at step 4" in result["message"]
        assert "buffer norm.running_var on rank 0" in result["message"]
        assert "the loss on rank 1" in result["message"]
        assert "exp_avg_sq on rank 2" in result["message"]


# A rank that was built otherwise


def _different(rank: int, how: str) -> dict[str, Any]:
    odd = rank == 1
    kind = "loose"
    options: dict[str, Any] = {}
    if how == "dtype" and odd:
        options["dtype"] = torch.float64
    elif how == "optimizer":
        kind = "homed" if odd else "loose"
    elif how == "masters":
        kind = "no masters" if odd else "masters"
    elif how == "buffers" and odd:
        options["average_buffers"] = False
    elif how == "compress" and odd:
        options["compress"] = "bf16"
    elif how == "overlap_steps" and odd:
        options["overlap_steps"] = 1
    elif how == "bucket_bytes" and odd:
        options["bucket_bytes"] = 128
    replica = Replica(rank, kind, timeout=TIMEOUT, **options)
    dist.barrier()
    replica.train(1)
    return attempts(replica, replica.optimize())


DIFFERENCES = {
    "dtype": "",
    "optimizer": "",
    "masters": "",
    "buffers": "",
    "compress": "the settings",
    "overlap_steps": "the settings",
    "bucket_bytes": "the settings",
}


DIFFERENT = Cases(3, _different, {how: (how,) for how in DIFFERENCES})


@pytest.mark.parametrize("how", DIFFERENCES)
def test_a_rank_built_otherwise_is_an_error_on_all_that_names_it(how: str) -> None:
    for result in DIFFERENT[how]:
        check_refused(result)
        found = re.search(r"the replicas disagree on (.+?) \(ranks 0, 2: (.+); rank 1: (.+)\):", result["message"])
        assert found, result["message"]
        what, ours, theirs = found.groups()
        assert DIFFERENCES[how] in what
        assert ours != theirs, "the message shows what is different"


# The same for averages that overlap with the next steps


def _overlapped(rank: int, kind: str, fault: str) -> dict[str, Any]:
    """The sync that starts at step 8 and lands at step 10 goes wrong on rank 1."""
    replica = Replica(rank, kind, timeout=TIMEOUT, **OVERLAPPED)
    dist.barrier()
    replica.train(7)
    loss = replica.optimize()
    if rank == 1 and fault == "killed":
        sabotage(2, end_process, instead=False)
    if rank == 1 and fault == "raises":
        sabotage(2, pull_cable, instead=True)
    result = attempts(replica, loss)
    if fault == "raises":
        dist.barrier()
    return result


@pytest.mark.parametrize(("fault", "kind"), [("killed", "masters"), ("raises", "homed")])
def test_a_fault_of_an_overlapped_average_is_raised_where_the_average_lands(fault: str, kind: str) -> None:
    results = run_ranks(3, _overlapped, kind, fault, expect_dead=int(fault == "killed"))
    for result in (results[0], results[2]):
        check_refused(result)
        assert result["step"] == 9, "the tenth step is not counted"
    if fault == "killed":
        assert results[1] is None
        return
    assert (results[1]["error"], results[1]["message"]) == ("Cable", "pulled out")
    assert results[1]["changed"] == []
    assert results[1]["step"] == 9


def _killed_before(rank: int) -> dict[str, Any]:
    replica = Replica(rank, "homed", timeout=TIMEOUT, **OVERLAPPED)
    dist.barrier()
    replica.train(7)
    loss = replica.optimize()
    if rank == 1:
        end_process()
    return attempts(replica, loss)


def test_a_rank_killed_before_an_overlapped_sync_is_an_error_at_its_start_or_landing() -> None:
    results = run_ranks(3, _killed_before, expect_dead=1)
    assert results[1] is None
    for result in (results[0], results[2]):
        check_refused(result)
        assert result["step"] in (7, 9)


def _killed_in_new_group(rank: int) -> dict[str, Any]:
    replica = Replica(rank, "homed", timeout=TIMEOUT, **OVERLAPPED)
    dist.barrier()
    replica.train(3)
    loss = replica.optimize()
    if rank == 1:
        dist.new_group = lambda *given, **options: end_process()
    return attempts(replica, loss)


@pytest.mark.full
def test_a_rank_killed_while_the_second_group_is_made_is_named() -> None:
    """The first overlapped average makes a process group, before anything is averaged."""
    results = run_ranks(3, _killed_in_new_group, expect_dead=1)
    assert results[1] is None
    for result in (results[0], results[2]):
        check_refused(result)
        assert re.search(r"\branks? 1\b", result["message"]), result["message"]
        assert "a second process group" in result["message"]


def _sick_overlapped(rank: int, kind: str, what: str) -> dict[str, Any]:
    """Rank 0 turns bad at step 4; the mean of the others reaches it at step 6."""
    replica = Replica(rank, kind, **OVERLAPPED)
    replica.train(3)
    loss = replica.optimize((lambda: _bad_gradient(replica)) if what == "gradient" and rank == 0 else None)
    if rank == 0:
        _spoil(replica, what)
    start = replica.numbers()
    replica.scheduler.step(loss)
    replica.train(1)
    loss = replica.optimize()
    before = replica.numbers()
    replica.scheduler.step(loss)
    landed = replica.numbers()
    replica.train(6)
    return {
        "start": start, "before": before, "landed": landed, "end": replica.numbers(),
        "excluded": [record.excluded for record in replica.scheduler.history],
    }  # fmt: skip


HEALED_LATER = Cases(
    3,
    _sick_overlapped,
    [("masters", "gradient"), ("homed", "loss")],
    full=[("homed", "gradient"), ("loose", "gradient")],
)


@pytest.mark.parametrize(("kind", "what"), HEALED_LATER.params())
def test_a_bad_replica_is_healed_where_the_average_lands(kind: str, what: str) -> None:
    results = HEALED_LATER[kind, what]
    for name in (key for key in results[0]["start"] if key.startswith("parameter")):
        mean = (results[1]["start"][name].double() + results[2]["start"][name].double()) / 2
        tolerance = 0.02 if kind == "masters" else 1e-6
        for healthy in results[1:]:
            expected = healthy["before"][name].double() + mean - healthy["start"][name].double()
            torch.testing.assert_close(healthy["landed"][name].double(), expected, rtol=tolerance, atol=tolerance)
        # Two steps of at most 0.01 · 1.3 apart.
        torch.testing.assert_close(results[0]["landed"][name].double(), mean, rtol=0, atol=0.05)
    for result in results:
        assert all(torch.isfinite(tensor).all() for tensor in result["landed"].values())
        assert all(torch.isfinite(tensor).all() for tensor in result["end"].values())
        assert bits(result["end"]) == bits(results[0]["end"]), "the last sync of a run leaves nothing in flight"
        assert result["excluded"][0] == [0]
        assert result["excluded"][-1] == []


def test_when_all_are_bad_no_overlapped_average_lands() -> None:
    for result in ALL_BAD["overlapped"]:
        check_refused(result)
        assert "no replica is sound at step 8" in result["message"]
        assert "on ranks 0, 1, 2" in result["message"]
        assert result["step"] in (7, 9)
