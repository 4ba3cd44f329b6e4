"""Collectives that have been started: what ``wait`` does when they failed or have no timeout."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from hdet_kernels.ensemble.started import Awaited, Done, Messages


class Work:
    """A work that notes how it was waited for, and says whether it was completed."""

    def __init__(self, completed: bool = True) -> None:
        self.completed, self.waits = completed, list[Any]()

    def wait(self, *timeout: Any) -> bool:
        self.waits.append(timeout)
        return self.completed


@pytest.mark.parametrize("timeout", [None, timedelta(seconds=3)], ids=["none", "3 s"])
def test_each_is_waited_for_with_the_timeout_that_there_is(timeout: timedelta | None) -> None:
    works: list[Any] = [Work(), Work()]
    Messages([works[0], None], timeout).wait()
    assert Awaited(works[1], timeout).wait() is True
    expected = [() if timeout is None else (timeout,)]
    assert [work.waits for work in works] == [expected] * 2


def test_a_message_that_was_aborted_raises() -> None:
    works: list[Any] = [Work(), Work(completed=False)]
    with pytest.raises(RuntimeError, match="a message to or from another process was aborted"):
        Messages(works, None).wait()


def test_what_is_done_is_not_waited_for() -> None:
    Done().wait()
