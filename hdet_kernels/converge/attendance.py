"""Attendance: which ranks came to an average, so that a failed collective can name those that did not.

A collective that waits in vain ends in a timeout that names nobody. So every process notes in the store of the process
group that it came to an average, in one small message (:class:`Notices`). If the collective fails, the notices of the
others are read there. Who has ended is known from its connections, which are closed (:meth:`.ProcessEnsemble.closed`).

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

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.ensemble import Ensemble, ProcessEnsemble, RowEnsemble
from hdet_kernels.torch_internals import default_store

#: Seconds that a failed process waits for a sign of the others, and the most that the store may take to answer.
SIGN_SECONDS, STORE_SECONDS = 2.0, 6.0

# Seconds before a failed process looks for signs again. They double every time: thousands ask the same store.
_FIRST_PAUSE = 0.05

# Seconds for which a closed connection does not say that its rank has ended. A timeout closes it too, a moment before
# the rank tells of its failure.
_SETTLED = 0.3

# How many of these this process has made for each group of ranks and each rank of it.
_LIVES: Counter[tuple[str, int]] = Counter()

# Before the cause of a failure that is an error of a collective: it may be the consequence of another rank's.
_COLLECTIVE = "collective: "


#: The number and the name of an average that a rank never came to.
NEVER = (0, "")


class Attendance:
    """Notes when this process comes to an average, and explains the failure of its collectives.

    It gathers as the ensemble does. It does nothing more for ensembles without a process group.

    Args:
        ensemble: the replicas.

    Attributes:
        rank, rows, parts: those of the ensemble.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        processes = ensemble.among if isinstance(ensemble, RowEnsemble) else ensemble
        self._ensemble = ensemble
        self.rank, self.rows, self.parts = ensemble.rank, ensemble.rows, ensemble.parts
        self._processes = processes if isinstance(processes, ProcessEnsemble) else None
        self._life = 0
        if self._processes is not None:
            _LIVES[self._processes.name, self._processes.rank] += 1
            self._life = _LIVES[self._processes.name, self._processes.rank]
            if self._life > 1:
                with contextlib.suppress(Exception):
                    self._notices(self._processes).write_began()
        self._count = 0
        self._what, self._completed = "", ""  # this average, and the last one that did not fail
        self._failed = False
        self._looking: threading.Thread | None = None  # holds the store while that does not answer

    def enter(self, call: str, step: int) -> None:
        """Note that this process comes to the average ``call`` after ``step``. Does not wait for the store."""
        if not self._failed:
            self._completed = self._what
        self._count, self._what, self._failed = self._count + 1, f"{call} at step {step}", False
        if self._processes is not None and not self._waits_for_store:
            with contextlib.suppress(Exception):  # a dead store is noticed by the collective too
                self._notices(self._processes).write_came(self._count, self._what)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Name the ranks that are missing if a collective in the block fails.

        Any other exception is raised as it is, and the other processes are told of it.
        """
        start = time.monotonic()
        try:
            yield
        except BaseException as error:
            if self._processes is None or self._count == 0 or self._failed:
                raise
            self._failed = True
            waited = time.monotonic() - start
            if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
                self._tell(self._processes, f"{type(error).__name__}: {error}")
                raise
            self._tell(self._processes, f"{_COLLECTIVE}{_first_line(error)}")
            raise RuntimeError(self._explanation(self._processes, error, waited)) from error

    def gather(self, rows: Tensor) -> Tensor:
        """Gather [rows, columns] of every process, as the ensemble does; an error names the missing. Collective."""
        with self.explained():
            return self._ensemble.gather(rows)

    @property
    def _waits_for_store(self) -> bool:
        """Whether the store has not answered yet: another request would wait as long."""
        return self._looking is not None and self._looking.is_alive()

    def _notices(self, processes: ProcessEnsemble) -> Notices:
        return Notices(default_store(), processes.name, processes.rank, self._life)

    def _tell(self, processes: ProcessEnsemble, cause: str) -> None:
        """Tell the others why the average failed here."""
        if self._waits_for_store:
            return
        with contextlib.suppress(Exception):
            self._notices(processes).write_failed(self._count, cause)

    def _explanation(self, processes: ProcessEnsemble, error: RuntimeError, waited: float) -> str:
        others = [rank for rank in processes.members() if rank != processes.rank]
        # A timeout closes all connections of a process, so that they say nothing about the others.
        timed_out = processes.seconds is not None and waited >= processes.seconds
        own = f"this rank last completed {self._completed}" if self._completed else "this rank has completed none"
        signs = None
        if not self._waits_for_store:
            look = partial(self._signs, processes, self._notices(processes), others, timed_out)
            signs, self._looking = _in_time(look, STORE_SECONDS)
        if signs is None:
            found = (
                "the store of the process group cannot be reached: the network to its host (usually that of rank 0) is "
                f"cut, or that host has ended or hangs; {own}"
            )
            if not timed_out and (ended := processes.closed(others)):
                named = ", ".join(map(str, ended))
                found += f"; the connections to ranks {named} are closed, and which of them ended first is not known"
        else:
            found = explanation(self._count, *signs, own=own, waited=waited, timed_out=timed_out)
        return f"{self._what} failed: {found} ({type(error).__name__}: {_first_line(error)})"

    def _signs(
        self, processes: ProcessEnsemble, notices: Notices, others: Sequence[int], timed_out: bool
    ) -> tuple[dict[int, tuple[int, str]], dict[int, str], list[int]]:
        """Return the arguments of :func:`explanation`. Waits a little, until it is known who is to blame."""
        start, pause = time.monotonic(), _FIRST_PAUSE
        came = dict.fromkeys(others, NEVER)
        while True:
            # First, because a rank that has failed writes so before it ends.
            closed = [] if timed_out else processes.closed(others)
            came |= notices.came([rank for rank in others if came[rank][0] != self._count])
            failed = notices.failed(self._count, others)
            silent = [rank for rank in others if rank not in failed]
            passed = time.monotonic() - start
            ended = passed >= _SETTLED and any(rank in closed for rank in silent)
            to_blame = ended or any(map(_is_own, failed.values()))
            waits = [rank for rank in silent if came[rank][0] == self._count or not timed_out]
            left = SIGN_SECONDS - passed
            if to_blame or not waits or left <= 0:
                return came, failed, closed
            time.sleep(min(pause, left))
            pause *= 2


#: What gathers rows of all replicas.
Gathers = Ensemble | Attendance


def explanation(
    count: int,
    came: dict[int, tuple[int, str]],
    failed: dict[int, str],
    closed: Sequence[int],
    *,
    own: str,
    waited: float,
    timed_out: bool = False,
) -> str:
    """Return who is to blame that average number ``count`` failed, as far as it is known. Pure.

    Where a rank raised or has ended, the others are not to blame that they have not come yet. A rank that came and
    gives no sign may only wait for this one: then the first failure is told too, unless all wait for a timeout.

    Args:
        count: number of the average.
        came: for each other rank, the number and name of the last average that it came to; (0, "") for none.
        failed: for those where this average failed, the cause, marked if it is an error of a collective.
        closed: the ranks whose connection to this one is closed.
        own: the last average that this rank completed, in words.
        waited: seconds until the average failed here.
        timed_out: whether it failed by a timeout.
    """
    seen = {
        rank: "after it came" if last == count else f"it was last seen at {what}" if last else _NEVER_SEEN
        for rank, (last, what) in came.items()
    }
    found = [f"rank {rank} raised {cause}" for rank, cause in failed.items() if _is_own(cause)]
    silent = [rank for rank in came if rank not in failed]
    found += [f"rank {rank} has ended ({seen[rank]})" for rank in silent if rank in closed]
    if found:
        return "; ".join([*found, "see what it wrote last, and start all ranks again from the last checkpoint"])
    absent = [rank for rank in silent if came[rank][0] != count]
    found += [f"rank {rank} did not come within {waited:.1f} s ({seen[rank]})" for rank in absent]
    hanging = [rank for rank in silent if rank not in absent]
    found += [f"rank {rank} came and then gave no sign: {_UNKNOWN}" for rank in hanging]
    if found:
        found.append(own)
    causes = [f"rank {rank}: {text.removeprefix(_COLLECTIVE)}" for rank, text in failed.items()]
    if absent:
        found.append(
            "check the network between these ranks; if it holds, every rank must make the same calls of the scheduler, "
            "after the same number of steps"
        )
    elif hanging and causes and not timed_out:
        found.append(f"the collective failed on {causes[0]}")
    if found:
        return "; ".join(found)
    return f"all ranks came, and the collective failed on all, as if the network was cut ({'; '.join(causes)}); {own}"


_NEVER_SEEN = "it was never seen at an average"
_UNKNOWN = "it has ended, was stopped or hangs, or the network to it is cut"


def _is_own(cause: str) -> bool:
    """Whether a rank failed by itself, and not because a collective did."""
    return not cause.startswith(_COLLECTIVE)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _in_time(look: Callable[[], Any], seconds: float) -> tuple[Any, threading.Thread]:
    """Return the result of ``look`` and its thread.

    It is None if that fails or takes too long, as with a store whose host has gone. The thread then runs on.
    """
    results: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(look())

    thread = threading.Thread(target=run, name="hdet_kernels attendance", daemon=True)
    thread.start()
    thread.join(seconds)
    return (results[0] if results else None), thread


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

        The first to fail comes first, where that is known. Only failures in the lives count in which :meth:`came` has
        seen the ranks.
        """
        if self._has_lists:
            notices = dict(json.loads(line) for line in self._store.get(self._failed(count)).splitlines())
        else:
            keys = {rank: f"{self._failed(count)}/{rank}" for rank in ranks}
            notices = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        found, wanted = {}, set(ranks)
        for rank, notice in notices.items():
            life, _, cause = notice.partition(" ")
            if rank in wanted and life == self._lives.get(rank):
                found[rank] = cause
        return found

    def _came(self, rank: int) -> str:
        return f"{self._path}/came/{rank}"

    def _failed(self, count: int) -> str:
        return f"{self._path}/failed/{count}"
