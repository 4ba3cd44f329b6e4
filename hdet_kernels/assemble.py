"""From a scheduler's arguments to its cycle: check everything, then put the parts together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .buckets import Buckets, unique
from .controller import Controller, RegressionController, Run, SoftmaxController
from .converge import AverageState, Converger
from .cycle import Cycle, Gradients, Probe
from .ensemble import Ensemble, default_ensemble
from .explore import Explore, Group, Hyperparameter, expand, remember_bases
from .spread import Spread

log = logging.getLogger("hdet_kernels")


def default_sync_every(total_steps: int) -> int:
    """T where none is given: 2.5 % of the run, between 1 and 1000 steps."""
    return min(max(round(0.025 * total_steps), 1), 1000)


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
    gradients: Gradients,
    ensemble: Ensemble | None,
    average_state: AverageState,
    average_buffers: bool,
    model: torch.nn.Module | None,
    seed: int,
    schedule: str,
) -> Cycle:
    """Check the arguments and put the parts together. Writes base values to the optimizer's groups, nothing else."""
    groups = optimizer.param_groups
    if total_steps is not None and total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, got {total_steps}")
    if sync_every is None:
        if total_steps is None:
            raise ValueError("the length of the run is not known: pass total_steps=, or sync_every= and auto_lr=False")
        sync_every = default_sync_every(total_steps)
    if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
        raise ValueError(f"sync_every must be a whole number of steps, at least 1, got {sync_every!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    _check_choice("gradients", gradients, ("auto", "shared", "local"))
    _check_choice("average_state", average_state, ("auto", True, False))
    if probe is not None and not callable(probe):
        raise TypeError(f"probe must be callable without arguments and return a loss, got {probe!r}")
    hyperparameters = expand(explore, groups, spread)
    floors = tuple(_floor(h, groups) for h in hyperparameters)
    run = Run(total_steps, sync_every, peak, floors)
    controller = _chosen_controller(auto_lr, any(h.spread for h in hyperparameters), run)
    if controller is not None and controller.reads == "slopes" and gradients == "local":
        raise ValueError(f"{type(controller).__name__} needs shared gradients, got gradients='local'")
    ensemble = default_ensemble() if ensemble is None else ensemble
    if ensemble.size == 1:
        log.info("one replica: nothing is fanned out or averaged, and the schedule is the plain one")
    buckets = getattr(optimizer, "buckets", None)
    converger = Converger(
        buckets if isinstance(buckets, Buckets) else [p for group in groups for p in group["params"]],
        ensemble,
        state=lambda: _averaged_state(optimizer),
        # Looked up at every sync: modules replace their buffers (``self.ema = …``, ``model.to()``).
        buffers=lambda: [b for b in model.buffers() if b.is_floating_point()] if model and average_buffers else [],
    )
    remember_bases(hyperparameters, groups)
    return Cycle(
        optimizer,
        Spread(hyperparameters, controller, ensemble, seed=seed, scheduled=learning_rates(optimizer)),
        run,
        ensemble,
        converger,
        probe=probe,
        gradients=gradients,
        average_state=average_state,
        step=step,
        schedule=schedule,
    )


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
    if run.total_steps is not None and not any(
        controller.active(run, step) for step in range(run.sync_every, run.total_steps + 1, run.sync_every)
    ):
        log.warning(
            "no sync falls into the part of the run in which %s acts (sync_every=%d, total_steps=%d): the base "
            "schedule will not be changed",
            type(controller).__name__,
            run.sync_every,
            run.total_steps,
        )
    return controller


def _floor(hyper: Hyperparameter, groups: Sequence[Group]) -> float | None:
    """Where the schedule ends: OneCycleLR says so in the group, others do not."""
    if hyper.key != "lr" or hyper.group is None or "min_lr" not in groups[hyper.group]:
        return None
    return float(groups[hyper.group]["min_lr"])


def _averaged_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """The floating-point state of all parameters, by parameter and name: moments and the like, not step counts."""
    flats = getattr(optimizer, "state_flats", None)
    if callable(flats):
        return dict(flats())
    params = unique(param for group in optimizer.param_groups for param in group["params"])
    return {
        f"{index}/{key}": value
        for index, param in enumerate(params)
        for key, value in sorted(optimizer.state.get(param, {}).items())
        if key != "step" and isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    }


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
