"""The replicas of a scheduler: who they are where none are given, and whether the optimizer's parameters are theirs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.optim import Optimizer

from hdet_kernels.buckets import Buckets
from hdet_kernels.ensemble import Ensemble, ProcessEnsemble, default_ensemble
from hdet_kernels.fanout.explore import Group, Hyperparameter
from hdet_kernels.schedule.options import GradientMode, HDETOptions
from hdet_kernels.stack import ReplicaStack, StackEnsemble
from hdet_kernels.tensors import replicas_of, share_gradients

log = logging.getLogger("hdet_kernels")


def ensemble_of(groups: Sequence[Group], given: Ensemble | None) -> Ensemble:
    """Return the replicas. Where none are given: the default group, unless parameters are sharded over it."""
    if given is not None:
        return given
    meshes = {param.device_mesh for group in groups for param in group["params"] if hasattr(param, "device_mesh")}
    if not meshes:
        return default_ensemble()
    mesh = next(iter(meshes))
    if len(meshes) == 1 and mesh.ndim == 2:
        return ProcessEnsemble(mesh)
    raise ValueError(
        f"the parameters are sharded over {' and '.join(map(str, meshes))}, which does not tell which processes are "
        "replicas of each other: pass ensemble=hdet_kernels.ProcessEnsemble(mesh) with a 2-D mesh (replicate, shard)"
    )


def gradients_of(optimizer: Optimizer, ensemble: Ensemble, gradients: GradientMode) -> GradientMode:
    """Return the gradient mode, which a stack knows; raise if parameters and ensemble differ in replicas."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    replicas = {replicas_of(param) for param in params}
    if not replicas:
        return gradients  # the converger refuses an optimizer without parameters
    if replicas == {None}:
        if ensemble.rows > 1:
            raise ValueError(
                f"{ensemble} holds {ensemble.rows} replicas in this process, but the optimizer's parameters are those "
                "of one: build the optimizer with stack.parameters() of a ReplicaStack"
            )
        return gradients
    if replicas != {ensemble.rows}:
        raise ValueError(
            f"the optimizer's parameters are a stack of {', '.join(map(str, replicas))} replicas, and {ensemble} holds "
            f"{ensemble.rows}: pass ensemble=stack.ensemble"
        )
    if not isinstance(getattr(optimizer, "buckets", None), Buckets):
        raise TypeError(
            f"{type(optimizer).__name__} has one learning rate for all replicas of a stack: use an optimizer of "
            "hdet_kernels, such as FusedAdamW(stack.parameters())"
        )
    # A stack whose replicas train on their own gradients for a while still shares them.
    stack = ensemble.stack if isinstance(ensemble, StackEnsemble) else None
    found: GradientMode = "shared" if share_gradients(params) else "local"
    found = found if stack is None else stack.gradients
    if gradients not in ("auto", found):
        raise ValueError(
            f"gradients={gradients!r}, but the stack has {found} ones: leave gradients= out, or build "
            f"ReplicaStack(…, gradients={gradients!r})"
        )
    return found


def check_stack(
    stack: ReplicaStack | None,
    optimizer: Optimizer,
    options: HDETOptions,
    hyperparameters: Sequence[Hyperparameter],
    gradients: GradientMode,
) -> None:
    """Raise unless model and optimizer are those of the stack; warn of scalars that act on no replica alone.

    Args:
        stack: the stack whose rows are the replicas; None: nothing is checked.
        optimizer: the innermost one.
        options: the keywords of the scheduler.
        hyperparameters: what is explored.
        gradients: those of the stack.
    """
    if stack is None:
        return
    if options["model"] is not None and options["model"] is not stack:
        raise ValueError(
            f"model= is a {type(options['model']).__name__}, but the buffers that are averaged are those of the stack: "
            "leave model= out with ensemble=stack.ensemble"
        )
    own = {id(param) for param in stack.parameters()}
    if any(id(param) not in own for group in optimizer.param_groups for param in group["params"]):
        raise ValueError(
            f"ensemble= is that of {stack!r}, but the optimizer has parameters of another stack: pass the ensemble of "
            "the stack whose parameters() the optimizer was built with"
        )
    in_the_loss = [hyper.name for hyper in hyperparameters if hyper.group is None]
    if in_the_loss and gradients == "shared":
        log.warning(
            "%s cannot be explored with shared gradients if it acts in the loss: all replicas take the same step, "
            "whatever its value; build ReplicaStack(…, gradients='local')",
            ", ".join(in_the_loss),
        )
