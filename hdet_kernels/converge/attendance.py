"""Attendance: which ranks came to an average, so that a failed collective can name those that did not.

A collective that waits in vain ends in a timeout that names nobody. So every process notes in the store of the process
group that it came to an average, in one small message (``notices.py``). If the collective fails, the others are looked
up there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hdet_kernels.converge.notices import NEVER, Notices
from hdet_kernels.ensemble import Ensemble, ProcessEnsemble, RowEnsemble

#: Seconds that a failed process waits for a sign of the others, and the most that the store may take to answer.
SIGN_SECONDS, STORE_SECONDS = 2.0, 6.0

# Seconds before a failed process looks for signs again. They double every time: thousands ask the same store.
_FIRST_PAUSE = 0.05

# How many of these this process has made for each group of ranks and each rank of it.
_LIVES: Counter[tuple[str, int]] = Counter()

# Before the cause of a failure that is an error of a collective: it may be the consequence of another rank's.
_COLLECTIVE = "collective: "


class Attendance:
    """Notes when this process comes to an average, and explains the failure of its collectives.

    It does nothing for ensembles without a process group.

    Args:
        ensemble: the replicas.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        processes = ensemble.among if isinstance(ensemble, RowEnsemble) else ensemble
        self._processes = processes if isinstance(processes, ProcessEnsemble) else None
        self._life = 0
        if self._processes is not None:
            _LIVES[self._processes.name, self._processes.rank] += 1
            self._life = _LIVES[self._processes.name, self._processes.rank]
            if self._life > 1:
                with contextlib.suppress(Exception):
                    self._notices(self._processes).write_began()
        self._count = 0
        self._what = ""
        self._failed = False

    def enter(self, call: str, step: int) -> None:
        """Note that this process comes to the average ``call`` after ``step``. Does not wait for the store."""
        self._count, self._what, self._failed = self._count + 1, f"{call} at step {step}", False
        if self._processes is not None:
            with contextlib.suppress(Exception):  # a dead store is noticed by the collective too
                self._notices(self._processes).write_came(self._count, self._what)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Name the ranks that are missing if a collective in the block fails.

        Any other exception is raised as it is, and the other processes are told of it.
        """
        try:
            yield
        except BaseException as error:
            if self._processes is None or self._count == 0 or self._failed:
                raise
            self._failed = True
            if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
                self._tell(self._processes, f"{type(error).__name__}: {error}")
                raise
            self._tell(self._processes, f"{_COLLECTIVE}{_first_line(error)}")
            raise RuntimeError(self._explanation(self._processes, error)) from error

    def _notices(self, processes: ProcessEnsemble) -> Notices:
        return Notices(_store(), processes.name, processes.rank, self._life)

    def _tell(self, processes: ProcessEnsemble, cause: str) -> None:
        """Tell the others why the average failed here."""
        with contextlib.suppress(Exception):
            self._notices(processes).write_failed(self._count, cause)

    def _explanation(self, processes: ProcessEnsemble, error: RuntimeError) -> str:
        others = [rank for rank in processes.members() if rank != processes.rank]
        notices = self._notices(processes)
        signs = _in_time(lambda: self._signs(notices, others), STORE_SECONDS)
        if signs is None:
            found = "the store of the process group does not answer, so its host (usually rank 0) has ended or hangs"
        else:
            found = explanation(self._count, *signs, timeout=processes.seconds)
        return f"{self._what} failed: {found} ({type(error).__name__}: {_first_line(error)})"

    def _signs(
        self, notices: Notices, others: Sequence[int]
    ) -> tuple[dict[int, tuple[int, str]], dict[int, tuple[int, str]]]:
        """Return what each of the others wrote last when it came and when it failed. Waits a little for the latter."""
        until, pause = time.monotonic() + SIGN_SECONDS, _FIRST_PAUSE
        came = dict.fromkeys(others, NEVER)
        while True:
            came |= notices.came([rank for rank in others if came[rank][0] != self._count])
            failed = notices.failed(self._count, others)
            waits = any(came[rank][0] == self._count and rank not in failed for rank in others)
            left = until - time.monotonic()
            if not waits or left <= 0:
                return came, {rank: (self._count, failed[rank]) if rank in failed else NEVER for rank in others}
            time.sleep(min(pause, left))
            pause *= 2


def explanation(
    count: int, came: dict[int, tuple[int, str]], failed: dict[int, tuple[int, str]], *, timeout: float | None
) -> str:
    """Return who is missing at average number ``count``, from what the other ranks wrote last. Pure.

    Args:
        count: number of the average.
        came: for each other rank, the number and name of the last average that it came to; (0, "") for none.
        failed: the same for the last one that failed there, with the cause, marked if it is an error of a collective.
        timeout: of the process group, in seconds, if known.
    """
    found = []
    within = "" if timeout is None else f" within {timeout:g} s"
    for rank, (last, what) in came.items():
        if last != count:
            seen = f"it was last seen at {what}" if last else "it was never seen at an average"
            found.append(f"rank {rank} did not come{within} ({seen})")
        elif failed[rank][0] == count and not failed[rank][1].startswith(_COLLECTIVE):
            found.append(f"rank {rank} raised {failed[rank][1]}")
        elif failed[rank][0] != count:
            found.append(f"rank {rank} came and then gave no sign: it has ended, was stopped, or hangs")
    if any(last != count for last, _ in came.values()):
        found.append("every rank must come to every average, after the same number of steps")
    if found:
        return "; ".join(found)
    causes = (f"rank {rank}: {text.removeprefix(_COLLECTIVE)}" for rank, (_, text) in failed.items())
    return f"all ranks came, and the collective failed on all of them ({'; '.join(causes)})"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _in_time(look: Callable[[], Any], seconds: float) -> Any:
    """Return the result of ``look``; None if it fails or takes too long, as with a store whose host has gone."""
    results: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(look())

    thread = threading.Thread(target=run, name="hdet_kernels attendance", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
