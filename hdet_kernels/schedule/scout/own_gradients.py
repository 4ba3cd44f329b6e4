"""Let replicas train on their own gradients for a while, or in teams that share one, where all otherwise share one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet_kernels.ddp_hook import hook_of, may_have_hook
from hdet_kernels.ensemble import Ensemble, ProcessEnsemble
from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.schedule.scout.rounds import first_team
from hdet_kernels.stack import ReplicaStack, StackEnsemble


def wrappers_in(ensemble: Ensemble, model: object) -> list[DistributedDataParallel]:
    """Return the DDP wrappers of the user's ``model=``; none where the replicas are a stack."""
    found = model.modules() if isinstance(model, nn.Module) and not isinstance(ensemble, StackEnsemble) else ()
    return [module for module in found if isinstance(module, DistributedDataParallel)]


def can_form_teams(ensemble: Ensemble, model: object) -> bool:
    """Return whether the replicas share a gradient in the run, and can share it in teams instead.

    DDP has one communication hook. Where the user has given it one, there are no teams.
    """
    if isinstance(ensemble, StackEnsemble):
        alone = ensemble.processes == 1
        return ensemble.stack.gradients == "shared" and (alone or isinstance(ensemble.among, ProcessEnsemble))
    if not isinstance(ensemble, ProcessEnsemble):
        return False
    wrappers = wrappers_in(ensemble, model)
    return bool(wrappers) and all(
        dist.get_process_group_ranks(wrapper.process_group) == ensemble.ranks() and may_have_hook(wrapper)
        for wrapper in wrappers
    )


class OwnGradients:
    """The switch between shared gradients, those of each replica, and those of teams.

    A stack computes one gradient for each of its replicas, and its optimizer has moments for each of them, until
    :meth:`end`. Under DDP gradients are not averaged over the processes meanwhile, or over those of a team only, and
    buffers stay with each process. Replicas whose gradients are local anyway are left alone.

    Args:
        optimizer: the optimizer.
        ensemble: the replicas.
        model: the user's ``model=``. DDP wrappers are looked for in it.
        gradients: ``"shared"``, ``"local"`` or ``"auto"``, as the user said.
        teams: whether teams are to share gradients at some time.

    Raises:
        ValueError: gradients are averaged by something that cannot be switched off.
    """

    def __init__(
        self, optimizer: Optimizer, ensemble: Ensemble, model: object, gradients: str, *, teams: bool = False
    ) -> None:
        self.optimizer, self._ensemble = optimizer, ensemble
        stack = ensemble.stack if isinstance(ensemble, StackEnsemble) else None
        self._stack: ReplicaStack | None = stack if stack is not None and stack.gradients == "shared" else None
        self._wrappers = wrappers_in(ensemble, model)
        self._hooks = [hook_of(wrapper) for wrapper in self._wrappers] if teams else []
        self._team: ProcessEnsemble | None = None
        self._before: list[tuple[bool, bool]] = []
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
        self._before = [(each.require_backward_grad_sync, each.broadcast_buffers) for each in self._wrappers]
        for wrapper in self._wrappers:
            wrapper.require_backward_grad_sync = wrapper.broadcast_buffers = False
        if self._stack is not None:
            self._stack.own_gradients(True)
            self.shared_state = self._fused.shares_state
            self._fused.separate_state()

    def share_in_teams(self, teams: bool) -> None:
        """Let the replicas of a team share one gradient from now on, or give every replica its own again. Collective.

        Two replicas are their own teams.
        """
        if not self._on or self._ensemble.size == 2:
            return
        first = first_team(self._ensemble.size, self._ensemble.rows)
        if self._stack is not None:
            self._stack.team_gradients(first) if teams else self._stack.own_gradients(True)
        if teams and self._hooks and self._team is None:
            assert isinstance(self._ensemble, ProcessEnsemble)  # others form no teams
            self._team = self._ensemble.team(first)
        for hook in self._hooks:
            hook.group = self._team.group if teams and self._team is not None else None
        for wrapper in self._wrappers:
            wrapper.require_backward_grad_sync = teams

    def end(self) -> None:
        """Switch back. The state of a stack's first replica becomes that of all, if they shared one before."""
        if not self._on:
            return
        self._on = False
        for wrapper, (synced, broadcast) in zip(self._wrappers, self._before, strict=True):
            wrapper.require_backward_grad_sync, wrapper.broadcast_buffers = synced, broadcast
        for hook in self._hooks:
            hook.group = None
        if self._stack is not None:
            self._stack.own_gradients(False)
            self.share_state()

    def take_over(self, other: OwnGradients) -> None:
        """Go on in the place of another one for the same optimizer and model, without switching back in between."""
        self._on, self._before, self.shared_state = other._on, other._before, other.shared_state
        self._team = other._team
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
