"""Ensembles: which process holds which replica, and the collectives between them.

An ensemble has N replicas. A process holds one replica, or several as the rows of its tensors
(:class:`RowEnsemble`). Or several processes hold one replica together, each a shard of its parameters. The processes
that hold the same part of different replicas communicate through a ``torch.distributed`` group
(:class:`ProcessEnsemble`).
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import os
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hdet_kernels.checks import check_whole, spell
from hdet_kernels.row_gather import gather_by_doubling, gather_by_sum

# torch 2.13 renamed it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Of the messages of a gather, which must not be taken for those of a training script.
_TAG = 0x4844
# Tags of messages between single processes. Others on the same group usually have small ones.
_FIRST_TAG, _TAGS = 2**28, 2**20


class Collective(Protocol):
    """A collective operation that has been started."""

    def wait(self) -> Any:
        """Wait until the result can be used. Raises if the collective failed.

        On a CPU the result is there when this returns. On a GPU the current stream waits for it.
        """


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

    def confirm(self) -> None:
        """Wait until all processes that hold parts of these replicas have called this.

        It makes an average all or nothing: either all parts of a replica are averaged or none is.
        """

    def twin(self) -> Ensemble:
        """Return the same replicas with process groups of their own, for collectives that run in the background."""


@runtime_checkable
class Trading(Protocol):
    """An ensemble whose processes can also pass tensors to single other processes. Optional."""

    process: int
    processes: int

    def trades(self, device: torch.device) -> bool:
        """Return whether :meth:`trade` takes tensors on ``device``. The same on all processes."""

    def trade(self, sent: Sequence[Tensor | None], received: Sequence[Tensor | None]) -> Collective:
        """Start to send ``sent[p]`` to each other process p, and to receive ``received[p]`` from it. Collective.

        The entries of this process are ignored. None, on both sides, and empty tensors are not sent.
        """


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
    """The processes of a ``torch.distributed`` group, each of which holds one replica or a shard of one.

    Args:
        process_group: a group (default: the default group), a 1-D ``DeviceMesh`` (``mesh["replicate"]``), or a 2-D one,
            (replicate, shard) as ``fully_shard`` takes it. With a 2-D mesh the processes along the second dimension
            hold one replica together, and each averages its shards with the same shards of the other replicas.
        shard_group: the processes that hold this replica together. A 2-D mesh already defines them.
        overlap_group: a second group of the same processes as ``process_group``, for overlapped averages. Default:
            made when first needed.
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
        _check_groups(process_group, shard_group, overlap_group)
        if isinstance(process_group, DeviceMesh):
            if shard_group is not None:
                raise ValueError(
                    "pass a mesh or two groups, not both: a 2-D mesh (replicate, shard) defines both groups"
                )
            process_group, shard_group = _groups_of(process_group)
        self.group, self.shard_group, self.overlap_group = process_group, shard_group, overlap_group
        self.size = self.processes = dist.get_world_size(process_group)
        self.replica = self.process = dist.get_rank(process_group)
        if self.replica < 0:
            raise ValueError("this process is not a member of the given process group")
        self.part = 0 if shard_group is None else dist.get_rank(shard_group)
        self.parts = 1 if shard_group is None else dist.get_world_size(shard_group)
        self.rank = dist.get_rank()
        # By device: gloo serves all, NCCL only CUDA, and a default group on a GPU machine may have one for each.
        config = dist.get_backend_config(process_group)
        self.backends = dict(entry.split(":") for entry in config.split(",") if ":" in entry)
        self._timeout = _timeout(process_group)
        # The threads of gloo let go of a collective's tensors some time after it is done. The last to let go frees the
        # Python object, and a thread that does so while the interpreter is ending aborts the process. So the tensors of
        # the latest collective are kept, and never freed once the process ends.
        self._kept: tuple[Tensor, ...] = ()
        _ENSEMBLES.add(self)
        self._trades = 0

    def serves(self, device: torch.device) -> bool:
        return device.type in self.backends

    def gather(self, rows: Tensor) -> Tensor:
        row = rows.detach().reshape(-1).to(self._gather_device())
        gathered = self._gathered(row, self.group, self.size)
        if self.shard_group is not None:
            # Last, because it multiplies the bytes and the processes of a replica are near each other.
            gathered = self._gathered(gathered.reshape(-1), self.shard_group, self.parts)
        return gathered.cpu().view(self.parts, self.size, -1).transpose(0, 1).contiguous()

    def averages(self, device: torch.device) -> bool:
        return self.backends.get(device.type) == "nccl"

    def all_reduce(self, tensor: Tensor, operation: str) -> Collective:
        kind = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}[operation]
        return self._started(dist.all_reduce(tensor, op=kind, group=self.group, async_op=True), tensor)

    def broadcast(self, tensor: Tensor, replica: int) -> Collective:
        return self._started(dist.broadcast(tensor, group=self.group, group_src=replica, async_op=True), tensor)

    def exchange(self, received: Tensor, sent: Tensor) -> Collective:
        return self._started(dist.all_to_all_single(received, sent, group=self.group, async_op=True), sent, received)

    def collect(self, gathered: Tensor, own: Tensor) -> Collective:
        whole, part = gathered.view(-1), own.view(-1)
        return self._started(_all_gather(whole, part, group=self.group, async_op=True), part, whole)

    def trades(self, device: torch.device) -> bool:
        """Return whether tensors on ``device`` can be passed between single processes: those of a CPU over gloo."""
        return device.type == "cpu" and self.backends.get("cpu") == "gloo"

    def trade(self, sent: Sequence[Tensor | None], received: Sequence[Tensor | None]) -> Collective:
        """Start to send a tensor to every process and to receive one from each; see :class:`Trading`."""
        self._trades += 1
        tag = _FIRST_TAG + self._trades % _TAGS  # a late message of a failed trade is not taken for one of the next
        works: list[dist.Work | None] = []
        for distance in range(1, self.processes):
            source, target = (self.process - distance) % self.processes, (self.process + distance) % self.processes
            if (place := received[source]) is not None and place.numel():
                works.append(dist.irecv(place, group=self.group, group_src=source, tag=tag))
            if (tensor := sent[target]) is not None and tensor.numel():
                works.append(dist.isend(tensor, group=self.group, group_dst=target, tag=tag))
        return _Traded(works, _timeout(self.group))  # that of now: a message does not ask for it as a collective does

    def confirm(self) -> None:
        if self.shard_group is not None:
            self._gathered(torch.zeros(1, device=self._gather_device()), self.shard_group, self.parts).cpu()

    def twin(self) -> ProcessEnsemble:
        group = self._again(self.group, self.overlap_group)
        return ProcessEnsemble(group, shard_group=self.shard_group and self._again(self.shard_group))

    def ranks(self) -> list[int]:
        """Return the global ranks of the processes that hold this part."""
        return dist.get_process_group_ranks(self.group)

    def members(self) -> list[int]:
        """Return the global ranks that this process waits for in a sync: those with this part and this replica."""
        shards = [] if self.shard_group is None else dist.get_process_group_ranks(self.shard_group)
        return sorted({*self.ranks(), *shards})

    @property
    def name(self) -> str:
        """A name of these processes that is the same on all members."""
        group = dist.group.WORLD if self.group is None else self.group
        return "mesh" if self.shard_group is not None or group is None else str(group.group_name)

    @property
    def seconds(self) -> float | None:
        """The timeout of the group in seconds, if it is known."""
        return None if self._timeout is None else self._timeout.total_seconds()

    def _started(self, work: dist.Work | None, *tensors: Tensor) -> Collective:
        if work is None:
            return _Done()
        # NCCL's wait() only orders streams. With a timeout it waits, and raises if the collective failed.
        if self.backends.get(tensors[0].device.type) == "nccl":
            return _Awaited(work, self._timeout)
        self._kept = tensors
        return work

    def _again(self, group: dist.ProcessGroup | None, given: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
        """Return ``given`` or else a new group of the same processes in the same order, same backend and timeout."""
        ranks = dist.get_process_group_ranks(group)
        if given is not None:
            if dist.get_process_group_ranks(given) != ranks:
                raise ValueError(
                    f"overlap_group has ranks {dist.get_process_group_ranks(given)}, process_group has {ranks}: pass "
                    "a second group of the same ranks in the same order"
                )
            return given
        remedy = "call dist.new_group() on all ranks and pass the group as ProcessEnsemble(overlap_group=…)"
        options: dict[str, Any] = {"timeout": _timeout(group), "backend": dist.get_backend_config(group)}
        if ranks == list(range(dist.get_world_size())):
            made: dist.ProcessGroup = dist.new_group(ranks, **options)
            return made
        if ranks != sorted(ranks):
            raise RuntimeError(f"torch cannot make a second group of ranks that are not in order, {ranks}; {remedy}")
        # Only the members make the group, and torch names it by the number of groups that a process knows.
        known = self._gathered(
            torch.tensor([float(len(_known_groups()))], device=self._gather_device()), group, len(ranks)
        )
        if (known != known[0]).any():
            raise RuntimeError(
                f"an overlapped average needs a second process group, which torch cannot make for ranks {ranks}: they "
                f"belong to {known.flatten().int().tolist()} groups, and the numbers must be equal; {remedy}"
            )
        made = dist.new_group(ranks, **options, use_local_synchronization=True)
        return made

    def _gathered(self, row: Tensor, group: dist.ProcessGroup | None, count: int) -> Tensor:
        place = dist.get_rank(group)
        if row.device.type != "cpu":
            return gather_by_sum(row, place, count, lambda table: dist.all_reduce(table, group=group))

        timeout = _timeout(group)

        def exchange(sent: Tensor, to: int, received: Tensor, source: int) -> None:
            started = [
                dist.irecv(received, group=group, group_src=source, tag=_TAG),
                dist.isend(sent, group=group, group_dst=to, tag=_TAG),
            ]
            _Traded(started, timeout).wait()

        return gather_by_doubling(row, place, count, exchange)

    def _gather_device(self) -> torch.device:
        return torch.device("cpu") if "cpu" in self.backends else torch.device("cuda", torch.cuda.current_device())

    def __repr__(self) -> str:
        shards = f", shard of {self.parts}" if self.parts > 1 else ""
        return f"ProcessEnsemble(replica {self.replica} of {self.size}{shards}, {self.backends})"


_ENSEMBLES: weakref.WeakSet[ProcessEnsemble] = weakref.WeakSet()


@atexit.register
def _keep_for_good() -> None:
    """Keep the tensors of the latest collectives from being freed while the interpreter ends."""
    for ensemble in _ENSEMBLES:
        for tensor in ensemble._kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))


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


