"""Run a function on N ranks that are threads of this process, for more ranks than a machine can start processes.

The process group has the all-gather and the all-reduce, on torch's threaded world, which its own tests use. Both are
counted. One thread runs at a time, until it waits for the others: a thousand threads that run at once would spend their
time on waiting for Python's lock. Only the world is per thread. What a module of torch or of the package remembers for
the process is shared by all ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded

# A thread of Python needs little of the usual eight megabytes.
STACK_BYTES = 512 * 1024


@dataclass
class Traffic:
    """The bytes of every all-gather, from one rank, and of every all-reduce of a run."""

    gathered: list[int] = field(default_factory=list)
    all_reduced: list[int] = field(default_factory=list)


class _Stuck(RuntimeError):
    """All ranks that have not ended wait for each other."""


class _Turns:
    """Let one rank run at a time.

    Args:
        n: number of ranks.
    """

    def __init__(self, n: int) -> None:
        self._turn = [threading.Semaphore(0) for _ in range(n)]
        self._ready, self._left, self._stuck = deque(range(n)), n, False

    def begin(self, rank: int) -> None:
        """Wait for the first turn."""
        self._turn[rank].acquire()

    def wait(self, rank: int) -> None:
        """Let the others run until one of them calls :meth:`wake` for ``rank``."""
        self._hand_on()
        self._turn[rank].acquire()
        if self._stuck:
            raise _Stuck(f"rank {rank} waits for a collective that the others do not come to")

    def wake(self, rank: int) -> None:
        self._ready.append(rank)

    def end(self) -> None:
        self._left -= 1
        self._hand_on()

    def start(self) -> None:
        self._hand_on()

    def _hand_on(self) -> None:
        if self._ready:
            self._turn[self._ready.popleft()].release()
        elif self._left and not self._stuck:
            self._stuck = True
            for turn in self._turn:
                turn.release()


class _Hub:
    """What the groups of all ranks share: the tensors that came to the collective under way, by rank."""

    def __init__(self, n: int) -> None:
        self.turns, self.traffic = _Turns(n), Traffic()
        self.came: dict[int, Any] = {}


class _Work:
    """A collective that has finished."""

    def wait(self, _timeout: Any = None) -> bool:
        return True


class _Group(threaded.ProcessLocalGroup):  # type: ignore[misc]
    hub: _Hub

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Work:
        assert opts.reduceOp == dist.ReduceOp.SUM

        def finish(came: dict[int, Tensor]) -> None:
            total = sum(tensor.clone() for _, tensor in sorted(came.items()))
            self.hub.traffic.all_reduced.append(tensors[0].nbytes)
            for tensor in came.values():
                tensor.copy_(total)

        return self._together(tensors[0], finish)

    def _allgather_base(self, gathered: Tensor, own: Tensor, _opts: Any = None) -> _Work:
        def finish(came: dict[int, tuple[Tensor, Tensor]]) -> None:
            whole = torch.cat([row.reshape(-1) for _, (_, row) in sorted(came.items())])
            self.hub.traffic.gathered.append(own.nbytes)
            for target, _ in came.values():
                target.copy_(whole.view(target.shape))

        return self._together((gathered, own), finish)

    all_gather_single = _allgather_base  # its name from torch 2.13 on

    def _together(self, own: Any, finish: Callable[[dict[int, Any]], None]) -> _Work:
        """Wait until all ranks have come; the last one finishes the collective for all of them."""
        hub, rank = self.hub, self.rank()
        hub.came[rank] = own
        if len(hub.came) < self.size():
            hub.turns.wait(rank)
            return _Work()
        came, hub.came = hub.came, {}
        finish(came)
        for other in came:
            if other != rank:
                hub.turns.wake(other)
        return _Work()


def run_threads(n: int, function: Callable[..., Any], *args: Any) -> tuple[list[Any], Traffic]:
    """Return ``[function(rank, *args) for rank in range(n)]``, each call in a thread of its own, and the traffic.

    A rank that raises fails the test with its traceback.
    """
    if "counted" not in dist.Backend.backend_list:
        dist.Backend.register_backend("counted", lambda _store, rank, size, _: _Group(rank, size), devices=["cpu"])
    _Group.hub = hub = _Hub(n)
    found: list[Any] = [None] * n
    failures: list[tuple[int, BaseException]] = []
    store = dist.HashStore()

    def be_rank(rank: int) -> None:
        hub.turns.begin(rank)
        try:
            dist.init_process_group("counted", store=store, rank=rank, world_size=n)
            found[rank] = function(rank, *args)
        except BaseException as error:
            failures.append((rank, error))
        finally:
            dist.distributed_c10d._world.default_pg = None
            hub.turns.end()

    stack_before, threads_before = threading.stack_size(STACK_BYTES), torch.get_num_threads()
    torch.set_num_threads(1)
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # every thread may use the same names of groups
    try:
        threads = [threading.Thread(target=be_rank, args=(rank,), daemon=True) for rank in range(n)]
        for thread in threads:
            thread.start()
        hub.turns.start()
        for thread in threads:
            thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
        threading.stack_size(stack_before)
        torch.set_num_threads(threads_before)
    if failures:
        rank, error = failures[0]
        raise AssertionError(f"{len(failures)} of {n} ranks failed, rank {rank} first: {error!r}") from error
    return found, hub.traffic
