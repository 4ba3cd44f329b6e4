"""Build the cycle of a scheduler: check how the arguments fit each other, then put the parts together.

Nothing of the optimizer changes before all checks have passed, except that base values are noted in its groups. A
schedule that does not tell its peak and its end is played ahead on a copy (:func:`rehearse`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from hdet_kernels.buckets import Buckets
from hdet_kernels.checks import check_steps
from hdet_kernels.controller.protocol import Controller, Run
from hdet_kernels.controller.regression import RegressionController
from hdet_kernels.controller.settings import SlopeSettings
from hdet_kernels.converge import converger_of
from hdet_kernels.converge.of_optimizer import of_wrappers
from hdet_kernels.ensemble import Ensemble, ProcessEnsemble, default_ensemble
from hdet_kernels.fanout.explore import Explore, Group, Hyperparameter, expand, peak_of, remember_bases
from hdet_kernels.fanout.spread import Spread, rates_of
from hdet_kernels.optim.group_entries import forget_per_replica
from hdet_kernels.schedule.arguments import GradientMode, Options
from hdet_kernels.schedule.attachment import unwrapped, wrappers_of
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.history import HistoryFile
from hdet_kernels.schedule.scout.rounds import ScoutSettings
from hdet_kernels.stack import ReplicaStack, StackEnsemble
from hdet_kernels.tensors import replicas_of, share_gradients

log = logging.getLogger("hdet_kernels")

#: The most syncs at which a controller is asked, when it is built, whether it will act: a run can have millions.
MOST_LOOKS = 10_000

#: Fewest syncs, until it stops, at which the default controller notices a learning rate that is far too high.
FEWEST_LOOKS = 15

#: Fewest steps of a cycle that explores scalars other than learning rates: the optimizer's moments remember them.
FEWEST_STEPS = 30

#: Factor from which ``max_lr=None`` is mentioned to a user who trusts the learning rate to no less.
HARDLY_TRUSTED = 10


@dataclass(frozen=True)
class ScheduleFacts:
    """The schedule that HDET rides on, as far as it is known."""

    name: str  # as it is saved in checkpoints
    step: int  # steps that it has made so far
    total_steps: int | None
    peak: float  # share of the run at which it peaks
    cycle_momentum: bool  # whether it sets the momentum at every step
    #: Plays a copy of it for so many steps, for a schedule that does not tell its peak and end.
    rehearse: Callable[[int], Rehearsal | None] | None = None
    before: int = 0  # steps that are made before its first: those of a scouting phase


def build_cycle(given: Optimizer, schedule: ScheduleFacts, options: Options) -> Cycle:
    """Check the options and return the cycle that they describe. ``given`` is the optimizer, or a wrapper around it."""
    optimizer, wrappers = unwrapped(given), wrappers_of(given)
    check_equaliser(optimizer)
    groups = optimizer.param_groups
    explore = options.explored(cycle_momentum=schedule.cycle_momentum)
    ensemble = ensemble_of(groups, options.ensemble)
    if ensemble.size > 1 and options.average.state is not False and (kept := of_wrappers(wrappers)) is not None:
        raise TypeError(kept.why)
    gradients = gradients_of(optimizer, ensemble, options.gradients)
    sync_every = _sync_every(schedule.total_steps, options, explore, gradients)
    if options.average.overlap_steps >= sync_every:
        raise ValueError(
            f"overlap_steps must be a whole number from 0 to sync_every - 1 = {sync_every - 1}, got "
            f"{options.average.overlap_steps}: an average has to land before the next one starts"
        )
    history_file = None if options.history_file is None else HistoryFile(options.history_file)
    stack = ensemble.stack if isinstance(ensemble, StackEnsemble) else None
    elsewhere = stack.hyper.set if stack is not None else None
    hyperparameters = expand(explore, groups, options.spread, elsewhere, tie_groups=options.tie_groups)
    check_stack(stack, optimizer, options, hyperparameters, gradients)
    run = Run(
        schedule.total_steps,
        sync_every,
        schedule.peak,
        floors=tuple(_floor(hyper, groups) for hyper in hyperparameters),
        probed=options.probe is not None,
        gradients=gradients,
        reach=tuple(hyper.reach for hyper in hyperparameters),
        others=any(hyper.base is not None and hyper.spread for hyper in hyperparameters),
        overlaps=options.average.overlap_steps > 0,
    )
    controller: Controller | None = None
    if options.auto_lr is not False:
        controller = RegressionController(trust=options.trust) if options.auto_lr is True else options.auto_lr
    if controller is not None and controller.reads == "losses" and not any(hyper.spread for hyper in hyperparameters):
        controller = None  # it would compare replicas that do not differ
    peaks: Sequence[float] | None = None
    if controller is not None:
        run, peaks = _with_peaks(run, controller, hyperparameters, groups, ensemble.size, schedule.rehearse)
        run = controller.prepare(run)
        if controller.reads == "slopes":
            run = replace(run, slopes=True)
        if controller.reads == "slopes" and gradients == "local":
            raise ValueError(f"{type(controller).__name__} needs shared gradients, got gradients='local'")
        if controller.reads == "slopes" and run.overlaps:
            raise ValueError(
                f"{type(controller).__name__} needs the averaged parameters at the sync itself, got "
                f"overlap_steps={options.average.overlap_steps}: use overlap_steps=0, or the regression controller"
            )
    _offer_scouting(schedule, options, ensemble)
    model = stack if options.model is None else options.model

    def buffers() -> list[Tensor]:
        # Read anew every time: modules replace their buffers (``self.ema = …``, ``model.to()``).
        return list(model.buffers()) if model is not None else []

    average = options.average
    converger = converger_of(
        optimizer,
        ensemble,
        model=model,
        wrappers=wrappers,
        buffers=buffers if average.buffers else list,
        **{name: getattr(average, name) for name in ("bucket_bytes", "compress", "backup", "outer", "merge")},
    )
    remember_bases(hyperparameters, groups)
    forget_per_replica(groups)
    spread = Spread(
        hyperparameters,
        controller,
        ensemble,
        seed=options.seed,
        scheduled=rates_of(groups),
        run=run,
        peaks=peaks,
    )
    return Cycle(
        optimizer,
        spread,
        run,
        ensemble,
        converger,
        probe=options.probe,
        gradients=gradients,
        average_state=options.average.state,
        overlap_steps=options.average.overlap_steps if ensemble.talks else 0,
        step=schedule.step,
        schedule=schedule.name,
        buffers=buffers,
        history_file=history_file if (ensemble.replica, ensemble.part) == (0, 0) else None,
        before=schedule.before,
    )


#: Optimizers that make the parameters of all processes equal, by name: their modules take seconds to import.
_EQUALISERS = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")


def check_equaliser(optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer makes the parameters of all processes equal at its steps."""
    if name := next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _EQUALISERS), None):
        raise ValueError(
            f"{name} makes the parameters of all processes equal, which undoes the spread of the replicas: use a plain "
            "optimizer; with less memory hk.FusedAdamW(state_dtype='int8'), or shard each replica with FSDP2 (HSDP: "
            "ensemble=hk.ProcessEnsemble(mesh))"
        )


