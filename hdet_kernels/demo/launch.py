"""Run a function in N processes of this machine, in one process group, and end all of them in any case."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# ``function(rank, device, send, *args)``; ``send`` passes any picklable object to the parent process.
RankFunction = Callable[..., Any]


class RankFailed(RuntimeError):
    """Raised when a rank raised or died; the message has its traceback."""


def place(replicas: int) -> tuple[str, str]:
    """Return the process group backend and the device for ``replicas`` processes on this machine.

    NCCL requires a GPU for each process. Where processes share GPUs, or on the CPU, the backend is gloo.
    """
    gpus = torch.cuda.device_count()
    return "nccl" if gpus >= replicas else "gloo", "cuda" if gpus else "cpu"


def run_ranks(replicas: int, function: RankFunction, *args: Any, on_message: Callable[[Any], None]) -> list[Any]:
    """Return the results of ``function`` on every rank, in the order of ranks.

    No process outlives the call, also if it is interrupted.

    Args:
        replicas: Number of processes.
        function: Called as ``function(rank, device, send, *args)``; must be picklable.
        args: Further arguments.
        on_message: Called with every object that a rank sends.

    Raises:
        RankFailed: A rank raised or died.
    """
    context = mp.get_context("spawn")
    pipes = [context.Pipe() for _ in range(replicas)]
    with tempfile.TemporaryDirectory(prefix="hdet-demo-") as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(
                target=_rank_main, args=(rank, replicas, store, pipes[rank][1], function, args), daemon=True
            )
            for rank in range(replicas)
        ]
        try:
            with _interrupts_held_back():
                for process in ranks:
                    process.start()
            for _, theirs in pipes:
                theirs.close()
            results = _collect(ranks, [ours for ours, _ in pipes], on_message)
        except BaseException:
            _terminate(ranks)
            raise
        finally:
            for ours, _ in pipes:
                ours.close()  # a finished rank waits for this
        for process in ranks:
            process.join(timeout=10)
        _terminate(ranks)
        return results


def _collect(ranks: list[Any], pipes: list[Connection], on_message: Callable[[Any], None]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        for ready in wait(waiting):
            rank = next(index for index, pipe in enumerate(pipes) if pipe is ready)
            kind, value = _receive(pipes[rank])
            if kind == "message":
                on_message(value)
            elif kind == "result":
                results[rank] = value
            else:
                raise _first_failure(ranks, pipes, rank, value)
    return [results[rank] for rank in range(len(ranks))]


def _receive(pipe: Connection) -> tuple[str, Any]:
    try:
        kind, value = pipe.recv()
    except (EOFError, ConnectionResetError):
        return "error", None
    return kind, value


def _first_failure(ranks: list[Any], pipes: list[Connection], rank: int, value: Any) -> RankFailed:
    """Return the error of the rank that failed first: the failure of one rank makes its peers fail too."""
    failures = [(rank, value)]
    deadline = time.monotonic() + 1.0  # peers may notice a killed rank before its pipe is closed
    for other, pipe in enumerate(pipes):
        while other != rank and pipe.poll(max(deadline - time.monotonic(), 0)):
            kind, theirs = _receive(pipe)
            if kind == "error":
                failures.append((other, theirs))
                break
    died = [other for other, theirs in failures if theirs is None]
    if died:  # killed from outside; the errors of the others are consequences
        ranks[died[0]].join(timeout=5)
        code = ranks[died[0]].exitcode
        return RankFailed(f"rank {died[0]} ended without a result (exit code {code}); was it killed, or out of memory?")
    first, (_, text) = min(failures, key=lambda failure: failure[1][0])
    return RankFailed(f"rank {first} failed:\n{text}")


def _terminate(ranks: list[Any]) -> None:
    alive = [process for process in ranks if process.pid is not None and process.is_alive()]
    for process in alive:
        process.terminate()
    for process in alive:
        process.join(timeout=3)
        if process.is_alive():
            process.kill()
            process.join()


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Block SIGINT within the block, also in the processes that it starts.

    Ctrl-C goes to the whole process group, but only the parent handles it and ends its children: these inherit the
    signal mask and never receive it. A signal during the block reaches the parent at its end.
    """
    resource_tracker.ensure_running()  # otherwise the first process starts it, which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _rank_main(
    rank: int, replicas: int, store: str, pipe: Connection, function: RankFunction, args: tuple[Any, ...]
) -> None:
    try:
        backend, kind = place(replicas)
        device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if backend == "gloo" and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works without a resolvable host name
        torch.set_num_threads(1)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=replicas,
            timeout=datetime.timedelta(minutes=5),
            device_id=device if backend == "nccl" else None,
        )
        result = function(rank, device, lambda message: pipe.send(("message", message)), *args)
        pipe.send(("result", result))
    except BaseException:
        with contextlib.suppress(OSError):  # the parent may be gone
            pipe.send(("error", (time.monotonic(), traceback.format_exc())))
        os._exit(1)  # destroy_process_group would wait for the peers
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # until the parent has all results: a rank that leaves early would look dead to the others
    dist.destroy_process_group()
