"""Groups of processes that make one case after the other, until one of them is lost."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import CONTEXT, start

#: Timeout of the process groups, and the longest that a case may take, in seconds. The machine may be busy: a case that
#: is about a timeout sets a short one itself.
GROUP_TIMEOUT, CASE_TIMEOUT = 60.0, 120.0
#: How long a stopped process stays stopped before it is continued.
PAUSE = 0.3
#: How long a rank that may be lost can still send its result when all others have.
GRACE = 2.0


class Leave(Exception):
    """Raised by a call of a group: send this value, then end the process."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Lost(Exception):
    """A process gave no result although it had time, or failed in the code of the test itself."""


class Group:
    """Processes with ranks 0 … size − 1 in one gloo group.

    Args:
        size: number of processes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        pipes = [CONTEXT.Pipe() for _ in range(size)]
        self._pipes = [here for here, _ in pipes]
        self._processes = [
            CONTEXT.Process(target=_serve, args=(rank, size, store, there), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        start(self._processes)
        for _, there in pipes:
            there.close()

    def call(
        self, function: Callable[..., Any], *args: Any, continues: bool = False, expendable: Collection[int] = ()
    ) -> list[Any]:
        """Return what ``function(rank, *args)`` returns on every rank; None for a rank that ended without a result.

        Args:
            function: what every rank calls.
            args: its arguments after the rank.
            continues: continue a process that has stopped itself, after a moment.
            expendable: ranks that are killed if they have given no result a while after all others.
        """
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send((function, args))
        found: dict[int, Any] = {}
        open_pipes = dict(enumerate(self._pipes))
        deadline, alone_since = time.monotonic() + CASE_TIMEOUT, None
        while open_pipes:
            ready = connection.wait(list(open_pipes.values()), timeout=0.1)
            for rank, pipe in list(open_pipes.items()):
                if pipe in ready:
                    with contextlib.suppress(EOFError, OSError):
                        found[rank] = pipe.recv()
                    del open_pipes[rank]
            if continues and (stopped := [rank for rank in open_pipes if self._is_stopped(rank)]):
                time.sleep(PAUSE)
                for rank in stopped:
                    os.kill(self._pid(rank), signal.SIGCONT)
            if open_pipes.keys() <= set(expendable):
                alone_since = time.monotonic() if alone_since is None else alone_since
                for rank in open_pipes:
                    if self._is_stopped(rank) or time.monotonic() > alone_since + GRACE:
                        self._processes[rank].kill()
            if time.monotonic() > deadline:
                raise Lost(f"ranks {sorted(open_pipes)} of {self.size} gave no result within {CASE_TIMEOUT:.0f} s")
        if failed := [text for ok, text in found.values() if not ok]:
            raise Lost(failed[0])
        return [pickle.loads(found[rank][1]) if rank in found else None for rank in range(self.size)]

    def _pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def _is_stopped(self, rank: int) -> bool:
        try:
            state = Path(f"/proc/{self._pid(rank)}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state == "T"

    def close(self) -> None:
        """End all processes."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    # What torch warns of when peers die would bury the table.
    log = os.open(f"{store}-stderr{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    timeout = timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            # Plain pickle sends tensors by value, not as shared memory of a process that is about to end.
            pipe.send((True, pickle.dumps(function(rank, *args))))
        except Leave as leaving:
            pipe.send((True, pickle.dumps(leaving.value)))
            os._exit(1)
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Pool:
    """One group of every size that is asked for; a broken one is replaced."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self.started = 0

    def group(self, size: int) -> Group:
        """Return the group of this size."""
        if size not in self._groups:
            self._groups[size] = Group(size)
            self.started += 1
        return self._groups[size]

    def discard(self, size: int) -> None:
        """End the group of this size, if there is one: the next that is asked for is new."""
        if size in self._groups:
            self._groups.pop(size).close()

    def close(self) -> None:
        """End all groups."""
        for size in list(self._groups):
            self.discard(size)
