"""Who the replicas are, and how they talk.

An ensemble has N replicas. A process holds one of them, or several as rows of one buffer; or several processes hold
one together, each a shard of its parameters. The processes that hold the same part of different replicas talk to each
other through a ``torch.distributed`` group.
"""

from __future__ import annotations

import datetime
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

#: torch 2.13 gave it another name, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collective(Protocol):
    """A collective on its way."""

    def wait(self) -> Any:
        """Until the result can be used: on a CPU until it is there, on a GPU by whatever its current stream does
        next. Raises if the collective failed."""


class Ensemble(Protocol):
    """N = ``size`` replicas. This process holds ``rows`` of them from number ``replica`` on, and of each of them number
    ``part`` of ``parts``. ``processes`` hold the same part; this one is number ``process`` of them. ``talks``: whether
    they are connected at all; ``rank``: by what number users know this one.

    All methods but :meth:`serves` and :meth:`averages` are collective: every process that holds the same part must
    call them in the same order.
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
        """[size, parts, columns], on the CPU, of everyone's [rows, columns]."""

    def serves(self, device: torch.device) -> bool:
        """Whether tensors on ``device`` can travel."""

    def averages(self, device: torch.device) -> bool:
        """Whether :meth:`all_reduce` can divide by the number of processes as it adds."""

    def all_reduce(self, tensor: Tensor, operation: str) -> Collective:
        """Start to replace ``tensor`` by its ``"sum"``, ``"mean"`` or ``"max"`` over the processes."""

    def broadcast(self, tensor: Tensor, replica: int) -> Collective:
        """Start to replace ``tensor`` by that of the process which holds ``replica``."""

    def exchange(self, received: Tensor, sent: Tensor) -> Collective:
        """Start to send row p of ``sent`` to process p, and to receive its row into row p of ``received``."""

    def collect(self, gathered: Tensor, own: Tensor) -> Collective:
        """Start to gather every process's ``own`` into the rows of ``gathered``."""

    def confirm(self) -> None:
        """Wait until all processes that hold parts of these replicas have come here: an average is one of the whole
        replica, or of none of its parts."""

    def twin(self) -> Ensemble:
        """The same replicas over connections of their own, for collectives that run beside others."""


class SingleReplica:
    """One process, one replica: nothing to gather, nothing to average."""

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
        return _Done()

    def broadcast(self, tensor: Tensor, replica: int) -> Collective:
        return _Done()

    def exchange(self, received: Tensor, sent: Tensor) -> Collective:
        received.copy_(sent)
        return _Done()

    def collect(self, gathered: Tensor, own: Tensor) -> Collective:
        gathered[0].copy_(own)
        return _Done()

    def confirm(self) -> None:
        return None

    def twin(self) -> SingleReplica:
        return self

    def __repr__(self) -> str:
        return "SingleReplica()"


