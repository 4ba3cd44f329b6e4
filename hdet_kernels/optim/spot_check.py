"""Looking at a few of many things at a time, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

#: Things that are looked at in one step, where looking at all of them would cost too much.
GLANCE = 4


class Glance(Generic[T]):
    def __init__(self, items: Sequence[T]) -> None:
        self.items = items
        self._next = 0

    def few(self) -> Sequence[T]:
        """The next few, from the start again after the last."""
        start = self._next
        self._next = start + GLANCE if start + GLANCE < len(self.items) else 0
        return self.items[start : start + GLANCE]