#: Attributes and methods that every use of an ensemble needs.
_MEMBERS = ("size", "replica", "rows", "part", "parts", "processes", "process", "talks", "rank", "gather", "serves")


def check_ensemble(name: str, value: object, members: Sequence[str] = _MEMBERS) -> None:
    """Raise TypeError unless ``value`` has the attributes and methods of an :class:`Ensemble`.

    Args:
        name: how the message names the argument.
        value: what was given.
        members: those that are needed.
    """
    missing = [member for member in members if not hasattr(value, member)]
    if missing or isinstance(value, type):
        wraps = isinstance(value, dist.ProcessGroup | DeviceMesh)
        remedy = (
            "pass hdet_kernels.ProcessEnsemble(…) of it"
            if wraps
            else "pass a ProcessEnsemble, stack.ensemble of a ReplicaStack, or leave it out"
        )
        raise TypeError(f"{name} must be an ensemble, which says who the replicas are, got {spell(value)}: {remedy}")


def _check_groups(process_group: object, shard_group: object, overlap_group: object) -> None:
    outside = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() returns to processes that are not in the group
    for name, group in (
        ("process_group", process_group),
        ("shard_group", shard_group),
        ("overlap_group", overlap_group),
    ):
        kinds = (dist.ProcessGroup, DeviceMesh) if name == "process_group" else (dist.ProcessGroup,)
        if group is not None and group != outside and not isinstance(group, kinds):
            expected = " or a torch.distributed.DeviceMesh" * (len(kinds) > 1)
            raise TypeError(
                f"{name} must be a torch.distributed process group{expected}, got {spell(group)}: pass what "
                "torch.distributed.new_group() returned, or leave it out"
            )


