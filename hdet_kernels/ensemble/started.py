"""Collectives and messages that have been started, each with a ``wait`` that raises if it failed."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


class Done:
    """A collective that has finished."""

    def wait(self) -> None:
        return None


class Messages:
    """Messages to and from single processes; :meth:`wait` waits for all of them."""

    def __init__(self, works: Sequence[dist.Work | None], timeout: datetime.timedelta | None) -> None:
        self._works, self._timeout = works, timeout

    def wait(self) -> None:
        for work in self._works:
            if work is not None and not (work.wait() if self._timeout is None else work.wait(self._timeout)):
                raise RuntimeError("a message to or from another process was aborted: its process group was shut down")


class Awaited:
    """A collective whose :meth:`wait` blocks the host until it has finished."""

    def __init__(self, work: dist.Work, timeout: datetime.timedelta | None) -> None:
        self._work, self._timeout = work, timeout

    def wait(self) -> Any:
        return self._work.wait() if self._timeout is None else self._work.wait(self._timeout)
