"""The schedulers: torch's OneCycleLR, or any torch scheduler, with HDET's cycle around it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from .buckets import Buckets
from .controller import Controller, RegressionController, Run
from .converge import AverageState, Converger
from .cycle import Cycle, Gradients, Probe
from .ensemble import Ensemble, default_ensemble
from .explore import Explore, Group, Hyperparameter, expand, write_entry
from .history import SyncRecord

log = logging.getLogger("hdet_kernels")


class _WithCycle:
    """What both schedulers offer beside torch's own methods."""

    _cycle: Cycle | None = None

    @property
    def cycle(self) -> Cycle:
        if self._cycle is None:
            raise RuntimeError("the scheduler is still being built")
        return self._cycle

    @property
    def history(self) -> list[SyncRecord]:
        """A record for every sync so far."""
        return self.cycle.history

    @property
    def sync_every(self) -> int:
        """T, in steps."""
        return self.cycle.run.sync_every

    def record_loss(self, loss: float | Tensor) -> None:
        """Add a training loss to the current window: any number of times before :meth:`step`, for gradient
        accumulation and for frameworks that call ``step()`` bare. Never waits for the device."""
        self.cycle.window.record(loss)

    def converge(self) -> None:
        """Average the replicas now, wherever in the cycle. Collective: every replica must call it."""
        self.cycle.converge()

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        """``with scheduler.consensus():`` evaluate or save the averaged model; this replica's own parameters come back
        afterwards. Collective: every replica must enter it. ``state_dict()`` refers to live tensors: save it, or
        clone it, inside the block."""
        return self.cycle.consensus()


