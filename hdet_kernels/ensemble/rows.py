"""Several replicas per process, as the rows of its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_kernels.checks import check_whole
from hdet_kernels.ensemble.protocol import Collective, Ensemble, Trading, check_ensemble
from hdet_kernels.ensemble.single import SingleReplica


class RowEnsemble:
    """Several replicas per process, as the rows of its tensors.

    Args:
        rows: number of replicas in this process.
        among: the processes, each of which holds as many (default: this process alone).
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

    def trades(self, device: torch.device) -> bool:
        return isinstance(self.among, Trading) and self.among.trades(device)

    def trade(self, sent: Sequence[Tensor | None], received: Sequence[Tensor | None]) -> Collective:
        if not isinstance(self.among, Trading):
            raise TypeError(f"{self.among} does not pass tensors between single processes")
        return self.among.trade(sent, received)

    def confirm(self) -> None:
        return None

    def twin(self) -> RowEnsemble:
        return RowEnsemble(self.rows, self.among.twin())

    def __repr__(self) -> str:
        return f"RowEnsemble({self.rows} rows, {self.among})"
