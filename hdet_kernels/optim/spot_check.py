"""Spot checks: each step checks the next few of many items, where checking all of them would cost too much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

#: How many items one step checks.
ITEMS_PER_STEP = 4


class SpotCheck(Generic[T]):
    """Items to check in turn, ``ITEMS_PER_STEP`` at a time."""

    def __init__(self, items: Sequence[T]) -> None:
        self.items = items
        self._next = 0

    def next_items(self) -> Sequence[T]:
        """Return the next items; after the last one, start again with the first."""
        start = self._next
        self._next = start + ITEMS_PER_STEP if start + ITEMS_PER_STEP < len(self.items) else 0
        return self.items[start : start + ITEMS_PER_STEP]