class ProcessEnsemble:
    """The processes of a ``torch.distributed`` group, each of them one replica (default: the default group).

    Args:
        process_group: a group, a 1-D ``DeviceMesh`` (``mesh["replicate"]``), or a 2-D one, (replicate, shard) as
            ``fully_shard`` takes it: then a replica is held by all processes along the second dimension, each of which
            averages its shards with those at its place in the other replicas.
        shard_group: the processes that hold this replica together, if it is not a mesh that says so.
        overlap_group: the same processes as ``process_group``, connected once more, for averages that run beside the
            training. Default: made when first needed.
    """

    rows = 1
    talks = True

    def __init__(
        self,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        shard_group: dist.ProcessGroup | None = None,
        overlap_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "ProcessEnsemble needs an initialised process group: start the script with torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        if isinstance(process_group, DeviceMesh):
            if shard_group is not None:
                raise ValueError("pass a mesh, or two groups, not both: a 2-D mesh (replicate, shard) says all")
            process_group, shard_group = _groups_of(process_group)
        self.group, self.shard_group, self.overlap_group = process_group, shard_group, overlap_group
        self.size = self.processes = dist.get_world_size(process_group)
        self.replica = self.process = dist.get_rank(process_group)
        if self.replica < 0:
            raise ValueError("this process is not a member of the given process group")
        self.part = 0 if shard_group is None else dist.get_rank(shard_group)
        self.parts = 1 if shard_group is None else dist.get_world_size(shard_group)
        self.rank = dist.get_rank()
        # "gloo" serves every device, "nccl" CUDA alone, and a default group on a GPU machine may have one for each.
        config = dist.get_backend_config(process_group)
        self.backends = dict(entry.split(":") for entry in config.split(",") if ":" in entry)
        self._timeout = _timeout(process_group)

    def serves(self, device: torch.device) -> bool:
        """Whether tensors there can travel."""
        return device.type in self.backends

    def gather(self, rows: Tensor) -> Tensor:
        row = rows.detach().reshape(-1).to(self._control_device())
        if self.shard_group is not None:
            row = self._gathered(row, self.shard_group, self.parts).reshape(-1)
        return self._gathered(row, self.group, self.size).cpu().view(self.size, self.parts, -1)

    def averages(self, device: torch.device) -> bool:
        return self.backends.get(device.type) == "nccl"

    def all_reduce(self, tensor: Tensor, operation: str) -> Collective:
        kind = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}[operation]
        return self._started(dist.all_reduce(tensor, op=kind, group=self.group, async_op=True), tensor)

    def broadcast(self, tensor: Tensor, replica: int) -> Collective:
        return self._started(dist.broadcast(tensor, group=self.group, group_src=replica, async_op=True), tensor)

    def exchange(self, received: Tensor, sent: Tensor) -> Collective:
        return self._started(dist.all_to_all_single(received, sent, group=self.group, async_op=True), sent)

    def collect(self, gathered: Tensor, own: Tensor) -> Collective:
        return self._started(_all_gather(gathered.view(-1), own.view(-1), group=self.group, async_op=True), own)

    def confirm(self) -> None:
        if self.shard_group is not None:
            self._gathered(torch.zeros(1, device=self._control_device()), self.shard_group, self.parts).cpu()

    def twin(self) -> ProcessEnsemble:
        group = self._again(self.group, self.overlap_group)
        return ProcessEnsemble(group, shard_group=self.shard_group and self._again(self.shard_group))

    def ranks(self) -> list[int]:
        """The global ranks of the processes that hold this part."""
        return dist.get_process_group_ranks(self.group)

    def _started(self, work: dist.Work | None, tensor: Tensor) -> Collective:
        if work is None:
            return _Done()
        # NCCL's wait() orders streams and returns; with a timeout it waits, and raises if the collective failed.
        return _Awaited(work, self._timeout) if self.backends.get(tensor.device.type) == "nccl" else work

    def _again(self, group: dist.ProcessGroup | None, given: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
        """A group of the same processes in the same order, with the same backend and timeout."""
        ranks = dist.get_process_group_ranks(group)
        if given is not None:
            if dist.get_process_group_ranks(given) != ranks:
                raise ValueError(
                    f"overlap_group has ranks {dist.get_process_group_ranks(given)}, the group that it doubles {ranks}"
                )
            return given
        remedy = "make one yourself, dist.new_group() on all ranks, and pass it to ProcessEnsemble(overlap_group=…)"
        options: dict[str, Any] = {"timeout": _timeout(group), "backend": dist.get_backend_config(group)}
        if ranks == list(range(dist.get_world_size())):
            made: dist.ProcessGroup = dist.new_group(ranks, **options)
            return made
        if ranks != sorted(ranks):
            raise RuntimeError(f"torch cannot double a group whose ranks are not in order, {ranks}; {remedy}")
        # Its members alone make the group, and torch names it by how many groups each of them knows.
        known = self._gathered(
            torch.tensor([float(len(_known_groups()))], device=self._control_device()), group, len(ranks)
        )
        if (known != known[0]).any():
            raise RuntimeError(
                f"an average beside the training needs a group of its own, and torch cannot make it for ranks {ranks}: "
                f"they belong to {known.flatten().int().tolist()} groups each, which has to be one number; {remedy}"
            )
        made = dist.new_group(ranks, **options, use_local_synchronization=True)
        return made

    def _gathered(self, row: Tensor, group: dist.ProcessGroup | None, count: int) -> Tensor:
        rows = torch.empty(count, row.numel(), dtype=row.dtype, device=row.device)
        _all_gather(rows.view(-1), row, group=group)
        return rows

    def _control_device(self) -> torch.device:
        return torch.device("cpu") if "cpu" in self.backends else torch.device("cuda", torch.cuda.current_device())

    def __repr__(self) -> str:
        shards = f", shard of {self.parts}" if self.parts > 1 else ""
        return f"ProcessEnsemble(replica {self.replica} of {self.size}{shards}, {self.backends})"


class RowEnsemble:
    """``rows`` replicas in this process, as the rows of its tensors, and as many in each process of ``among``."""

    part = 0
    parts = 1

    def __init__(self, rows: int, among: Ensemble | None = None) -> None:
        if rows < 1:
            raise ValueError(f"an ensemble of rows needs at least one, got rows={rows}")
        among = SingleReplica() if among is None else among
        if among.rows != 1 or among.parts != 1:
            raise ValueError(f"rows can be spread over processes that hold one whole replica each, not over {among}")
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

    def confirm(self) -> None:
        return None

    def twin(self) -> RowEnsemble:
        return RowEnsemble(self.rows, self.among.twin())

    def __repr__(self) -> str:
        return f"RowEnsemble({self.rows} rows, {self.among})"


def held(ensemble: Ensemble) -> slice:
    """Which of all replicas this process holds."""
    return slice(ensemble.replica, ensemble.replica + ensemble.rows)


def default_ensemble() -> Ensemble:
    """The default process group if it is initialised and has several processes, else a single replica."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return ProcessEnsemble()
    return SingleReplica()


class _Done:
    """A collective of one."""

    def wait(self) -> None:
        return None


class _Awaited:
    """A collective whose end the host waits for."""

    def __init__(self, work: dist.Work, timeout: datetime.timedelta | None) -> None:
        self._work, self._timeout = work, timeout

    def wait(self) -> Any:
        return self._work.wait() if self._timeout is None else self._work.wait(self._timeout)


def _groups_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    if mesh.ndim == 1:
        return mesh.get_group(), None
    if mesh.ndim == 2:
        return mesh.get_group(0), mesh.get_group(1)
    raise ValueError(
        f"a mesh of replicas has one dimension, or two (replicate, shard); this one has {mesh.ndim}: pass the "
        "dimensions that are meant, as in mesh['replicate', 'shard']"
    )


def _known_groups() -> Any:
    return dist.distributed_c10d._world.pg_names


def _timeout(group: dist.ProcessGroup | None) -> datetime.timedelta | None:
    known = dist.group.WORLD if group is None else group
    devices = known._device_types if known is not None else []
    options = [getattr(known._get_backend(device), "options", None) for device in devices]  # type: ignore[union-attr]
    found = [option._timeout for option in options if option is not None]
    return min(found) if found else None
