"""Attendance: who is named when an average fails, and the notices that ranks leave for each other in the store."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

import hdet_kernels as hk
from hdet_kernels.converge import attendance
from hdet_kernels.converge.attendance import NEVER, Attendance, Notices, explanation
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from tests.converge.counted_store import CountedStore
from tests.converge.etcd import etcd_store
from tests.ranks import Cases, run_ranks
from tests.threaded_ranks import run_threads

HERE, BEFORE = (3, "sync at step 8"), (2, "sync at step 4")


ABORTED, CLOSED = "collective: NCCL communicator was aborted", "collective: connection closed"
OWN = "this rank last completed sync at step 4"
SAME_CALLS = (
    "check the network between these ranks; if it holds, every rank must make the same calls of the scheduler, after "
    "the same number of steps"
)
SILENT = "came and then gave no sign: it has ended, was stopped or hangs, or the network to it is cut"
AGAIN = "see what it wrote last, and start all ranks again from the last checkpoint"


@pytest.mark.parametrize(
    ("came", "failed", "closed", "expected"),
    [
        (
            {1: BEFORE, 2: NEVER, 3: HERE},
            {3: CLOSED},
            [],
            "rank 1 did not come within 30.2 s (it was last seen at sync at step 4); rank 2 did not come within 30.2 s "
            f"(it was never seen at an average); {OWN}; {SAME_CALLS}",
        ),
        ({1: HERE}, {}, [], f"rank 1 {SILENT}; {OWN}"),
        (
            {0: HERE, 1: HERE, 2: HERE},
            {2: ABORTED, 0: CLOSED},
            [2],
            f"rank 1 {SILENT}; {OWN}; the collective failed on rank 2: NCCL communicator was aborted",
        ),
        ({1: HERE, 2: BEFORE}, {1: "Cable: pulled out"}, [], f"rank 1 raised Cable: pulled out; {AGAIN}"),
        (
            {1: BEFORE, 2: HERE, 3: BEFORE, 4: HERE, 5: HERE},
            {4: CLOSED},
            [1, 2, 4],
            f"rank 1 has ended (it was last seen at sync at step 4); rank 2 has ended (after it came); {AGAIN}",
        ),
        (
            {1: HERE, 2: HERE},
            {1: ABORTED, 2: CLOSED},
            [1, 2],
            "all ranks came, and the collective failed on all, as if the network was cut (rank 1: NCCL communicator "
            f"was aborted; rank 2: connection closed); {OWN}",
        ),
    ],
    ids=["missing", "silent", "one waits", "raised", "ended", "all there"],
)
def test_who_is_missing(came: dict[int, Any], failed: dict[int, Any], closed: list[int], expected: str) -> None:
    assert explanation(3, came, failed, closed, own=OWN, waited=30.18) == expected


@pytest.mark.parametrize("ensemble", [SingleReplica(), RowEnsemble(2)], ids=["single", "rows"])
def test_without_a_process_group_errors_are_raised_as_they_are(ensemble: Any) -> None:
    alone = Attendance(ensemble)
    alone.enter("sync", 3)
    with pytest.raises(RuntimeError, match=r"^as it is$"), alone.explained():
        raise RuntimeError("as it is")


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    forever = threading.Event()
    found, thread = attendance._in_time(forever.wait, 0.01)
    assert found is None
    assert thread.is_alive()
    forever.set()

    def broken() -> None:
        raise RuntimeError("gone")

    assert attendance._in_time(broken, 5.0)[0] is None
    assert attendance._in_time(lambda: 7, 5.0)[0] == 7


class Unreachable:
    """A store on the far side of a cut network: what is sent is lost, and no answer comes."""

    def __init__(self, forever: threading.Event) -> None:
        self.forever, self.requests = forever, 0

    def has_extended_api(self) -> bool:
        return True

    def set(self, *_: Any) -> None:
        self.requests += 1

    append = set

    def get(self, *_: Any) -> None:
        self.forever.wait()


def _cut_off(rank: int) -> tuple[list[str], int]:
    """Fail twice, at the second and the third average, without a store."""
    forever = threading.Event()
    own, store, messages = Attendance(hk.ProcessEnsemble()), Unreachable(forever), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attendance, "default_store", lambda: store)
        patch.setattr(attendance, "STORE_SECONDS", 0.1)
        for step in (2, 4, 6):
            own.enter("sync", step)
            if step > 2:
                with pytest.raises(RuntimeError) as error, own.explained():
                    raise RuntimeError("timed out")
                messages.append(str(error.value))
    dist.barrier()  # a rank that ended would be named
    forever.set()
    return messages, store.requests


def test_behind_a_cut_network_nobody_is_blamed_and_the_store_is_asked_once() -> None:
    for messages, requests in run_ranks(2, _cut_off):
        assert messages == [
            f"sync at step {step} failed: the store of the process group cannot be reached: the network to its host "
            "(usually that of rank 0) is cut, or that host has ended or hangs; this rank last completed sync at step 2 "
            "(RuntimeError: timed out)"
            for step in (4, 6)
        ]
        assert requests == 1 + 1 + 2, "at first two, at the second average one, and one that it failed"


def _fails(rank: int, missing: int, requests: list[Counter[str]]) -> str:
    """Come to two averages, of which the second fails; one rank comes to the first only."""
    ensemble = hk.ProcessEnsemble()
    own = Attendance(ensemble)
    for step in (1, 2):
        if step == 1 or rank != missing:
            own.enter("sync", step)
        ensemble.gather(torch.zeros(1, 1))  # all have come
    if rank == missing:
        return ""
    requests[rank].clear()
    with pytest.raises(RuntimeError) as error, own.explained():
        raise RuntimeError("connection closed")
    return str(error.value)


def _counted_stores(patch: pytest.MonkeyPatch, ranks: int) -> list[Counter[str]]:
    """Count the requests of every rank."""
    requests, store = [Counter[str]() for _ in range(ranks)], attendance.default_store
    patch.setattr(attendance, "default_store", lambda: CountedStore(store(), requests[dist.get_rank()]))
    return requests


@pytest.mark.parametrize("ranks", [16, pytest.param(1024, marks=pytest.mark.full)])
def test_a_failure_takes_as_many_requests_for_any_number_of_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "SIGN_SECONDS", 0.0)  # the threads fail one after the other
    requests = _counted_stores(monkeypatch, ranks)
    messages, _ = run_threads(ranks, _fails, 5, requests)
    assert messages[5] == ""
    assert min(filter(None, messages), key=len) == (  # that of the last thread to fail
        "sync at step 2 failed: rank 5 did not come within 0.0 s (it was last seen at sync at step 1); this rank last "
        f"completed sync at step 1; {SAME_CALLS} (RuntimeError: connection closed)"
    )
    assert "rank 5 did not come" in messages[0]
    assert "rank 6 came and then gave no sign" in messages[0]
    expected = {"append": 1, "get": 2, "multi_get": 1}
    assert [counted for rank, counted in enumerate(requests) if rank != 5] == [expected] * (ranks - 1)


def test_a_store_without_lists_names_the_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchelastic's EtcdStore can neither append nor compare and set."""
    monkeypatch.setattr(attendance, "SIGN_SECONDS", 0.0)
    etcd = etcd_store()
    store = dist.PrefixStore("default_pg", etcd)
    with pytest.raises(RuntimeError, match="Not implemented"):
        store.append("key", "value")
    monkeypatch.setattr(attendance, "default_store", lambda: store)
    messages, _ = run_threads(3, _fails, 1, [Counter[str]() for _ in range(3)])
    assert "rank 1 did not come within 0.0 s (it was last seen at sync at step 1)" in messages[0]
    assert "rank 1 did not come within 0.0 s (it was last seen at sync at step 1)" in messages[2]


