"""Every private name of torch that this package uses, with the versions it was seen in and what happens without it.

Nothing else in the package touches a private name of torch. A function here takes and returns public things, so that a
new version of torch that moves a name is answered in this file alone.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils import _pytree

Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function) -> Function:
    """Return ``function`` as one that torch.compile runs as it is: ``torch._disable_dynamo``, in torch 2.11 to 2.13.

    The public ``torch.compiler.disable`` takes its place without it. That imports the compiler, which takes seconds,
    when the function is defined; this one when it is first called.
    """
    disable: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)
    decorated: Function = disable(function)
    return decorated


#: Returns how often a tensor was written in place: ``Tensor._version``, in torch 2.11 to 2.13. Without it a scheduler
#: step too many is noticed only once several follow each other.
times_written: Callable[[Tensor], int] = attrgetter("_version")


def after_backward(call: Callable[[], None]) -> bool:
    """Call ``call`` at the end of the backward pass that runs in this thread; return whether there is one.

    ``Variable._execution_engine.queue_callback``, in torch 2.11 to 2.13, by which FSDP2 waits for its gradients.
    Without it a change of the gradient that came last is not noticed.
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(call)
    except (RuntimeError, AttributeError):
        return False
    return True


def one_cycle_peak(scheduler: OneCycleLR) -> float:
    """Return the share of the run at which a OneCycleLR peaks: its ``_schedule_phases``, in torch 2.11 to 2.13.

    Without them the peak is torch's default for ``pct_start``.
    """
    phases = getattr(scheduler, "_schedule_phases", None)
    return float((phases[0]["end_step"] + 1) / scheduler.total_steps) if phases else 0.3


def last_lr(scheduler: LRScheduler) -> Any:
    """Return the list itself that ``get_last_lr()`` copies: ``LRScheduler._last_lr``, in torch 2.11 to 2.13."""
    return scheduler._last_lr


