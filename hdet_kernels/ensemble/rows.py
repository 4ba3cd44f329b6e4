"""The replicas of one process: a single one, or several as the rows of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from hdet_kernels.checks import check_whole
from hdet_kernels.ensemble.protocol import Collective, Done, Ensemble, check_ensemble


class SingleReplica:
    """One process with one replica: there is nothing to gather or to average."""

    size = rows = parts = processes = 1
    replica = part = process = rank = 0
    talks = False

    def gather(self, rows: Tensor) -> Tensor:
        return rows.detach().cpu().reshape(1, 1, -1)

    def serves(self, device: torch.device) -> bool:
        return True

    def averages(self, device: torch.device) -> bool:
        return True

    def all_reduce(self, tensor: Tensor, operation: str) -> Collective:
        return Done()

    def broadcast(self, tensor: Tensor, replica: int) -> Collective:
        return Done()

    def exchange(self, received: Tensor, sent: Tensor) -> Collective:
        received.copy_(sent)
        return Done()

    def collect(self, gathered: Tensor, own: Tensor) -> Collective:
        gathered[0].copy_(own)
        return Done()

    def twin(self) -> SingleReplica:
        return self

    def __repr__(self) -> str:
        return "SingleReplica()"


class RowEnsemble:
    """Several replicas per process, as the rows of its tensors.

    ``among`` are the processes, each of which holds as many (default: this process alone).
    """

    part = 0
    parts = 1

    def __init__(self, rows: int, among: Ensemble | None = None) -> None:
        rows = check_whole("rows", rows, at_least=1)
        among = SingleReplica() if among is None else among
        check_ensemble("among", among)
        if among.rows != 1 or among.parts != 1:
            raise ValueError(f"among must be processes that hold one whole replica each, got {among}")
        self.among, self.rows, self.talks, self.rank = among, rows, among.talks, among.rank
        self.processes, self.process = among.processes, among.process
        self.size, self.replica = rows * among.size, rows * among.replica

    def gather(self, rows: Tensor) -> Tensor:
        return self.among.gather(rows).view(self.size, 1, -1)

    def serves(self, device: torch.device) -> bool:
        return self.among.serves(device)

    def averages(self, device: torch.device) -> bool:
        return self.among.averages(device)

    def all_reduce(self, tensor: Tensor, operation: str) -> Collective:
        return self.among.all_reduce(tensor, operation)

    def broadcast(self, tensor: Tensor, replica: int) -> Collective:
        return self.among.broadcast(tensor, replica // self.rows)

    def exchange(self, received: Tensor, sent: Tensor) -> Collective:
        return self.among.exchange(received, sent)

    def collect(self, gathered: Tensor, own: Tensor) -> Collective:
        return self.among.collect(gathered, own)

    def twin(self) -> RowEnsemble:
        return RowEnsemble(self.rows, self.among.twin())

    def __repr__(self) -> str:
        return f"RowEnsemble({self.rows} rows, {self.among})"
