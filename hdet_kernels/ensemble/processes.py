"""The processes of a ``torch.distributed`` group as replicas, or as the shards of replicas; the default ensemble."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hdet_kernels.checks import spell
from hdet_kernels.ensemble.protocol import Collective, Done, Ensemble
from hdet_kernels.ensemble.rows import SingleReplica
from hdet_kernels.lent import freed_before_exit
from hdet_kernels.torch_internals import group_timeout, groups_known

# torch 2.13 renamed it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# The tag of messages that are never sent. No other code is likely to use it.
_NEVER_SENT = 0x48444554


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
        self._timeout = group_timeout(process_group)

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
        return self._started(dist.all_reduce(self._lent(tensor), op=kind, group=self.group, async_op=True), tensor)

    def broadcast(self, tensor: Tensor, replica: int) -> Collective:
        work = dist.broadcast(self._lent(tensor), group=self.group, group_src=replica, async_op=True)
        return self._started(work, tensor)

    def exchange(self, received: Tensor, sent: Tensor) -> Collective:
        lent = self._lent(received), self._lent(sent)
        return self._started(dist.all_to_all_single(*lent, group=self.group, async_op=True), sent)

    def collect(self, gathered: Tensor, own: Tensor) -> Collective:
        lent = self._lent(gathered.view(-1)), self._lent(own.view(-1))
        return self._started(_all_gather(*lent, group=self.group, async_op=True), own)

    def twin(self) -> ProcessEnsemble:
        group = self._again(self.group, self.overlap_group)
        return ProcessEnsemble(group, shard_group=self.shard_group and self._again(self.shard_group))

    def team(self, first: int) -> ProcessEnsemble:
        """Return one of two halves as an ensemble of its own: the ``first`` processes, or the rest. Collective."""
        ranks = self.ranks()
        return ProcessEnsemble(self._new_group(self.group, (ranks[:first], ranks[first:])))

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
        # Processes that hold parts of one replica belong to groups of different names.
        return "mesh" if self.shard_group is not None or group is None else str(group.group_name)

    @property
    def seconds(self) -> float | None:
        """The timeout that the group has now, in seconds, if it is known."""
        timeout = group_timeout(self.group)
        return None if timeout is None else timeout.total_seconds()

    def closed(self, ranks: Sequence[int]) -> list[int]:
        """Return those of ``ranks`` whose connection to this process is closed, as after they have ended.

        Gloo refuses to receive from them, and otherwise accepts at once, here a message that nobody sends. Other
        backends say nothing about a connection.
        """
        if self.backends.get("cpu") != "gloo":
            return []
        found = set()
        for group in [self.group] if self.shard_group is None else [self.group, self.shard_group]:
            for rank in set(dist.get_process_group_ranks(group)) & set(ranks) - {self.rank}:
                try:
                    dist.irecv(torch.empty(1), src=rank, group=group, tag=_NEVER_SENT)
                except RuntimeError:
                    found.add(rank)
        return sorted(found)

    def _lent(self, tensor: Tensor) -> Tensor:
        """Return an alias of ``tensor`` for a collective, which nothing but the collective holds."""
        if self.backends.get(tensor.device.type) == "nccl":
            return tensor
        return freed_before_exit(tensor.detach())

    def _started(self, work: dist.Work | None, tensor: Tensor) -> Collective:
        if work is None:
            return Done()
        # NCCL's wait() only orders streams. With a timeout it waits, and raises if the collective failed.
        return Awaited(work, self._timeout) if self.backends.get(tensor.device.type) == "nccl" else work

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
        # torch waits the whole timeout for a rank that has ended; a gather fails at once, but not over NCCL.
        known = self._groups_known(group) if "cpu" in self.backends else None
        try:
            return self._new_group(group, (ranks,), known)
        except RuntimeError as error:
            remedy = "call dist.new_group() on all ranks and pass the group as ProcessEnsemble(overlap_group=…)"
            raise RuntimeError(f"an overlapped average needs a second process group, and {error}; {remedy}") from error

    def _groups_known(self, group: dist.ProcessGroup | None) -> list[int]:
        """Return how many groups each process of ``group`` knows. Collective."""
        row = torch.tensor([float(groups_known())], device=self._gather_device())
        found: list[int] = self._gathered(row, group, dist.get_world_size(group)).flatten().int().tolist()
        return found

    def _new_group(
        self, group: dist.ProcessGroup | None, parts: Sequence[list[int]], known: Sequence[int] | None = None
    ) -> dist.ProcessGroup:
        """Return a new group of those of the ``parts`` of ``group`` to which this process belongs. Collective.

        It has the order of processes, the backend and the timeout of ``group``. ``known``: :meth:`_groups_known`, if
        that was asked before.
        """
        options: dict[str, Any] = {"timeout": group_timeout(group), "backend": dist.get_backend_config(group)}
        ranks, whole = next(part for part in parts if self.rank in part), [rank for part in parts for rank in part]
        if whole == list(range(dist.get_world_size())):
            made = [dist.new_group(part, **options) for part in parts]
            found: dist.ProcessGroup = made[parts.index(ranks)]
            return found
        if ranks != sorted(ranks):
            raise RuntimeError(f"torch cannot make a group of ranks that are not in order, {ranks}")
        # Only the members make the group, and torch names it by the number of groups that a process knows.
        known = self._groups_known(group) if known is None else known
        if len(set(known)) > 1:
            raise RuntimeError(
                f"torch cannot make one for ranks {ranks}: they belong to {list(known)} groups, and the numbers must "
                "be equal"
            )
        found = dist.new_group(ranks, **options, use_local_synchronization=True)
        return found

    def _gathered(self, row: Tensor, group: dist.ProcessGroup | None, count: int) -> Tensor:
        """Return the rows of all processes of a group, [count, columns]."""
        gathered = row.new_empty(count * row.numel())
        lent = self._lent(gathered), self._lent(row)
        self._started(_all_gather(*lent, group=group, async_op=True), row).wait()
        return gathered.view(count, -1)

    def _gather_device(self) -> torch.device:
        return torch.device("cpu") if "cpu" in self.backends else torch.device("cuda", torch.cuda.current_device())

    def __repr__(self) -> str:
        shards = f", shard of {self.parts}" if self.parts > 1 else ""
        return f"ProcessEnsemble(replica {self.replica} of {self.size}{shards}, {self.backends})"


class Awaited:
    """A collective whose :meth:`wait` blocks the host until it has finished."""

    def __init__(self, work: dist.Work, timeout: datetime.timedelta | None) -> None:
        self._work, self._timeout = work, timeout

    def wait(self) -> Any:
        return self._work.wait() if self._timeout is None else self._work.wait(self._timeout)


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

    Raises RuntimeError if a launcher announced several processes and their group is not initialised yet.
    """
    size = announced_size()
    if size > 1 and dist.is_available() and not dist.is_initialized():
        raise RuntimeError(
            f"{user}: WORLD_SIZE is {size} in the environment, but no process group is initialised, so that each "
            "process would count as the only one; call torch.distributed.init_process_group() before, or pass "
            "ensemble=hdet_kernels.ensemble.SingleReplica() if every process is to train for itself"
        )
    return default_ensemble()


def _check_groups(process_group: object, shard_group: object, overlap_group: object) -> None:
    outside = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() returns to processes that are not in the group
    given = {"process_group": process_group, "shard_group": shard_group, "overlap_group": overlap_group}
    for name, group in given.items():
        kinds = (dist.ProcessGroup, DeviceMesh) if name == "process_group" else (dist.ProcessGroup,)
        if group is not None and group != outside and not isinstance(group, kinds):
            expected = " or a torch.distributed.DeviceMesh" * (len(kinds) > 1)
            raise TypeError(
                f"{name} must be a torch.distributed process group{expected}, got {spell(group)}: pass what "
                "torch.distributed.new_group() returned, or leave it out"
            )


def _groups_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    if mesh.ndim == 1:
        return mesh.get_group(), None
    if mesh.ndim == 2:
        return mesh.get_group(0), mesh.get_group(1)
    raise ValueError(
        f"the mesh must have one dimension, or two (replicate, shard), got {mesh.ndim}: pass a submesh, as in "
        "mesh['replicate', 'shard']"
    )
