"""Let replicas train on their own gradients for a while, where they otherwise share one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet_kernels.ensemble import Ensemble
from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.stack import ReplicaStack, StackEnsemble


class OwnGradients:
    """The switch between shared gradients and those of each replica.

    A stack computes one gradient for each of its replicas, and its optimizer has moments for each of them, until
    :meth:`end`. Under DDP gradients are not averaged over the processes meanwhile. Replicas whose gradients are local
    anyway are left alone.

    Args:
        optimizer: the optimizer.
        ensemble: the replicas.
        model: the user's ``model=``. DDP wrappers are looked for in it.
        gradients: ``"shared"``, ``"local"`` or ``"auto"``, as the user said.

    Raises:
        ValueError: gradients are averaged by something that cannot be switched off.
    """

    def __init__(self, optimizer: Optimizer, ensemble: Ensemble, model: object, gradients: str) -> None:
        self.optimizer = optimizer
        stack = ensemble.stack if isinstance(ensemble, StackEnsemble) else None
        self._stack: ReplicaStack | None = stack if stack is not None and stack.gradients == "shared" else None
        found = model.modules() if isinstance(model, nn.Module) and stack is None else ()
        self._wrappers = [module for module in found if isinstance(module, DistributedDataParallel)]
        self._synced: list[bool] = []
        self._on = False
        #: Whether the replicas of a stack had one state for all before.
        self.shared_state = False
        self.certain = stack is not None or bool(self._wrappers)
        if not self.certain:
            _check_can_differ(optimizer, gradients)

    def begin(self) -> None:
        """Switch to the replicas' own gradients."""
        if self._on:
            return
        self._on = True
        self._synced = [wrapper.require_backward_grad_sync for wrapper in self._wrappers]
        for wrapper in self._wrappers:
            wrapper.require_backward_grad_sync = False
        if self._stack is not None:
            self._stack.own_gradients(True)
            self.shared_state = self._fused.shares_state
            self._fused.separate_state()

    def end(self) -> None:
        """Switch back. The state of a stack's first replica becomes that of all, if they shared one before."""
        if not self._on:
            return
        self._on = False
        for wrapper, synced in zip(self._wrappers, self._synced, strict=True):
            wrapper.require_backward_grad_sync = synced
        if self._stack is not None:
            self._stack.own_gradients(False)
            self.share_state()

    def take_over(self, other: OwnGradients) -> None:
        """Go on in the place of another one for the same optimizer and model, without switching back in between."""
        self._on, self._synced, self.shared_state = other._on, other._synced, other.shared_state
        other._on = False

    def share_state(self) -> None:
        """Give the replicas of a stack one state again, if they had one: so it is copied and restored."""
        if self._stack is not None and self.shared_state:
            self._fused.share_state()

    def separate_state(self) -> None:
        """Give every replica of a stack a state of its own again."""
        if self._stack is not None:
            self._fused.separate_state()

    @property
    def _fused(self) -> FusedOptimizer:
        assert isinstance(self.optimizer, FusedOptimizer)  # a scheduler refuses others for a stack
        return self.optimizer


def differ(fingerprints: NDArray[np.float64]) -> bool | None:
    """Return whether replicas have gradients of their own; None if that cannot be told from these.

    Args:
        fingerprints: a number for each replica that is equal where gradients are equal.

    Raises:
        RuntimeError: all replicas have the same gradient.
    """
    if not np.isfinite(fingerprints).all() or not fingerprints.any():
        return None
    if (fingerprints != fingerprints[0]).any():
        return True
    raise RuntimeError(
        "max_lr=None compares learning rates on every replica's own gradients, but all replicas have the same one: "
        "pass the DistributedDataParallel model as model=, so that the scheduler can switch its averaging off for that "
        "time; if every process computes the same batch, give each its own; or pass a learning rate"
    )


def _check_can_differ(optimizer: Optimizer, gradients: str) -> None:
    """Raise ValueError if it is known that gradients are averaged, and not known by what."""
    remedy = "pass max_lr, or train on a ReplicaStack or under DistributedDataParallel with model="
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if any(placement.is_replicate() for placement in _placements(param)):
            raise ValueError(
                "max_lr=None compares learning rates on every replica's own gradients, but fully_shard over a mesh "
                f"(replicate, shard) averages them over the replicas in the backward pass: {remedy}"
            )
    if gradients == "shared":
        raise ValueError(
            "max_lr=None compares learning rates on every replica's own gradients, got gradients='shared' and no "
            f"DistributedDataParallel in model= whose averaging could be switched off meanwhile: {remedy}"
        )


def _placements(param: Any) -> Any:
    mesh = getattr(param, "device_mesh", None)
    return () if mesh is None or mesh.ndim < 2 else param.placements
