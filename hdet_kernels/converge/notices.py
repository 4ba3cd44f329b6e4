"""Notices that the ranks leave for each other in the store of their process group.

A rank overwrites its own notice when it comes to an average, which costs one request that is not waited for. It also
puts itself on a list of all ranks that ever came, and on a list of those that failed at an average. So a failed rank
learns all about the others with three requests, however many they are: the first list, the notices of those on it, and
the second list.

A process may train again after a failure, from average number 1 on, with the notices of before still in the store. So
every notice says in which *life* of the rank it was written, and a failure counts if the rank came in the same one.

Stores without torch's extended methods, which appending is one of (a ``FileStore``, torchelastic's ``EtcdStore``), have
no lists. There every notice of a failure has a key of its own, and a failed rank looks for those of each of the others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

#: The number and the name of an average that a rank never came to.
NEVER = (0, "")


class Notices:
    """The notices of one group of ranks.

    Args:
        store: the store of the process group.
        group: name of the group, the same on all its ranks.
        rank: the rank whose notices are written here.
        life: how often this rank has begun to train, from 1.
    """

    def __init__(self, store: Any, group: str, rank: int, life: int = 1) -> None:
        self._store, self._path, self._rank, self._life = store, f"hdet_kernels/{group}", rank, life
        self._lives: dict[int, str] = {}  # of the ranks that were looked up
        self._has_lists: bool = store.has_extended_api()  # the same on all ranks, which have stores of one kind

    def write_began(self) -> None:
        """Note that this rank begins a new life, in which it came to no average yet."""
        self._store.set(self._came(self._rank), f"0 {self._life} ")

    def write_came(self, count: int, what: str) -> None:
        """Note that this rank came to average number ``count``, from 1, which is called ``what``."""
        self._store.set(self._came(self._rank), f"{count} {self._life} {what}")
        if count == 1 and self._has_lists:  # after its notice, so that the notices of all on the list can be read
            self._store.append(f"{self._path}/ever", f"{self._rank} ")

    def write_failed(self, count: int, cause: str) -> None:
        """Note that average number ``count`` failed on this rank."""
        if self._has_lists:
            self._store.append(self._failed(count), json.dumps([self._rank, f"{self._life} {cause}"]) + "\n")
        else:
            self._store.set(f"{self._failed(count)}/{self._rank}", f"{self._life} {cause}")

    def came(self, ranks: Sequence[int]) -> dict[int, tuple[int, str]]:
        """Return number and name of the last average that each of ``ranks`` came to. This rank came to one itself."""
        if not ranks:
            return {}
        if self._has_lists:
            ever = set(map(int, self._store.get(f"{self._path}/ever").split()))
            listed = [rank for rank in ranks if rank in ever]
        else:
            listed = [rank for rank in ranks if self._store.check([self._came(rank)])]
        found = dict.fromkeys(ranks, NEVER)
        for rank, notice in zip(listed, self._store.multi_get([self._came(rank) for rank in listed]), strict=True):
            count, self._lives[rank], what = notice.decode().split(" ", 2)
            found[rank] = int(count), what
        return found

    def failed(self, count: int, ranks: Sequence[int]) -> dict[int, str]:
        """Return why average number ``count`` failed on those of ``ranks`` where it did. It failed on this rank too.

        Only failures in the lives count in which :meth:`came` has seen the ranks.
        """
        if self._has_lists:
            notices = dict(json.loads(line) for line in self._store.get(self._failed(count)).splitlines())
        else:
            keys = {rank: f"{self._failed(count)}/{rank}" for rank in ranks}
            notices = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        found = {}
        for rank in ranks:
            life, _, cause = notices.get(rank, "").partition(" ")
            if life and life == self._lives.get(rank):
                found[rank] = cause
        return found

    def _came(self, rank: int) -> str:
        return f"{self._path}/came/{rank}"

    def _failed(self, count: int) -> str:
        return f"{self._path}/failed/{count}"