class HDETOneCycleLR(_WithCycle, OneCycleLR):
    """torch's ``OneCycleLR`` whose replicas train under a spread of learning rates and are averaged every T steps.

    The arguments up to ``last_epoch`` are torch's, in torch's order. Then, by keyword:

    Args:
        spread: α; replica values lie in base·[1 − α, 1 + α]. 0 is torch's OneCycleLR, bit for bit.
        sync_every: T, the steps between two averages. Default: 2.5 % of the run, at most 1000.
        auto_lr: True for the regression controller, False, or a controller. It needs losses: ``step(loss)`` or
            ``record_loss(loss)``. Without any spread there is nothing to learn from, and it is off.
        probe: returns this replica's loss on a batch that is the same for all replicas; it runs without gradients at
            every sync at which the controller acts, and replaces the training loss there.
        explore: more :class:`hdet_kernels.Explore`.
        gradients: ``"shared"`` (averaged at every step, as DDP does), ``"local"``, or ``"auto"``: found out at every
            sync by comparing the replicas' gradients.
        ensemble: who the replicas are. Default: the default process group if initialised, else a single replica.
        average_state: average the optimizer's moments too: True, False, or ``"auto"``, with local gradients.
        average_buffers: average floating-point buffers (BatchNorm statistics) of ``model``.
        model: the model, needed for its buffers alone.
        seed: of the permutations.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | list[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
        *,
        spread: float = 0.3,
        sync_every: int | None = None,
        auto_lr: bool | Controller = True,
        probe: Probe | None = None,
        explore: Iterable[Explore] = (),
        gradients: Gradients = "auto",
        ensemble: Ensemble | None = None,
        average_state: AverageState = "auto",
        average_buffers: bool = True,
        model: torch.nn.Module | None = None,
        seed: int = 0,
    ) -> None:
        with _untouched_on_error(optimizer):
            super().__init__(
                optimizer,
                max_lr,
                total_steps,
                epochs,
                steps_per_epoch,
                pct_start,
                anneal_strategy,
                cycle_momentum,
                base_momentum,
                max_momentum,
                div_factor,
                final_div_factor,
                three_phase,
                last_epoch,
            )
            explore = tuple(explore)
            _refuse_scheduled_momentum(explore, cycle_momentum)
            self._cycle = _build_cycle(
                optimizer,
                step=self.last_epoch,
                total_steps=self.total_steps,
                peak=pct_start,
                spread=spread,
                sync_every=sync_every,
                auto_lr=auto_lr,
                probe=probe,
                explore=explore,
                gradients=gradients,
                ensemble=ensemble,
                average_state=average_state,
                average_buffers=average_buffers,
                model=model,
                seed=seed,
            )
            self._cycle.write()
            self._last_lr = _learning_rates(optimizer)

    def step(self, loss: float | Tensor | None = None) -> None:
        """After ``optimizer.step()``: record ``loss``, average the replicas if a sync is due, and set the next learning
        rates. ``loss`` may be left out where :meth:`record_loss` was called, or where nothing needs it."""
        if self._cycle is None:  # torch's constructor takes the first values of the schedule
            super().step()
            return
        self._cycle.end_step(loss, self.total_steps)
        super().step()

    def get_lr(self) -> list[float | Tensor]:
        scheduled = super().get_lr()
        return scheduled if self._cycle is None else self._cycle.rates(scheduled)

    def state_dict(self) -> dict[str, Any]:
        state = {key: value for key, value in super().state_dict().items() if key != "_cycle"}
        return {**state, "hdet": self.cycle.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.cycle.check_state_dict(_own_part(state))
        hdet = state.pop("hdet")
        super().load_state_dict(state)
        self.cycle.load_state_dict(hdet)
        self._last_lr = _learning_rates(self.optimizer)


class HDETScheduler(_WithCycle, LRScheduler):
    """HDET around any torch learning-rate scheduler: ``HDETScheduler(CosineAnnealingLR(optimizer, 1000), spread=0.3)``.

    Step this scheduler instead of the wrapped one. ``total_steps`` is the length of the run; schedulers that know it
    (OneCycleLR, CosineAnnealingLR) need not be told. Without it pass ``sync_every`` and ``auto_lr=False``, and call
    ``converge()`` after the last step. The other arguments are those of :class:`HDETOneCycleLR`.
    """

    def __init__(
        self,
        base_scheduler: LRScheduler,
        *,
        total_steps: int | None = None,
        spread: float = 0.3,
        sync_every: int | None = None,
        auto_lr: bool | Controller = True,
        probe: Probe | None = None,
        explore: Iterable[Explore] = (),
        gradients: Gradients = "auto",
        ensemble: Ensemble | None = None,
        average_state: AverageState = "auto",
        average_buffers: bool = True,
        model: torch.nn.Module | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(base_scheduler, ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau decides by a metric, and every replica has its own: the replicas would decide "
                "differently; wrap a schedule of steps and let auto_lr adapt it"
            )
        if not isinstance(base_scheduler, LRScheduler):
            raise TypeError(f"HDETScheduler wraps a torch LRScheduler, got {type(base_scheduler).__name__}")
        if isinstance(base_scheduler, _WithCycle):
            raise TypeError(f"{type(base_scheduler).__name__} has a cycle of its own; wrap a plain torch scheduler")
        # torch's constructor would take a first step; the wrapped scheduler has done that.
        self.base_scheduler = base_scheduler
        self.optimizer = base_scheduler.optimizer
        with _untouched_on_error(self.optimizer):
            explore = tuple(explore)
            _refuse_scheduled_momentum(explore, getattr(base_scheduler, "cycle_momentum", False))
            self._cycle = _build_cycle(
                self.optimizer,
                step=getattr(base_scheduler, "last_epoch", 0),
                total_steps=_run_length(base_scheduler) if total_steps is None else total_steps,
                peak=0.3,
                spread=spread,
                sync_every=sync_every,
                auto_lr=auto_lr,
                probe=probe,
                explore=explore,
                gradients=gradients,
                ensemble=ensemble,
                average_state=average_state,
                average_buffers=average_buffers,
                model=model,
                seed=seed,
            )
            self._cycle.write()
        self._last_lr = _learning_rates(self.optimizer)

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        return self.cycle.step

    @property
    def base_lrs(self) -> list[float | Tensor]:  # type: ignore[override]
        return self.base_scheduler.base_lrs

    def step(self, loss: float | Tensor | None = None) -> None:
        """After ``optimizer.step()``, as :meth:`HDETOneCycleLR.step`."""
        # OneCycleLR refuses to go on; the others may be stepped for ever.
        last_step = self.base_scheduler.total_steps if isinstance(self.base_scheduler, OneCycleLR) else None
        self.cycle.end_step(loss, last_step)
        groups = self.optimizer.param_groups
        # Chainable schedulers compute the next learning rate from the current one: theirs, not this replica's.
        for group, rate in zip(groups, self.cycle.scheduled, strict=True):
            write_entry(group, "lr", rate)
        self.base_scheduler.step()
        for group, rate in zip(groups, self.cycle.rates(_learning_rates(self.optimizer)), strict=True):
            write_entry(group, "lr", rate)
        self._last_lr = _learning_rates(self.optimizer)

    def get_lr(self) -> list[float | Tensor]:
        return self.cycle.rates(self.cycle.scheduled)

    def state_dict(self) -> dict[str, Any]:
        return {"base_scheduler": self.base_scheduler.state_dict(), "hdet": self.cycle.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.cycle.check_state_dict(_own_part(state_dict))
        self.base_scheduler.load_state_dict(state_dict["base_scheduler"])
        self.cycle.load_state_dict(state_dict["hdet"])
        self._last_lr = _learning_rates(self.optimizer)


def default_sync_every(total_steps: int) -> int:
    """T where none is given: 2.5 % of the run, between 1 and 1000 steps."""
    return min(max(round(0.025 * total_steps), 1), 1000)


def _build_cycle(
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
) -> Cycle:
    """Check the arguments and put the parts together. Writes nothing to the optimizer's groups."""
    groups = optimizer.param_groups
    if total_steps is not None and total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, got {total_steps}")
    if sync_every is None:
        if total_steps is None:
            raise ValueError("the length of the run is not known: pass total_steps=, or sync_every= and auto_lr=False")
        sync_every = default_sync_every(total_steps)
    if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
        raise ValueError(f"sync_every must be a whole number of steps, at least 1, got {sync_every!r}")
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
    buffers = list(model.buffers()) if model is not None and average_buffers else []
    buckets = getattr(optimizer, "buckets", None)
    converger = Converger(
        buckets if isinstance(buckets, Buckets) else [p for group in groups for p in group["params"]],
        ensemble,
        state=lambda: _averaged_state(optimizer),
        buffers=[b for b in buffers if b.is_floating_point()],
    )
    return Cycle(
        optimizer,
        hyperparameters,
        run,
        controller,
        ensemble,
        converger,
        probe=probe,
        gradients=gradients,
        average_state=average_state,
        seed=seed,
        step=step,
        scheduled=_learning_rates(optimizer),
    )


