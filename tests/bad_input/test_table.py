"""Every malformed call raises its exception, names the argument and changes nothing; good steps go on as before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.bad_input import optimizers, parts, schedulers, spreads, stacks, states
from tests.bad_input.rows import Row
from tests.bad_input.world import StackWorld, World, differences, process_snapshot

AREAS: dict[str, list[Row]] = {
    area: rows
    for table in (schedulers, spreads, optimizers, parts, stacks, states)
    for area, rows in table.AREAS.items()
}
CASES = [
    pytest.param([row for row in rows if row.world == kind], kind, id=f"{area}-{kind}")
    for area, rows in AREAS.items()
    for kind in ("run", "stack")
    if any(row.world == kind for row in rows)
]


def new_world(kind: str) -> Any:
    return World() if kind == "run" else StackWorld()


def outcome(row: Row, world: Any) -> str:
    """Make the call of a row; return what was wrong with its exception, or nothing."""
    try:
        row.call(world)
    except row.error as error:
        return "" if row.argument in str(error) else f"{row.argument} is not in the message: {error}"
    except BaseException as error:
        return f"{type(error).__name__} was raised: {error}"
    return "nothing was raised"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rows", "kind"), CASES)
def test_malformed_calls_raise_and_change_nothing(rows: list[Row], kind: str) -> None:
    """The rows of one area share a world: each leaves it bit by bit as it was.

    After all of them, good steps give the same numbers as in a world in which none of the calls was made.
    """
    wrong: dict[str, str] = {}
    world = new_world(kind)
    before = world.snapshot()
    for row in rows:
        process = process_snapshot()
        if what := outcome(row, world):
            wrong[row.name] = what
        changed = differences(process, process_snapshot()) + differences(before, world.snapshot())
        if changed:
            wrong[row.name] = f"{wrong.get(row.name, '')} changed: {', '.join(changed)}"
            world = new_world(kind)
            before = world.snapshot()
    undisturbed = new_world(kind)
    for each in (world, undisturbed):
        each.train()
        each.train()
    later = differences(undisturbed.snapshot(), world.snapshot())
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
    # Addresses differ between two worlds.
    assert [name for name in later if not name.endswith(("places", "members"))] == []


def test_the_table_is_long_and_no_row_is_there_twice() -> None:
    names = [f"{area} {row.world} {row.name}" for area, rows in AREAS.items() for row in rows]
    assert len(names) >= 300
    assert [name for name, count in Counter(names).items() if count > 1] == []
