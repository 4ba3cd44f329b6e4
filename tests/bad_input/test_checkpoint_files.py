"""Checkpoint files: good ones load under ``weights_only=True``; damaged and hostile ones raise and change nothing.

A file has the states of model, optimizer and scheduler. Reading it is torch's part, loading the states is ours.
"""

from __future__ import annotations

import io
import random
import resource
from typing import Any

import pytest
import torch

from tests.bad_input.rows import HUGE
from tests.bad_input.states import replaced
from tests.bad_input.world import World, differences, process_snapshot

pytestmark = pytest.mark.filterwarnings("ignore")


def state_of(world: World) -> dict[str, Any]:
    return {name: getattr(world, name).state_dict() for name in ("model", "optimizer", "scheduler")}


def written(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load(world: World, content: bytes) -> None:
    """Read a file and load all of its states, as a training script does: those that can refuse first."""
    state = torch.load(io.BytesIO(content), weights_only=True)
    world.scheduler.load_state_dict(state["scheduler"])
    world.optimizer.load_state_dict(state["optimizer"])
    world.model.load_state_dict(state["model"])


@pytest.fixture(scope="module")
def good() -> bytes:
    return written(state_of(World()))


@pytest.fixture(scope="module")
def world() -> World:
    """A run that the malformed files of all tests are loaded into: none of them may change it."""
    return World()


def test_a_good_file_loads_and_the_run_goes_on(good: bytes) -> None:
    resumed, undisturbed = World(), World()
    resumed.train()
    load(resumed, good)
    for each in (resumed, undisturbed):
        each.train()
    changed = differences(undisturbed.snapshot(), resumed.snapshot())
    assert [name for name in changed if not name.endswith(("places", "members"))] == []


def refused(world: World, content: bytes, what: str) -> None:
    """Check that loading raises, and that nothing changed. Exception and message are torch's, which reads the file."""
    before, process = world.snapshot(), process_snapshot()
    with pytest.raises(Exception):  # noqa: B017, PT011 (torch and pickle raise many)
        load(world, content)
    assert differences(before, world.snapshot()) + differences(process, process_snapshot()) == [], what


def test_truncated_files_are_refused(good: bytes, world: World) -> None:
    for length in (0, 1, 10, 100, len(good) // 4, len(good) // 2, len(good) - 100, len(good) - 1):
        refused(world, good[:length], f"the first {length} bytes")


def test_random_bytes_are_refused(world: World) -> None:
    generator = random.Random(5)
    for length in (1, 16, 1000, 20_000):
        for beginning in (b"", b"PK\x03\x04", b"\x80\x02"):
            refused(world, beginning + generator.randbytes(length), f"{beginning!r} and {length} random bytes")


def test_flipped_bits_are_refused_whole_or_are_other_numbers(good: bytes) -> None:
    """A flipped bit that torch and the states' own checks do not notice is in padding, or made another valid number.

    Where a part refuses its state, nothing of that part has changed.
    """
    world, generator, noticed = World(), random.Random(9), 0
    for _ in range(40):
        content = bytearray(good)
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        try:
            state = torch.load(io.BytesIO(content), weights_only=True)
        except Exception:  # torch and pickle have many kinds
            noticed += 1
            continue
        for part in ("scheduler", "optimizer"):
            before = world.snapshot()
            try:
                getattr(world, part).load_state_dict(state[part])
            except (KeyError, TypeError, ValueError):
                noticed += 1
                assert differences(before, world.snapshot()) == []
            else:
                world = World() if differences(before, world.snapshot()) else world
    assert noticed > 5


class Payload:
    """An object that ``weights_only=True`` must not build."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this file ran code",)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HDET = ("scheduler", "hdet", 0)
#: Hostile values, by the place in the file that they take.
HOSTILE: list[tuple[tuple[Any, ...], Any]] = [
    ((*HDET, "step"), Payload()),
    ((*HDET, "step"), HUGE),
    ((*HDET, "history"), HUGE),
    ((*HDET, "window", "sum"), HUGE),
    ((*HDET, "spread", "scheduled"), HUGE),
    ((*HDET, "outer"), {"consensus": [HUGE]}),
    ((*HDET, "compression"), HUGE),
    ((*HDET, "config"), HUGE),
    ((*HDET, "spread"), nested(400)),
    ((*HDET, "history"), nested(400)),
    (("scheduler",), HUGE),
    (("optimizer", "state", 0, "exp_avg"), HUGE),
    (("optimizer", "state", 0, "step"), HUGE),
    (("optimizer", "param_groups"), HUGE),
    (("optimizer", "param_groups", 0, "lr"), HUGE),
    (("optimizer", "state"), nested(400)),
]


def most_memory() -> int:
    """Return the most bytes of memory that this process ever had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_hostile_states_are_refused_without_using_memory(good: bytes, world: World) -> None:
    before, state, wrong = world.snapshot(), torch.load(io.BytesIO(good), weights_only=True), []
    for keys, value in HOSTILE:
        content, memory = written(replaced(state, keys, value)), most_memory()
        try:
            getattr(world, keys[0]).load_state_dict(torch.load(io.BytesIO(content), weights_only=True)[keys[0]])
            wrong.append((keys, "nothing was raised"))
        except Exception as error:
            wrong += [] if str(error) else [(keys, f"{type(error).__name__} without a message")]
        wrong += [(keys, f"changed {name}") for name in differences(before, world.snapshot())]
        wrong += [(keys, "more than 500 MB were used")] if most_memory() > memory + 500e6 else []
    assert wrong == []


def test_a_file_that_claims_10_to_the_9_entries_is_small() -> None:
    """The tensor of 10⁹ entries is one element in memory and in the file: no test here needs gigabytes."""
    assert HUGE.numel() == 10**9
    assert len(written(HUGE)) < 10_000
