"""Run a function on N processes of this machine, in one process group; watch them, and clean up after them."""

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

#: ``function(rank, device, send, *args)``; ``send`` gives any picklable object to the parent process.
RankFunction = Callable[..., Any]


class RankFailed(RuntimeError):
    """A rank raised or died; the message holds its traceback."""


def place(replicas: int) -> tuple[str, str]:
    """(process group backend, device) for ``replicas`` processes here: NCCL if each can have a GPU of its own, which
    NCCL insists on; gloo where they share fewer GPUs, or on the CPU."""
    gpus = torch.cuda.device_count()
    return "nccl" if gpus >= replicas else "gloo", "cuda" if gpus else "cpu"


def run_ranks(replicas: int, function: RankFunction, *args: Any, on_message: Callable[[Any], None]) -> list[Any]:
    """The results of ``function`` on every rank, in order of rank.

    The first rank that fails ends all of them and raises :class:`RankFailed`; so does an interrupt, which goes on to
    the caller. No process outlives the call.
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
                ours.close()  # what a rank that has finished waits for
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
    """A rank that fails takes its peers down with it: report the one that was first, by the clock."""
    failures = [(rank, value)]
    deadline = time.monotonic() + 1.0  # a killed rank's peers may hear of it before its pipe is closed
    for other, pipe in enumerate(pipes):
        while other != rank and pipe.poll(max(deadline - time.monotonic(), 0)):
            kind, theirs = _receive(pipe)
            if kind == "error":
                failures.append((other, theirs))
                break
    died = [other for other, theirs in failures if theirs is None]
    if died:  # killed from outside: it had no time to say why, and what the others say follows from it
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
    """Ctrl-C reaches the whole process group, but what happens then is the parent's to decide: processes started in
    this block inherit its signal mask and never see an interrupt. One that comes meanwhile reaches the parent at the
    end of the block."""
    resource_tracker.ensure_running()  # the first process would start it, and it unblocks interrupts behind itself
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
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve must not matter
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
        pipe.recv()  # until the parent has all results: a rank that leaves early could look dead to the others
    dist.destroy_process_group()