def set_last_lr(scheduler: LRScheduler, rates: Any) -> None:
    """Let ``get_last_lr()`` return other values until the next step: ``LRScheduler._last_lr``, in torch 2.11 to 2.13.

    Without it the trainer of transformers would log the learning rate of this replica in the place of the base.
    """
    scheduler._last_lr = rates


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of a sparse tensor that need not be coalesced.

    ``Tensor._indices`` and ``_values``, in torch 2.11 to 2.13; ``indices`` and ``values`` are for coalesced tensors.
    Without them every sparse gradient would have to be coalesced first, which sums equal rows in any order.
    """
    return tensor._indices(), tensor._values()


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested tuples, lists, dicts and registered classes, and their structure.

    ``torch.utils._pytree`` (2.11–2.13) has no public name, and is where users' classes are registered. Without it only
    tuples, lists and dicts could be taken apart.
    """
    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], structure: Any) -> Any:
    """Return the tree of ``leaves`` with a ``structure`` that :func:`tree_flatten` gave."""
    return _pytree.tree_unflatten(leaves, structure)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside of ``torch.compile``'s, or the module itself: ``_orig_mod``, in torch 2.11 to 2.13.

    Without it a probe runs through the wrapper of a compiled ``DistributedDataParallel``, which synchronises buffers.
    """
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


# Process groups (torch.distributed)


def group_timeout(group: dist.ProcessGroup | None) -> datetime.timedelta | None:
    """Return the timeout that a process group, or the default one, has now: that of its backends, the shortest.

    ``ProcessGroup._device_types``, ``_get_backend`` and the options' ``_timeout``, in torch 2.11 to 2.13. Without them
    it is not known, and torch's own timeout ends a wait.
    """
    known: Any = dist.group.WORLD if group is None else group
    try:
        options = [getattr(known._get_backend(device), "options", None) for device in known._device_types]
        return min((option._timeout for option in options if option is not None), default=None)
    except AttributeError:
        return None


def has_comm_hook(wrapper: DistributedDataParallel) -> bool:
    """Return whether a DDP model has a communication hook: its ``_comm_hooks``, in torch 2.11 to 2.13.

    Without it there is none, and registering a second one raises torch's own error.
    """
    return bool(getattr(wrapper, "_comm_hooks", ()))


def groups_known() -> int:
    """Return how many process groups this process knows, by which torch names the next: ``_world``, in 2.11 to 2.13.

    Without it processes that know different groups would wait for each other when a group of some is made.
    """
    return len(dist.distributed_c10d._world.pg_names)


def default_store() -> Any:
    """Return the store of the default process group: ``_get_default_store``, in torch 2.11 to 2.13.

    Without it an error of a collective names no missing ranks.
    """
    return dist.distributed_c10d._get_default_store()


# Distributed tensors and FSDP2 (fully_shard)

#: The part of a DTensor in this process, the object itself: ``_local_tensor``, in torch 2.11 to 2.13. Without it
#: optimizers refuse distributed parameters; the public ``to_local()`` returns another object over the same memory.
local_part: Callable[[Any], Tensor] = attrgetter("_local_tensor")

#: How a DTensor is distributed, the object itself: ``_spec``, in torch 2.11 to 2.13. Without it gradients are compared
#: one by one with their parameters.
distribution: Callable[[Any], Any] = attrgetter("_spec")


def set_local_part(tensor: Any, part: Tensor) -> None:
    """Let a DTensor hold ``part`` in this process; see :data:`local_part`."""
    tensor._local_tensor = part


@dataclass(frozen=True)
class ShardRecord:
    """FSDP's record of one sharded parameter: ``FSDPParam``, in torch 2.11 to 2.13; see :func:`fsdp_groups`."""

    record: Any

    @property
    def param(self) -> Tensor:
        """The parameter, a DTensor."""
        found: Tensor = self.record.sharded_param
        return found

    @property
    def padded(self) -> int:
        """The number of elements that are sent: those of the largest shard."""
        return int(self.record._sharded_param_data.numel())

    @property
    def pinned(self) -> bool:
        """Whether FSDP keeps the shard in pinned memory of the CPU."""
        return bool(self.record.pin_memory)

    def gather_from(self, memory: Tensor) -> None:
        """Let FSDP send ``memory``: 1-D, of :attr:`padded` elements. The parameter's part must be its beginning."""
        self.record._sharded_param_data = memory


def fsdp_groups() -> list[tuple[list[ShardRecord], Callable[[], None]]]:
    """Return all groups of parameters of FSDP2 in this process; none if it is not in use.

    Of each there are the records of its parameters, and a function that frees the gathered ones: ``FSDPParamGroup``, in
    torch 2.11 to 2.13.

    The groups are known to the modules, and an optimizer has parameters only. ``_module_state_mapping`` of
    ``torch.distributed._composable_state`` has all modules, in torch 2.11 to 2.13. Without it optimizers refuse
    parameters that FSDP shards.
    """
    if "torch.distributed.fsdp._fully_shard" not in sys.modules:
        return []
    try:
        modules = sys.modules["torch.distributed._composable_state"]._module_state_mapping
        states = [state for reference in list(modules.values()) if (state := reference()) is not None]
        groups = {id(group): group for state in states for group in _groups_of(state)}
        for group in groups.values():
            _ = [record.sharded_param for record in group.fsdp_params]
    except (AttributeError, KeyError) as error:
        raise RuntimeError(
            f"torch {torch.__version__} does not keep sharded parameters where this version of hdet_kernels looks for "
            f"them ({error}): use torch 2.11 to 2.13 with fully_shard"
        ) from error
    return [([ShardRecord(record) for record in group.fsdp_params], group.reshard) for group in groups.values()]


def _groups_of(state: Any) -> list[Any]:
    """Return FSDP's groups of parameters of one module; none for the state of another wrapper."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = getattr(state, "_fsdp_param_group", None)  # torch 2.11 and before have one for each module
    return [] if group is None else [group]
