"""From a scheduler's arguments to its cycle: check everything, then put the parts together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.buckets import Buckets
from hdet_kernels.controller.protocol import Controller, Run
from hdet_kernels.controller.regression import RegressionController
from hdet_kernels.controller.slopes import HypergradientController
from hdet_kernels.controller.softmax import SoftmaxController
from hdet_kernels.converge import AverageState, Converger, Merge
from hdet_kernels.converge.compress import Format
from hdet_kernels.converge.optimizer_state import StepCounts, averaged_state, why_not_averaged
from hdet_kernels.converge.outer import Outer
from hdet_kernels.ensemble import Ensemble, ProcessEnsemble, default_ensemble
from hdet_kernels.fanout.explore import Explore, Group, Hyperparameter, expand, forget_per_replica, remember_bases
from hdet_kernels.fanout.spread import Spread
from hdet_kernels.schedule.cycle import Cycle, GradientMode, Probe
from hdet_kernels.schedule.rehearsal import Rehearsal
from hdet_kernels.stack import StackEnsemble
from hdet_kernels.tensors import replicas_of, share_gradients

log = logging.getLogger("hdet_kernels")


class Buffered(Protocol):
    """What of a model is needed here."""

    def buffers(self) -> Iterable[Tensor]: ...


#: What other scalars than learning rates do is not seen in fewer steps: the optimizer remembers a part of them.
FEWEST_STEPS = 30


def default_sync_every(total_steps: int, *, probed: bool, rates_alone: bool) -> int:
    """T where none is given: 2.5 % of the run, or half of that, between 1 and 1000 steps. Half of it where a probe
    compares learning rates alone: training losses, which are of other examples on every replica, and other scalars take
    longer to tell the replicas apart; the latter at least ``FEWEST_STEPS``, but for a tenth of the run."""
    share = 0.0125 if probed and rates_alone else 0.025
    fewest = 1 if rates_alone else min(FEWEST_STEPS, total_steps // 10)
    return min(max(round(share * total_steps), fewest, 1), 1000)


def build_cycle(
    optimizer: Optimizer,
    *,
    step: int,
    total_steps: int | None,
    peak: float,
    spread: float,
    sync_every: int | None,
    auto_lr: bool | Controller,
    probe: Probe | None,
    explore: Sequence[Explore],
    gradients: GradientMode,
    ensemble: Ensemble | None,
    average_state: AverageState,
    average_buffers: bool,
    model: Buffered | None,
    bucket_bytes: int | None,
    compress: Format | None,
    overlap_steps: int,
    backup: bool,
    outer: Outer | None,
    merge: Merge,
    seed: int,
    schedule: str,
    rehearse: Callable[[int], Rehearsal | None] | None = None,
) -> Cycle:
    """Check the arguments and put the parts together. Writes base values to the optimizer's groups, nothing else.

    ``rehearse`` plays the schedule for that many steps, where there is one that does not say what it will do."""
    groups = optimizer.param_groups
    if total_steps is not None and total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, got {total_steps}")
    if sync_every is None:
        if total_steps is None:
            raise ValueError("the length of the run is not known: pass total_steps=, or sync_every= and auto_lr=False")
        rates_alone = all(isinstance(each, Explore) and each.name == "lr" for each in explore)
        sync_every = default_sync_every(total_steps, probed=probe is not None, rates_alone=rates_alone)
    if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
        raise ValueError(f"sync_every must be a whole number of steps, at least 1, got {sync_every!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    _check_choice("gradients", gradients, ("auto", "shared", "local"))
    _check_choice("average_state", average_state, ("auto", True, False))
    _check_choice("backup", backup, (True, False))
    if isinstance(overlap_steps, bool) or not isinstance(overlap_steps, int) or not 0 <= overlap_steps < sync_every:
        raise ValueError(
            f"overlap_steps must be a whole number from 0 to sync_every - 1 = {sync_every - 1}, got {overlap_steps!r}: "
            "an average has to land before the next one starts"
        )
    if probe is not None and not callable(probe):
        raise TypeError(f"probe must be callable without arguments and return a loss, got {probe!r}")
    ensemble = _ensemble_of(groups) if ensemble is None else ensemble
    gradients = _gradients_of(optimizer, ensemble, gradients)
    stack = ensemble.stack if isinstance(ensemble, StackEnsemble) else None
    if stack is not None and model is not None and model is not stack:
        raise ValueError(
            f"model= is a {type(model).__name__}, but the buffers that are averaged are those of the stack: leave "
            "model= out with ensemble=stack.ensemble"
        )
    model = stack if model is None else model
    hyperparameters = expand(explore, groups, spread, stack.hyper.set if stack is not None else None)
    in_the_loss = [hyper.name for hyper in hyperparameters if hyper.group is None]
    if stack is not None and in_the_loss and gradients == "shared":
        log.warning(
            "%s cannot be explored with shared gradients if it acts in the loss: all replicas take the same step, "
            "whatever its value; build ReplicaStack(…, gradients='local')",
            ", ".join(in_the_loss),
        )
    floors = tuple(_floor(h, groups) for h in hyperparameters)
    reach = tuple(h.reach for h in hyperparameters)
    others = any(h.base is not None and h.spread for h in hyperparameters)
    run = Run(total_steps, sync_every, peak, floors, others=others, probed=probe is not None, reach=reach)
    controller = _chosen_controller(auto_lr, any(h.spread for h in hyperparameters), run)
    if isinstance(controller, RegressionController | HypergradientController):
        run = _with_peaks(run, controller, hyperparameters, groups, ensemble.size, rehearse)
    if isinstance(controller, RegressionController):
        in_pairs = probe is not None and gradients != "local"
        run = replace(run, early=controller.early_syncs(run), in_pairs=in_pairs, departs=controller.departs(run))
    if controller is not None:
        _warn_if_idle(controller, run)
    if controller is not None and controller.reads == "slopes" and gradients == "local":
        raise ValueError(f"{type(controller).__name__} needs shared gradients, got gradients='local'")
    if controller is not None and controller.reads == "slopes" and overlap_steps:
        raise ValueError(
            f"{type(controller).__name__} needs the averaged parameters at the sync itself, got "
            f"overlap_steps={overlap_steps}: use overlap_steps=0, or the regression controller"
        )
    if ensemble.size == 1:
        log.info("one replica: nothing is fanned out or averaged, and the schedule is the plain one")

    def state() -> dict[str, Tensor]:
        if (why_not := why_not_averaged(optimizer)) is None:
            return averaged_state(optimizer)
        if gradients == "shared" or average_state is False:
            return {}
        raise TypeError(why_not)

    buckets = getattr(optimizer, "buckets", None)
    converger = Converger(
        buckets if isinstance(buckets, Buckets) else [p for group in groups for p in group["params"]],
        ensemble,
        state=state,
        counts=StepCounts(optimizer),
        # Looked up at every sync: modules replace their buffers (``self.ema = …``, ``model.to()``).
        buffers=lambda: list(model.buffers()) if model is not None and average_buffers else [],
        bucket_bytes=bucket_bytes,
        compress=compress,
        backup=backup,
        outer=outer,
        merge=merge,
    )
    if overlap_steps:
        converger.check_overlap()
    remember_bases(hyperparameters, groups)
    forget_per_replica(groups)
    return Cycle(
        optimizer,
        Spread(hyperparameters, controller, ensemble, seed=seed, scheduled=learning_rates(optimizer), run=run),
        run,
        ensemble,
        converger,
        probe=probe,
        gradients=gradients,
        average_state=average_state,
        overlap_steps=overlap_steps if ensemble.talks else 0,
        step=step,
        schedule=schedule,
    )


def _ensemble_of(groups: Sequence[Group]) -> Ensemble:
    """The replicas where the user has not said who they are: the default group's, unless the parameters are sharded
    over it."""
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


def _gradients_of(optimizer: Optimizer, ensemble: Ensemble, gradients: GradientMode) -> GradientMode:
    """Check that the optimizer's parameters are those of the replicas that this process holds, and say what their
    gradients are: a stack knows."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    replicas = {replicas_of(param) for param in params}
    if not replicas:
        return gradients  # nothing to average, which is said there
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
    found: GradientMode = "shared" if share_gradients(params) else "local"
    if gradients not in ("auto", found):
        raise ValueError(
            f"gradients={gradients!r}, but the stack has {found} ones: leave gradients= out, or build "
            f"ReplicaStack(…, gradients={gradients!r})"
        )
    return found


