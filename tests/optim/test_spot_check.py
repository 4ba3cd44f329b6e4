"""Spot checks go through all items in turn."""

from __future__ import annotations

import pytest

from hdet_kernels.optim.watch import ITEMS_PER_STEP, SpotCheck


@pytest.mark.parametrize("count", [0, 1, ITEMS_PER_STEP, ITEMS_PER_STEP + 1, 3 * ITEMS_PER_STEP - 1])
def test_a_round_checks_every_item_once_in_order(count: int) -> None:
    check = SpotCheck(list(range(count)))
    steps = max(-(-count // ITEMS_PER_STEP), 1)
    for _ in range(2):
        seen = [check.next_items() for _ in range(steps)]
        assert [item for items in seen for item in items] == list(range(count))
        assert all(len(items) <= ITEMS_PER_STEP for items in seen)
