"""The ensemble where none is given: the default process group, or a single replica."""

from __future__ import annotations

import os

import torch.distributed as dist

from hdet_kernels.ensemble.processes import ProcessEnsemble
from hdet_kernels.ensemble.protocol import Ensemble
from hdet_kernels.ensemble.single import SingleReplica


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
