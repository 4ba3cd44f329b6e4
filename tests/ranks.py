"""Run a function on N ranks: real processes in a real gloo process group."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from typing import Any
from unittest import mock

import pytest

# The timeout of the ranks' process group, and of a run, in seconds. Both are generous: the machine may be busy with
# other things. A test that waits for a timeout makes a group with a short one of its own.
GROUP_TIMEOUT, RUN_TIMEOUT = 120, 400

# A server imports torch once and forks the ranks from there. A rank then starts in milliseconds, and no thread of the
# test process is forked.
CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ("pytest", "hypothesis", "tests.preload")

#: What ranks of the integrations import, for seconds each.
FRAMEWORKS = ("transformers.trainer", "lightning", "accelerate")


@contextlib.contextmanager
def preloaded(imported: tuple[str, ...] = ()) -> Iterator[None]:
    """Within the block, processes of the method ``forkserver`` find torch imported, and more."""
    with mock.patch.object(forkserver, "connect_to_new_process", _server(imported).connect_to_new_process):
        yield


def start(processes: Sequence[Any], imported: tuple[str, ...] = ()) -> None:
    """Start processes of :data:`CONTEXT`, which are :func:`preloaded`."""
    with preloaded(imported):
        for process in processes:
            process.start()


@cache
def _server(more: tuple[str, ...]) -> forkserver.ForkServer:
    """Return the server that has imported ``more`` beside torch, and serves all runs of this process."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*_PRELOADED, *more])
    return server


def nccl_group(timeout: float = 120.0) -> Any:
    """Return a group of all ranks over NCCL that share the first GPU. Collective.

    NCCL refuses two ranks of one host on one GPU, and takes what ``NCCL_HOSTID`` says for the host. So every rank says
    something else, and they talk over sockets of the loopback device.
    """
    import torch
    import torch.distributed as dist

    os.environ |= {
        "NCCL_HOSTID": f"host of rank {dist.get_rank()}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        # By default torch ends the process when a peer has gone; here the error is to arrive.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }
    torch.cuda.set_device(0)
    return dist.new_group(backend="nccl", timeout=datetime.timedelta(seconds=timeout))


def run_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = RUN_TIMEOUT,
    expect_dead: int = 0,
    imported: tuple[str, ...] = (),
) -> list[Any]:
    """Return ``[function(rank, *args) for rank in range(n)]``, each call in a process of its own, in one gloo group.

    A rank that raises fails the test with its traceback.

    Args:
        expect_dead: number of ranks that may end without a result (None).
        imported: modules that the ranks find imported, such as :data:`FRAMEWORKS`. Those that are missing are left out.
    """
    results: Any = CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [CONTEXT.Process(target=_rank, args=(r, n, store, results, function, args)) for r in range(n)]
        start(ranks, imported)
        try:
            found = _collect(ranks, results, n - expect_dead, time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(found.items()) if not ok]
    if failures:
        raise AssertionError("\n\n".join(failures))
    return [pickle.loads(found[rank][1]) if rank in found else None for rank in range(n)]


@contextlib.contextmanager
def environment_of_torchrun(rank: int) -> Iterator[Callable[[], None]]:
    """Give a rank the environment that torchrun gives, instead of a process group, for code that makes a group itself.

    Yields:
        A function to call before each group after the first. A store serves one group only.
    """
    import torch.distributed as dist

    size = dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    # Stores exist already, as under torchrun: no port is chosen here that another process might take.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    outer = dist.distributed_c10d._get_default_store()
    stores = []

    def begin() -> None:
        key = f"port of store {len(stores)}"
        stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None)
        if stores[-1] is not None:
            outer.set(key, str(stores[-1].port))
        os.environ["MASTER_PORT"] = outer.get(key).decode()

    dist.barrier()  # a rank that is still being connected to would see its peer go
    dist.destroy_process_group()
    begin()
    yield begin
    if not dist.is_initialized():
        begin()
        dist.init_process_group("gloo")
    dist.barrier()  # rank 0 holds the stores


class Group:
    """The default process group of the ranks of a test, which can be ended and begun again."""

    def __init__(self, rank: int, folder: str | os.PathLike[str]) -> None:
        self.rank, self.folder, self.count = rank, folder, 0

    def begin(self) -> None:
        import torch.distributed as dist

        self.count += 1
        store = f"file://{os.path.join(self.folder, f'store{self.count}')}"
        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT)
        dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=2, timeout=timeout)

    def end(self) -> None:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()


Arguments = Mapping[Any, tuple[Any, ...]] | Sequence[tuple[Any, ...]]


class Cases:
    """The results of a function for several cases, which one group of ranks computes one after the other.

    Parametrised tests share the ranks: the first test that asks for its case runs all of them. The function must leave
    its process as it found it.

    Args:
        n: number of ranks.
        function: is called as ``function(rank, *arguments)``.
        cases: the arguments of each case, by its key. A list of tuples is keyed by these.
        full: more cases, for tests that are marked ``full``. Another group of ranks runs them.
        imported: as in :func:`run_ranks`.
    """

    def __init__(
        self,
        n: int,
        function: Callable[..., Any],
        cases: Arguments,
        full: Arguments = (),
        imported: tuple[str, ...] = (),
    ) -> None:
        self.n, self.function, self.imported = n, function, imported
        self.cases, self.full = _by_key(cases), _by_key(full)
        self._results: dict[bool, list[dict[Any, Any]]] = {}

    def __getitem__(self, case: Hashable) -> list[Any]:
        """The results of all ranks."""
        full = case in self.full
        if full not in self._results:
            cases = self.full if full else self.cases
            self._results[full] = run_ranks(self.n, _each, self.function, cases, imported=self.imported)
        return [results[case] for results in self._results[full]]

    def params(self) -> list[Any]:
        """The keys as parameters of a test."""
        keys = [(key if isinstance(key, tuple) else (key,), key in self.full) for key in (*self.cases, *self.full)]
        return [pytest.param(*key, marks=pytest.mark.full if full else []) for key, full in keys]


def _by_key(cases: Arguments) -> dict[Any, tuple[Any, ...]]:
    return dict(cases) if isinstance(cases, Mapping) else {case: case for case in cases}


def _each(rank: int, function: Callable[..., Any], cases: Mapping[Hashable, tuple[Any, ...]]) -> dict[Hashable, Any]:
    return {case: function(rank, *arguments) for case, arguments in cases.items()}


def _collect(ranks: list[Any], results: Any, expected: int, deadline: float) -> dict[int, tuple[bool, Any]]:
    found: dict[int, tuple[bool, Any]] = {}
    while len(found) < expected:
        try:
            rank, ok, value = results.get(timeout=0.5)
            found[rank] = (ok, value)
        except queue.Empty:
            gone = [r for r, p in enumerate(ranks) if not p.is_alive() and r not in found]
            if len(gone) > len(ranks) - expected and results.empty():
                raise AssertionError(f"ranks {gone} died without a result; so far {found}") from None
            if time.monotonic() > deadline:
                raise AssertionError(f"ranks {sorted(set(range(len(ranks))) - set(found))} did not finish") from None
    return found


def _rank(rank: int, n: int, store: str, results: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n, timeout=timeout)
        # Plain pickle sends tensors by value, not as shared memory of a process that is about to end.
        results.put((rank, True, pickle.dumps(function(rank, *args))))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        os._exit(0)  # destroy_process_group would wait for a peer that died