def _chosen_controller(auto_lr: bool | Controller, diverges: bool, run: Run) -> Controller | None:
    if not isinstance(auto_lr, bool | Controller):
        raise TypeError(f"auto_lr must be True, False or a controller such as RegressionController(), got {auto_lr!r}")
    if isinstance(auto_lr, type):
        raise TypeError(f"auto_lr is the class {auto_lr.__name__}: pass an instance, {auto_lr.__name__}()")
    controller: Controller | None = None if isinstance(auto_lr, bool) else auto_lr
    if auto_lr is True:
        controller = RegressionController()
    if controller is None or (controller.reads == "losses" and not diverges):
        return None
    controller.check(run)
    if isinstance(controller, SoftmaxController) and isinstance(controller.decay, str) and run.floors[0] is None:
        log.warning(
            "SoftmaxController replaces the schedule and decays to its floor, and only OneCycleLR says where that is: "
            "the learning rate will not decay; pass decay= as a number"
        )
    return controller


def _warn_if_idle(controller: Controller, run: Run) -> None:
    if run.total_steps is None:
        return
    syncs = (*run.early, *range(run.sync_every, run.total_steps + 1, run.sync_every))
    if not any(controller.active(run, step) for step in syncs):
        log.warning(
            "no sync falls into the part of the run in which %s acts (sync_every=%d, total_steps=%d): the base "
            "schedule will not be changed",
            type(controller).__name__,
            run.sync_every,
            run.total_steps,
        )


