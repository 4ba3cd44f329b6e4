"""Notices in the store of a process group: what is read is what was written, in as few requests for any number."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hdet_kernels.converge.notices import NEVER, Notices
from tests.converge.counted_store import CountedStore
from tests.converge.etcd import etcd_store


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