def held(ensemble: Ensemble) -> slice:
    """Return the slice of all replicas that this process holds."""
    return slice(ensemble.replica, ensemble.replica + ensemble.rows)


def default_ensemble() -> Ensemble:
    """Return the default process group if it is initialised and has several processes, else a single replica."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return ProcessEnsemble()
    return SingleReplica()


def announced_size() -> int:
    """Return the number of processes that the launcher of this one announced (``WORLD_SIZE``); 1 if none."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1


def settled_ensemble(user: str) -> Ensemble:
    """Return the default ensemble for ``user``, which needs to know at once who the replicas are.

    Raises:
        RuntimeError: if a launcher announced several processes and their group is not initialised yet.
    """
    size = announced_size()
    if size > 1 and dist.is_available() and not dist.is_initialized():
        raise RuntimeError(
            f"{user}: WORLD_SIZE is {size} in the environment, but no process group is initialised, so that each "
            "process would count as the only one; call torch.distributed.init_process_group() before, or pass "
            "ensemble=hdet_kernels.ensemble.SingleReplica() if every process is to train for itself"
        )
    return default_ensemble()


class _Done:
    """A collective that has finished."""

    def wait(self) -> None:
        return None


class _Traded:
    """Messages to and from single processes; :meth:`wait` waits for all of them."""

    def __init__(self, works: Sequence[dist.Work | None], timeout: datetime.timedelta | None) -> None:
        self._works, self._timeout = works, timeout

    def wait(self) -> None:
        for work in self._works:
            if work is not None and not (work.wait() if self._timeout is None else work.wait(self._timeout)):
                raise RuntimeError("a message to or from another process was aborted: its process group was shut down")


class _Awaited:
    """A collective whose :meth:`wait` blocks the host until it has finished."""

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
        f"the mesh must have one dimension, or two (replicate, shard), got {mesh.ndim}: pass a submesh, as in "
        "mesh['replicate', 'shard']"
    )


def _known_groups() -> Any:
    return dist.distributed_c10d._world.pg_names


def _timeout(group: dist.ProcessGroup | None) -> datetime.timedelta | None:
    known = dist.group.WORLD if group is None else group
    devices = known._device_types if known is not None else []
    options = [getattr(known._get_backend(device), "options", None) for device in devices]  # type: ignore[union-attr]
    found = [option._timeout for option in options if option is not None]
    return min(found) if found else None
