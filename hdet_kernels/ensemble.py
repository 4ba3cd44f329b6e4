"""Who the replicas are.

An ensemble of N replicas can gather one small row per replica and average a tensor over a chosen subset of them. The
replicas are the processes of a ``torch.distributed`` group, or this process alone.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Ensemble(Protocol):
    """N = ``size`` replicas, of which this process holds number ``replica``."""

    size: int
    replica: int

    def gather(self, row: Tensor) -> Tensor:
        """The rows of all replicas, [size, columns], on the CPU, from this replica's ``row``. One collective."""

    def mean_(self, tensor: Tensor, included: int, include_me: bool) -> None:
        """Replace ``tensor`` by its mean over the ``included`` replicas that pass ``include_me``; the others receive
        it too. One collective."""


class SingleReplica:
    """One process, one replica: nothing to gather, nothing to average."""

    size = 1
    replica = 0

    def gather(self, row: Tensor) -> Tensor:
        return row.detach().cpu().reshape(1, -1)

    def mean_(self, tensor: Tensor, included: int, include_me: bool) -> None:
        return None

    def __repr__(self) -> str:
        return "SingleReplica()"


class ProcessEnsemble:
    """The processes of a ``torch.distributed`` group, each of them one replica (default: the default group)."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "ProcessEnsemble needs an initialised process group: start the script with torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        self.group = process_group
        self.size = dist.get_world_size(process_group)
        self.replica = dist.get_rank(process_group)
        if self.replica < 0:
            raise ValueError("this process is not a member of the given process group")
        # "gloo" serves every device, "nccl" CUDA alone, and a default group on a GPU machine may have one for each.
        config = dist.get_backend_config(process_group)
        self.backends = dict(entry.split(":") for entry in config.split(",") if ":" in entry)

    def gather(self, row: Tensor) -> Tensor:
        row = row.detach().to(self._control_device())
        rows = torch.empty(self.size, row.numel(), dtype=row.dtype, device=row.device)
        dist.all_gather(list(rows.unbind(0)), row, group=self.group)
        return rows.cpu()

    def mean_(self, tensor: Tensor, included: int, include_me: bool) -> None:
        if included == self.size and self.backends.get(tensor.device.type) == "nccl":
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self.group)
            return
        if not include_me:
            tensor.zero_()  # not multiplied by zero: NaN and infinity would survive that
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group)
        tensor.div_(included)

    def _control_device(self) -> torch.device:
        return torch.device("cpu") if "cpu" in self.backends else torch.device("cuda", torch.cuda.current_device())

    def __repr__(self) -> str:
        return f"ProcessEnsemble(replica {self.replica} of {self.size}, {self.backends})"


def default_ensemble() -> Ensemble:
    """The default process group if it is initialised, else a single replica."""
    if dist.is_available() and dist.is_initialized():
        return ProcessEnsemble()
    return SingleReplica()
