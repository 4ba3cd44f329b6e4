"""The memory from which FSDP2 (``fully_shard``) gathers parameters.

FSDP keeps the shard of a parameter as a DTensor, and a second tensor over the same memory: flat, and padded to the
length of the largest shard. That one is sent when the parameter is gathered, so both must move together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.sharded.dtensors import is_distributed


class GatheredShard:
    """FSDP's record of one sharded parameter."""

    def __init__(self, record: Any) -> None:
        self._record = record

    @property
    def padded(self) -> int:
        """The number of elements that are sent: those of the largest shard."""
        return int(self._record._sharded_param_data.numel())

    @property
    def pinned(self) -> bool:
        """Whether FSDP keeps the shard in pinned memory of the CPU."""
        return bool(self._record.pin_memory)

    def gather_from(self, memory: Tensor) -> None:
        """Let FSDP send ``memory``: 1-D, of :attr:`padded` elements. The parameter's part must be its beginning."""
        self._record._sharded_param_data = memory


def gathered_shards(params: Sequence[Tensor]) -> dict[int, GatheredShard]:
    """Return FSDP's record of each parameter that it shards, by the ``id`` of the parameter.

    Raises:
        RuntimeError: if this version of torch keeps its records elsewhere.
    """
    wanted = set(map(id, params))
    return {
        id(record.sharded_param): GatheredShard(record)
        for group in _groups_of(params)
        for record in group.fsdp_params
        if id(record.sharded_param) in wanted
    }


def drop_gathered(params: Sequence[Tensor]) -> None:
    """Have FSDP gather parameters anew at the next forward pass, because their shards were written.

    A forward pass without a backward pass leaves the parameters of the root module gathered, and the next one would
    use these: after an evaluation, the values from before an average.
    """
    for group in _groups_of(params):
        group.reshard()


def _groups_of(params: Sequence[Tensor]) -> list[Any]:
    """Return FSDP's groups that have one of ``params``."""
    wanted = {id(param) for param in params if is_distributed(param)}
    if not wanted or "torch.distributed.fsdp._fully_shard" not in sys.modules:
        return []
    try:
        # The groups are known to the modules, and an optimizer has parameters only. All modules are in this mapping.
        modules = sys.modules["torch.distributed._composable_state"]._module_state_mapping
        states = [state for reference in list(modules.values()) if (state := reference()) is not None]
        groups = {id(group): group for state in states for group in _groups(state)}
        return [group for group in groups.values() if any(id(r.sharded_param) in wanted for r in group.fsdp_params)]
    except (AttributeError, KeyError) as error:
        raise RuntimeError(
            f"torch {torch.__version__} does not keep sharded parameters where this version of hdet_kernels looks for "
            f"them ({error}): use torch 2.11 to 2.13 with fully_shard"
        ) from error


def _groups(state: Any) -> list[Any]:
    """Return FSDP's groups of parameters of one module; none for the state of another wrapper."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = getattr(state, "_fsdp_param_group", None)  # torch 2.11 and before have one for each module
    return [] if group is None else [group]