def _chosen_controller(auto_lr: bool | Controller, diverges: bool, run: Run) -> Controller | None:
    if not isinstance(auto_lr, bool | Controller):
        raise TypeError(f"auto_lr must be True, False or a controller such as RegressionController(), got {auto_lr!r}")
    controller: Controller | None = None if isinstance(auto_lr, bool) else auto_lr
    if auto_lr is True:
        controller = RegressionController()
    if controller is None or (controller.reads == "losses" and not diverges):
        return None
    controller.check(run)
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


def _averaged_state(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer state that belongs to parameters element by element: moments, not step counts and not state of
    another shape (LBFGS's history)."""
    flats = getattr(optimizer, "state_flats", None)
    if callable(flats):
        return list(flats())
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            found += [
                value
                for key, value in sorted(state.items())
                if key != "step" and isinstance(value, Tensor) and value.shape == param.shape
                if value.is_floating_point() or value.is_complex()
            ]
    return found


def _run_length(scheduler: LRScheduler) -> int | None:
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max)
    return getattr(scheduler, "total_steps", None)


def _refuse_scheduled_momentum(explore: Sequence[Explore], cycle_momentum: bool) -> None:
    for e in explore:
        if cycle_momentum and isinstance(e, Explore) and e.apply is None and e.name in ("momentum", "betas[0]"):
            raise ValueError(
                f"{e.name!r} cannot be explored while the schedule sets it at every step: pass cycle_momentum=False"
            )


def _learning_rates(optimizer: Optimizer) -> list[float | Tensor]:
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _own_part(state: dict[str, Any]) -> dict[str, Any]:
    if "hdet" not in state:
        raise ValueError("this is not a checkpoint of an HDET scheduler: it has no 'hdet' entry")
    own: dict[str, Any] = state["hdet"]
    return own


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


@contextlib.contextmanager
def _untouched_on_error(optimizer: Optimizer) -> Iterator[None]:
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
