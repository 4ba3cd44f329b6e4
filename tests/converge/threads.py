"""Replicas as threads of this process: collectives without process groups, for tests of a single module."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.ensemble import Collective, SingleReplica


class Finished:
    """A collective that has finished."""

    def wait(self) -> None:
        return None


class ThreadEnsemble(SingleReplica):
    """Replica ``replica`` of ``size``. Its collectives wait for those of all other threads."""

    talks = True

    def __init__(self, size: int, replica: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.size = self.processes = size
        self.replica = self.process = self.rank = replica
        self._board, self._barrier = board, barrier

    def _shown(self, tensor: Tensor) -> list[Tensor]:
        """Every thread's tensor, by replica."""
        self._board[self.replica] = tensor.detach().clone()
        self._barrier.wait(60)
        shown = list(self._board)
        self._barrier.wait(60)
        return shown

    def gather(self, rows: Tensor) -> Tensor:
        return torch.stack(self._shown(rows)).view(self.size, 1, -1)

    def averages(self, device: torch.device) -> bool:
        return False

    def all_reduce(self, tensor: Tensor, operation: str) -> Collective:
        stacked = torch.stack(self._shown(tensor))
        tensor.copy_(stacked.sum(dim=0) if operation == "sum" else stacked.amax(dim=0))
        return Finished()

    def broadcast(self, tensor: Tensor, replica: int) -> Collective:
        tensor.copy_(self._shown(tensor)[replica])
        return Finished()

    def exchange(self, received: Tensor, sent: Tensor) -> Collective:
        received.copy_(torch.stack([shown[self.process] for shown in self._shown(sent)]))
        return Finished()

    def collect(self, gathered: Tensor, own: Tensor) -> Collective:
        gathered.copy_(torch.stack(self._shown(own)))
        return Finished()


def run_threads(n: int, function: Callable[[ThreadEnsemble], Any]) -> list[Any]:
    """Return ``[function(ensemble) for each of n replicas]``, each call in a thread of its own."""
    board: list[Any] = [None] * n
    barrier = threading.Barrier(n)
    results: list[Any] = [None] * n
    failures: list[BaseException] = []

    def run(replica: int) -> None:
        try:
            results[replica] = function(ThreadEnsemble(n, replica, board, barrier))
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(replica,)) for replica in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
