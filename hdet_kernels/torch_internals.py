"""Every private name of torch that this package uses, with the versions it was seen in and what happens without it.

Nothing else in the package touches a private name of torch. A function here takes and returns public things, so that a
new version of torch that moves a name is answered in this file alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
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


def times_written(tensor: Tensor) -> int:
    """Return how often a tensor was written in place: ``Tensor._version``, in torch 2.11 to 2.13.

    Without it a scheduler step too many is noticed only once several follow each other.
    """
    return int(tensor._version)


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
