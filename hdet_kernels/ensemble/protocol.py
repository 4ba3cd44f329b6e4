"""The protocol of an ensemble: who the replicas are, as one process sees them, and the collectives over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hdet_kernels.checks import spell


class Collective(Protocol):
    """A collective operation that has been started."""

    def wait(self) -> Any:
        """Wait until the result can be used. Raises if the collective failed.

        On a CPU the result is there when this returns. On a GPU the current stream waits for it.
        """


class Done:
    def wait(self) -> None:
        return None


class Ensemble(Protocol):
    """The replicas as one process sees them, and the collectives over them.

    All methods but :meth:`serves` and :meth:`averages` are collective: every process that holds the same part must
    call them in the same order.

    Attributes:
        size: N, the number of replicas.
        replica: number of the first replica that this process holds.
        rows: number of replicas that this process holds.
        part: number of the part of each replica that this process holds.
        parts: number of parts (shards) of a replica.
        processes: number of processes that hold the same part.
        process: number of this process among them.
        talks: whether there is a process group at all.
        rank: the global rank, by which messages name this process.
    """

    size: int
    replica: int
    rows: int
    part: int
    parts: int
    processes: int
    process: int
    talks: bool
    rank: int

    def gather(self, rows: Tensor) -> Tensor:
        """Gather [rows, columns] of every process; return [size, parts, columns] on the CPU."""

    def serves(self, device: torch.device) -> bool:
        """Return whether collectives take tensors on ``device``."""

    def averages(self, device: torch.device) -> bool:
        """Return whether :meth:`all_reduce` supports ``"mean"`` on ``device``."""

    def all_reduce(self, tensor: Tensor, operation: str) -> Collective:
        """Start to replace ``tensor`` by its ``"sum"``, ``"mean"`` or ``"max"`` over the processes."""

    def broadcast(self, tensor: Tensor, replica: int) -> Collective:
        """Start to replace ``tensor`` by that of the process which holds ``replica``."""

    def exchange(self, received: Tensor, sent: Tensor) -> Collective:
        """Start an all-to-all: send row p of ``sent`` to process p, receive its row into row p of ``received``."""

    def collect(self, gathered: Tensor, own: Tensor) -> Collective:
        """Start an all-gather of every process's ``own`` into the rows of ``gathered``."""

    def twin(self) -> Ensemble:
        """Return the same replicas with process groups of their own, for collectives that run in the background."""


def held(ensemble: Ensemble) -> slice:
    """Return the slice of all replicas that this process holds."""
    return slice(ensemble.replica, ensemble.replica + ensemble.rows)


#: Attributes and methods that every use of an ensemble needs.
_MEMBERS = ("size", "replica", "rows", "part", "parts", "processes", "process", "talks", "rank", "gather", "serves")


def check_ensemble(name: str, value: object, members: Sequence[str] = _MEMBERS) -> None:
    """Raise TypeError unless ``value`` has these attributes and methods of an :class:`Ensemble`."""
    missing = [member for member in members if not hasattr(value, member)]
    if missing or isinstance(value, type):
        wraps = isinstance(value, dist.ProcessGroup | DeviceMesh)
        remedy = (
            "pass hdet_kernels.ProcessEnsemble(…) of it"
            if wraps
            else "pass a ProcessEnsemble, stack.ensemble of a ReplicaStack, or leave it out"
        )
        raise TypeError(f"{name} must be an ensemble, which says who the replicas are, got {spell(value)}: {remedy}")