def _waits(rank: int, requests: list[Counter[str]]) -> str:
    """Rank 1 comes, and gives no sign when the average fails."""
    ensemble = hk.ProcessEnsemble()
    own = Attendance(ensemble)
    own.enter("sync", 1)
    ensemble.gather(torch.zeros(1, 1))
    if rank == 1:
        return ""
    requests[rank].clear()
    with pytest.raises(RuntimeError) as error, own.explained():
        raise RuntimeError("connection closed")
    return str(error.value)


def test_a_sign_is_waited_for_in_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "SIGN_SECONDS", 0.3)  # pauses of 0.05, 0.1 and 0.15 seconds
    requests = _counted_stores(monkeypatch, 2)
    (message, _), _ = run_threads(2, _waits, requests)
    assert f"rank 1 {SILENT}; this rank has completed none" in message
    assert requests[0] == {"append": 1, "get": requests[0]["get"], "multi_get": 1}
    assert 1 + 1 <= requests[0]["get"] <= 1 + 4


def _alone(rank: int, call: str, rows: int) -> tuple[str, bool]:
    """After a sync at step 2, rank 0 alone averages; the others wait for it elsewhere."""
    group = dist.new_group()
    torch.manual_seed(0)
    ensemble: Any = hk.ProcessEnsemble(group)
    model = (
        hk.ReplicaStack(nn.Linear(3, 1), rows, gradients="local", ensemble=ensemble) if rows > 1 else nn.Linear(3, 1)
    )
    if isinstance(model, hk.ReplicaStack):
        ensemble = model.ensemble
    optimizer = hk.FusedSGD(model.parameters(), lr=0.1)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=2, auto_lr=False, ensemble=ensemble)
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.full_like(param, float(rank))
        optimizer.step()
        scheduler.step(1.0 if rows == 1 else torch.ones(rows))
    before = [param.detach().clone() for param in model.parameters()]
    message = ""
    if rank == 0:
        # Not before: a busy machine may take longer than this for the sync.
        _set_pg_timeout(timedelta(seconds=SHORT), group)
        try:
            if call == "converge":
                scheduler.converge()
            else:
                with scheduler.consensus():
                    pass
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    return message, all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