def _floor(hyper: Hyperparameter, groups: Sequence[Group]) -> float | None:
    """Where the schedule ends: OneCycleLR says so in the group, others do not."""
    if hyper.key != "lr" or hyper.group is None or "min_lr" not in groups[hyper.group]:
        return None
    return float(groups[hyper.group]["min_lr"])


def _with_peaks(
    run: Run,
    controller: Controller,
    hyperparameters: Sequence[Hyperparameter],
    groups: Sequence[Group],
    replicas: int,
    rehearse: Callable[[int], Rehearsal | None] | None,
) -> Run:
    """``run`` with the highest learning rates of the schedule, for those that can be moved, and its end."""
    compares = controller.reads == "losses"
    found = [
        h.base is None and h.group is not None and not (compares and (replicas == 1 or not h.spread))
        for h in hyperparameters
    ]
    played = rehearse(run.total_steps) if rehearse is not None and run.total_steps is not None and any(found) else None
    peaks: list[float | None] = [None] * len(hyperparameters)
    for index, hyper in enumerate(hyperparameters):
        if found[index] and hyper.group is not None:
            highest = _highest(groups[hyper.group]) if played is None else played.highest[hyper.group]
            peaks[index] = highest if highest > 0 else None  # a frozen group stays frozen
    if played is None:
        return replace(run, peaks=tuple(peaks))
    return replace(run, peaks=tuple(peaks), end=played.end, peak=played.peak)


def _highest(group: Group) -> float:
    """The highest value of a schedule that was not played: OneCycleLR's peak, or where others begin or warm up to."""
    return float(group[next(key for key in ("max_lr", "initial_lr", "lr") if key in group)])


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


@contextlib.contextmanager
def untouched_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Put the optimizer's groups back as they were if the block raises: a refused argument changes nothing."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    before = [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    try:
        yield
    except BaseException:
        for group, old in zip(optimizer.param_groups, before, strict=True):
            rate = group["lr"]
            group.clear()
            group.update(old)
            if isinstance(rate, Tensor):
                group["lr"] = rate.copy_(old["lr"])
        raise


def learning_rates(optimizer: Optimizer) -> list[float | Tensor]:
    """The groups' learning rates; tensors as copies."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
