"""One replica in one process: an ensemble without others."""

from __future__ import annotations

import torch
from torch import Tensor

from hdet_kernels.ensemble.protocol import Collective
from hdet_kernels.ensemble.started import Done


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

    def confirm(self) -> None:
        return None

    def twin(self) -> SingleReplica:
        return self

    def __repr__(self) -> str:
        return "SingleReplica()"