def _sync_every(total_steps: int | None, options: Options, explore: Sequence[Explore], gradients: GradientMode) -> int:
    """Return T: as given, or 1.25 % of the run or twice that, between 1 and 1000 steps.

    Twice that where replicas with local gradients are compared by their training losses, which are of other examples on
    every replica, and for other scalars, which act slowly: both need longer to tell replicas apart. Other scalars get
    at least ``FEWEST_STEPS``, or a tenth of the run.
    """
    if total_steps is not None:
        check_steps("total_steps", total_steps)
    if options.sync_every is not None:
        return options.sync_every
    if total_steps is None:
        raise ValueError("the length of the run is not known: pass total_steps=, or sync_every= and auto_lr=False")
    rates_alone = all(each.name == "lr" for each in explore)
    compares_losses = gradients == "local" and options.probe is None
    share = 0.025 if compares_losses or not rates_alone else 0.0125
    fewest = 1 if rates_alone else min(FEWEST_STEPS, total_steps // 10)
    return min(max(round(share * total_steps), fewest, 1), 1000)


def _offer_scouting(schedule: ScheduleFacts, options: Options, ensemble: Ensemble) -> None:
    """Say that a run can find its learning rate itself, where the given one is hardly trusted."""
    trust = options.trust
    hardly = options.auto_lr is True and (trust is None or trust > HARDLY_TRUSTED)
    if hardly and schedule.name == "OneCycleLR" and not schedule.before and ensemble.size > 1:
        share = ScoutSettings().share / (1 + ScoutSettings().share)
        log.info("trust=%s: with max_lr=None the first %d %% of the steps find a learning rate", trust, 100 * share)


def name_few_looks(cycle: Cycle, sync_every: int | None) -> None:
    """Warn in the first process where the controller acts at too few syncs, or at none.

    ``sync_every`` is as the user gave it. What the package chose itself is as short as it should be.
    """
    run, controller, total = cycle.run, cycle.spread.controller, cycle.run.total_steps
    if controller is None or total is None or not cycle.first_process:
        return
    if cycle.ensemble.size == 1 and controller.reads == "losses":
        return  # nothing to compare, whenever it syncs; that is said elsewhere
    if isinstance(controller, RegressionController) and controller.trust != 1 and run.moves_rates:
        first, last = controller.rate_steps(run)
        looks, enough = run.syncs(first, last), max(int((last - first) / FEWEST_LOOKS), 1)
        if sync_every is not None and sync_every > enough and looks < FEWEST_LOOKS:
            log.warning(
                "sync_every=%d of total_steps=%d: until step %d, where %s stops, there are %d syncs, and a learning "
                "rate that is too high may not be noticed with fewer than %d: pass sync_every=%d or less, or leave it "
                "out",
                *(run.sync_every, total, last, type(controller).__name__, looks, FEWEST_LOOKS, enough),
            )
        return
    if isinstance(controller, RegressionController) and not run.others:
        return  # nothing that it may move, as the user wished
    regular = range(run.sync_every, total + 1, run.sync_every)
    looked_at = regular[:: max(len(regular) // MOST_LOOKS, 1)]
    if not any(controller.active(run, step) for step in itertools.chain(run.early, looked_at, regular[-1:])):
        log.warning(
            "no sync falls into the part of the run in which %s acts (sync_every=%d, total_steps=%d): the base "
            "schedule will not be changed",
            *(type(controller).__name__, run.sync_every, total),
        )


def name_one_replica(cycle: Cycle) -> None:
    """Log, where there is one replica, that nothing is fanned out; a warning where the user asked for a spread."""
    if cycle.ensemble.size > 1:
        return
    controller = cycle.spread.controller
    if controller is not None and controller.reads == "slopes":
        log.info("one replica: nothing is fanned out or averaged, and %s moves the base", type(controller).__name__)
        return
    asked = any(hyper.spread for hyper in cycle.spread.hyperparameters)
    log.log(
        logging.WARNING if asked else logging.INFO,
        "one replica: plain %s, nothing is fanned out or averaged. For several replicas start several processes "
        "(torchrun) and call torch.distributed.init_process_group(), or train a hdet_kernels.ReplicaStack",
        cycle.schedule.removeprefix("HDETScheduler around "),
    )


def _floor(hyper: Hyperparameter, groups: Sequence[Group]) -> float | None:
    """Return the value that the schedule ends at: OneCycleLR notes it in the group, others do not."""
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
) -> tuple[Run, Sequence[float]]:
    """Return ``run`` with the peaks of the learning rates that the controller can move, and the schedule's end.

    The peak of a set of tied groups is that of the first. The peaks of all groups are returned beside it.
    """
    compares = controller.reads == "losses"
    movable = [  # the groups whose learning rates can be moved
        hyper.group if hyper.base is None and not (compares and (replicas == 1 or not hyper.spread)) else None
        for hyper in hyperparameters
    ]
    played: Rehearsal | None = None
    if rehearse is not None and run.total_steps is not None and any(group is not None for group in movable):
        played = rehearse(run.total_steps)
    highest = [peak_of(group) for group in groups] if played is None else played.highest
    # A frozen group, whose peak is 0, stays frozen.
    peaks = [None if group is None else highest[group] or None for group in movable]
    if played is None:
        return replace(run, peaks=tuple(peaks)), highest
    return replace(run, peaks=tuple(peaks), end=played.end, peak=played.peak), highest


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
    options: Options,
    hyperparameters: Sequence[Hyperparameter],
    gradients: GradientMode,
) -> None:
    """Raise unless model and optimizer are those of the stack; warn of scalars that act on no replica alone."""
    if stack is None:
        return
    if options.model is not None and options.model is not stack:
        raise ValueError(
            f"model= is a {type(options.model).__name__}, but the buffers that are averaged are those of the stack: "
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


#: Runs of more steps are not played: a step takes about 10 µs.
LONGEST = 100_000


@dataclass(frozen=True)
class Rehearsal:
    """The outcome of playing a schedule."""

    highest: tuple[float, ...]  # the highest learning rate of every parameter group
    end: float  # the learning rate at the last step over the highest one, as a mean over the groups
    peak: float  # the share of the run after which the first group has reached 99 % of its highest learning rate
    first: int  # the step at which it began
    rates: NDArray[np.float64]  # [steps, groups], the learning rates from that step on

    def at(self, step: float, *, like: Sequence[float | Tensor]) -> list[float | Tensor]:
        """Return the learning rates nearest to ``step`` steps after the first; tensors where ``like`` has them."""
        row: list[float] = self.rates[min(round(step), len(self.rates) - 1)].tolist()
        return [
            torch.full_like(now, rate) if isinstance(now, Tensor) else rate for now, rate in zip(like, row, strict=True)
        ]


def rehearse(scheduler: LRScheduler, total_steps: int) -> Rehearsal | None:
    """Play a copy of ``scheduler`` from its current step to step ``total_steps``, on a stand-in for its optimizer.

    Nothing is modified. None if the run has more than 100 000 steps, or the schedule cannot be copied or played.
    """
    if total_steps > LONGEST:
        return None
    try:
        with warnings.catch_warnings(), same_generators(torch.device("cpu")):
            warnings.simplefilter("ignore")  # torch warns that the stand-in takes no steps
            stand_in = _stand_in(scheduler.optimizer)
            played = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
            rates, step = [list(map(float, rates_of(stand_in.param_groups)))], getattr(scheduler, "last_epoch", 0)
            for _ in range(step, total_steps - 1):
                played.step()
                rates.append(list(map(float, rates_of(stand_in.param_groups))))
    except Exception as error:  # a user's schedule may raise anything
        log.info("%s cannot be played ahead (%s): taken as one that anneals", type(scheduler).__name__, error)
        return None
    values = played_rates = np.array(rates)  # [steps, groups]
    if not np.isfinite(values).all():
        log.info("%s has learning rates that are not finite: taken as one that anneals", type(scheduler).__name__)
        return None
    if step > 0:  # its first part is over; it began at initial_lr
        began = [float(group.get("initial_lr", 0.0)) for group in stand_in.param_groups]
        values = np.vstack([began, values])
    highest = values.max(axis=0)
    shares = (values[-1] / np.where(highest > 0, highest, 1.0)).clip(0.0, 1.0)[highest > 0]
    reached = (values >= 0.99 * highest).any(axis=1).argmax() / total_steps
    end = float(shares.mean()) if len(shares) else 0.0
    return Rehearsal(tuple(highest.tolist()), end, float(reached), step, played_rates)


def built_state(optimizer: Optimizer, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the state that torch's OneCycleLR has when it is built with these arguments. Nothing is modified."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stand_in = _stand_in(optimizer)
        stand_in.defaults = dict(optimizer.defaults)  # they tell whether the optimizer has a momentum or betas
        return OneCycleLR(stand_in, **arguments).state_dict()


def _stand_in(optimizer: Optimizer) -> SGD:
    """Return an optimizer whose groups have the same entries, but one dummy parameter each."""
    entries = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    stand_in = SGD([{"params": [torch.zeros(1, device="cpu")]} for _ in entries], lr=0.0)
    for group, own in zip(stand_in.param_groups, copy.deepcopy(entries), strict=True):
        group.update(own)
    return stand_in


@contextlib.contextmanager
def same_generators(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Restore the global generators after the block: Python's, NumPy's, torch's on the CPU and on ``device``.

    ``seed``: begin the block with torch's generators in this state.
    """
    on_cuda = device.type == "cuda"
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all devices
            if on_cuda:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def write_momentum(scheduler: LRScheduler, step: float) -> None:
    """Write the momentum of ``step`` to the groups, where the schedule sets it: loading a schedule does not."""
    if getattr(scheduler, "cycle_momentum", False):
        for number, group in enumerate(scheduler.optimizer.param_groups):
            for name in ("base_momentum", "max_momentum") if isinstance(scheduler, OneCycleLR) else ():
                if name not in group:
                    raise ValueError(
                        f"parameter group {number} of the optimizer has no {name!r}, which its schedule wrote there: "
                        "load an undamaged checkpoint of the optimizer"
                    )
        if isinstance(scheduler, OneCycleLR):
            one_cycle_at(scheduler, step)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch expects step() to call it
                scheduler.get_lr()


def one_cycle_at(scheduler: OneCycleLR, step: float) -> list[float | Tensor]:
    """Return the learning rates of torch's schedule at a step, or between two. It writes the momentum to the groups."""
    now = scheduler.last_epoch
    scheduler.last_epoch = step  # type: ignore[assignment]  # torch computes shares of its phases from it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects step() to call it
            return OneCycleLR.get_lr(scheduler)
    finally:
        scheduler.last_epoch = now


def below_warm_up(scheduled: Sequence[float | Tensor], groups: Sequence[Group], cycle: Cycle) -> list[float | Tensor]:
    """Return the learning rates of a schedule that goes on while the run began again, below a warm-up of their peaks.

    It is that of :class:`.SlopeSettings`. Where the length of the run is not known it is as long as what was undone.
    A run that went back to its first beginning had none, and has none.
    """
    if cycle.went_back_to_first:
        return list(scheduled)
    constants, total = SlopeSettings(), cycle.run.total_steps
    length = cycle.origin if total is None else constants.warmup_share * total
    part = constants.warmup_from + (1 - constants.warmup_from) * min(cycle.step / max(length, 1), 1.0)
    return [
        rate.clamp(max=part * peak_of(group)) if isinstance(rate, Tensor) else min(rate, part * peak_of(group))
        for rate, group in zip(scheduled, groups, strict=True)
    ]
