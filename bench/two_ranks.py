"""Run the same operations on two gloo ranks: this process, which measures, and a second one that follows it."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

Operations = Callable[[], Sequence[Callable[[], object]]]


@contextlib.contextmanager
def lead(operations: Operations, threads: int = 1) -> Iterator[Callable[[int], None]]:
    """Yield a function that runs operation number i on both ranks.

    Each rank calls ``operations`` once, within the process group, to build its list of operations.
    """
    with tempfile.TemporaryDirectory() as folder:
        follower = multiprocessing.get_context("spawn").Process(target=_follow, args=(operations, folder, threads))
        follower.start()
        _start(0, folder, threads)
        known = operations()

        def call(index: int) -> None:
            dist.broadcast(torch.tensor([index]), src=0)
            if index >= 0:
                known[index]()

        try:
            yield call
        finally:
            call(-1)
            follower.join()
            dist.destroy_process_group()


def _start(rank: int, folder: str, threads: int) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def _follow(operations: Operations, folder: str, threads: int) -> None:
    _start(1, folder, threads)
    known = operations()
    command = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.broadcast(command, src=0)
        if command.item() < 0:
            return
        known[int(command)]()
