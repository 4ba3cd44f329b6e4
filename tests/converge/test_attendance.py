"""Attendance: a collective that fails names the ranks that did not come, with what they were last seen at."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

import hdet_kernels as hk
from hdet_kernels.converge import attendance
from hdet_kernels.converge.attendance import Attendance, explanation
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from tests.converge.counted_store import CountedStore
from tests.converge.etcd import etcd_store
from tests.ranks import Cases
from tests.threaded_ranks import run_threads

HERE, BEFORE, NEVER = (3, "sync at step 8"), (2, "sync at step 4"), (0, "")


@pytest.mark.parametrize(
    ("came", "failed", "expected"),
    [
        (
            {1: BEFORE, 2: NEVER},
            {1: NEVER, 2: NEVER},
            "rank 1 did not come within 30 s (it was last seen at sync at step 4); rank 2 did not come within 30 s (it "
            "was never seen at an average); every rank must come to every average, after the same number of steps",
        ),
        ({1: HERE}, {1: BEFORE}, "rank 1 came and then gave no sign: it has ended, was stopped, or hangs"),
        ({1: HERE}, {1: (3, "Cable: pulled out")}, "rank 1 raised Cable: pulled out"),
        (
            {1: HERE, 2: HERE},
            {1: (3, "collective: NCCL communicator was aborted"), 2: (3, "collective: connection closed")},
            "all ranks came, and the collective failed on all of them (rank 1: NCCL communicator was aborted; rank 2: "
            "connection closed)",
        ),
    ],
    ids=["missing", "silent", "raised", "all there"],
)
def test_who_is_missing(came: dict[int, Any], failed: dict[int, Any], expected: str) -> None:
    assert explanation(3, came, failed, timeout=30.0) == expected
    assert "within" not in explanation(3, came, failed, timeout=None)


@pytest.mark.parametrize("ensemble", [SingleReplica(), RowEnsemble(2)], ids=["single", "rows"])
def test_without_a_process_group_errors_are_raised_as_they_are(ensemble: Any) -> None:
    alone = Attendance(ensemble)
    alone.enter("sync", 3)
    with pytest.raises(RuntimeError, match=r"^as it is$"), alone.explained():
        raise RuntimeError("as it is")


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    forever = threading.Event()
    assert attendance._in_time(forever.wait, 0.01) is None
    forever.set()

    def broken() -> None:
        raise RuntimeError("gone")

    assert attendance._in_time(broken, 5.0) is None
    assert attendance._in_time(lambda: 7, 5.0) == 7


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
    requests, store = [Counter[str]() for _ in range(ranks)], attendance._store
    patch.setattr(attendance, "_store", lambda: CountedStore(store(), requests[dist.get_rank()]))
    return requests


@pytest.mark.parametrize("ranks", [16, pytest.param(1024, marks=pytest.mark.full)])
def test_a_failure_takes_as_many_requests_for_any_number_of_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "SIGN_SECONDS", 0.0)  # the threads fail one after the other
    requests = _counted_stores(monkeypatch, ranks)
    messages, _ = run_threads(ranks, _fails, 5, requests)
    assert messages[5] == ""
    assert messages[-1] == (
        "sync at step 2 failed: rank 5 did not come (it was last seen at sync at step 1); every rank must come to "
        "every average, after the same number of steps (RuntimeError: connection closed)"
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
    monkeypatch.setattr(attendance, "_store", lambda: store)
    messages, _ = run_threads(3, _fails, 1, [Counter[str]() for _ in range(3)])
    assert "rank 1 did not come (it was last seen at sync at step 1)" in messages[0]
    assert "rank 1 did not come (it was last seen at sync at step 1)" in messages[2]


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
    assert "rank 1 came and then gave no sign: it has ended, was stopped, or hangs" in message
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
    assert "every rank must come to every average" in message
    assert unchanged
    assert others == [("", True)] * 2