#: The timeout of the group, in seconds, that rank 0 waits for in vain.
SHORT = 0.5

ALONE = Cases(3, _alone, [("converge", 1)], full=[("consensus", 1), ("converge", 2)])


@pytest.mark.parametrize(("call", "rows"), ALONE.params())
def test_a_call_on_one_rank_alone_names_the_others(call: str, rows: int) -> None:
    (message, unchanged), *others = ALONE[call, rows]
    assert message.startswith(
        f"{call} at step 3 failed: rank 1 did not come within 0.5 s (it was last seen at sync at "
    )
    assert "last seen at sync at step 2); rank 2 did not come within 0.5 s" in message
    assert f"this rank last completed sync at step 2; {SAME_CALLS}" in message
    assert unchanged
    assert others == [("", True)] * 2


def stores(kind: str, count: int, folder: Path) -> list[Any]:
    """Return the store of each of several ranks."""
    if kind == "hash":
        return [dist.HashStore()] * count
    if kind == "etcd":
        return [etcd_store()] * count
    if kind == "file":
        return [dist.FileStore(str(folder / "store"), count) for _ in range(count)]
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [first, *(dist.TCPStore("127.0.0.1", first.port, is_master=False) for _ in range(count - 1))]


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "etcd"])
def test_what_is_read_is_what_was_written(kind: str, tmp_path: Path) -> None:
    ranks = [3, 5, 8, 9]
    own = stores(kind, 4, tmp_path)  # kept: a PrefixStore does not keep a store that is written in Python
    first, second, third, _ = (
        Notices(dist.PrefixStore("default", store), "group", rank) for store, rank in zip(own, ranks, strict=True)
    )
    for count in (1, 2):
        first.write_came(count, f"sync at step {count}")
        second.write_came(count, f"sync at step {count}")
    third.write_came(1, "sync at step 1")
    second.write_failed(2, "Error: of two\nlines, with 'marks' and ü")
    first.write_failed(2, "collective: closed")
    # A store of TCP answers a rank in the order of its own requests only.
    assert third.came([8]) == {8: (1, "sync at step 1")}
    second.came([5])
    assert second.failed(2, ranks)[5] == "Error: of two\nlines, with 'marks' and ü"
    came = {9: NEVER, 8: (1, "sync at step 1"), 5: (2, "sync at step 2")}
    assert first.came([9, 8, 5]) == came
    assert list(first.came([9, 8, 5])) == list(came), "in the order that was asked for"
    assert first.failed(2, ranks) == {5: "Error: of two\nlines, with 'marks' and ü"}
    first.came([3])
    assert first.failed(2, ranks) == {5: "Error: of two\nlines, with 'marks' and ü", 3: "collective: closed"}
    assert first.came([]) == {}


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_notices_of_an_earlier_life_do_not_count(kind: str, tmp_path: Path) -> None:
    own = stores(kind, 2, tmp_path)
    for rank, store in enumerate(own):
        before = Notices(store, "group", rank)
        before.write_came(1, "sync at step 4")
        before.write_failed(1, "collective: closed")
    first, second = (Notices(store, "group", rank, life=2) for rank, store in enumerate(own))
    second.write_began()
    assert first.came([1]) == {1: (0, "")}
    assert first.failed(1, [1]) == {}
    second.write_came(1, "sync at step 4")
    assert first.came([1]) == {1: (1, "sync at step 4")}
    assert first.failed(1, [1]) == {}
    second.write_failed(1, "OSError: no space")
    assert first.failed(1, [1]) == {1: "OSError: no space"}


@pytest.mark.parametrize("ranks", [2, 4096])
def test_the_number_of_requests_does_not_depend_on_that_of_ranks(ranks: int) -> None:
    store, requests = dist.HashStore(), Counter[str]()
    for rank in range(ranks):
        notices = Notices(CountedStore(store, requests), "group", rank)
        for count in range(1, 4):
            notices.write_came(count, "sync")
        if rank != 1:
            notices.write_failed(3, "collective: closed")
    assert requests == {"set": 3 * ranks, "append": 2 * ranks - 1}, "one for an average, one at first, one at a failure"
    requests.clear()
    notices = Notices(CountedStore(store, requests), "group", 0)
    assert notices.came(range(1, ranks)) == dict.fromkeys(range(1, ranks), (3, "sync"))
    assert sorted(notices.failed(3, range(ranks))) == [*range(2, ranks)]
    assert requests == {"get": 2, "multi_get": 1}
