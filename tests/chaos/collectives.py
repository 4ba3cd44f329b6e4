"""Wrap the collectives of this process, so that one of them can fail, stop or kill it at a chosen moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from hdet_kernels.ensemble import processes

When = Literal["before", "after"]

#: Where the library looks up each collective.
PLACES: tuple[tuple[Any, str], ...] = (
    (dist, "all_reduce"),
    (dist, "broadcast"),
    (dist, "all_to_all_single"),
    (processes, "_all_gather"),
)


class Sabotage:
    """Acts once, at the n-th collective that this process calls from :meth:`arm` on."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []
        self._lock = threading.Lock()
        self._calls = 0

    def arm(self, number: int, act: Callable[[], Any], when: When = "before", only: Sequence[str] = ()) -> None:
        """Act at a collective.

        Args:
            number: which one, counted from 1.
            act: what is done. If it raises, that is the error of the collective.
            when: before it begins, or after it has finished.
            only: count the collectives of these names alone; default: all.
        """
        self.disarm()
        self._calls = 0
        for place, name in PLACES:
            if not only or name in only:
                original = getattr(place, name)
                self._originals.append((place, name, original))
                setattr(place, name, self._wrapped(original, number, act, when))

    def _wrapped(self, original: Any, number: int, act: Callable[[], Any], when: When) -> Any:
        def collective(*args: Any, **keywords: Any) -> Any:
            with self._lock:
                self._calls += 1
                here = self._calls == number
            if here and when == "before":
                act()
            work = original(*args, **keywords)
            if here and when == "after":
                if hasattr(work, "wait"):
                    work.wait()
                act()
            return work

        return collective

    def disarm(self) -> None:
        """Put the collectives back."""
        for place, name, original in self._originals:
            setattr(place, name, original)
        self._originals.clear()


def set_timeout(seconds: float) -> None:
    """Give every process group of this process another timeout."""
    for group in list(_world.pg_map):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            _set_pg_timeout(timedelta(seconds=seconds), group)
