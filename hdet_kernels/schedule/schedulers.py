"""The schedulers: torch's OneCycleLR, or any torch scheduler, with HDET's cycle around it."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from typing import Any, Literal, Unpack

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from hdet_kernels.checks import check_steps, spell
from hdet_kernels.optim.group_entries import write_entry
from hdet_kernels.schedule import checkpoint
from hdet_kernels.schedule.arguments import check_no_epoch, checked_options, one_cycle_arguments
from hdet_kernels.schedule.attachment import attach, check_schedule_is_own, own_values_back
from hdet_kernels.schedule.build import ScheduleFacts, build_cycle, learning_rates, untouched_on_error
from hdet_kernels.schedule.checked_state import checked, checked_schedule
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.history import HistorySummary, SyncRecord
from hdet_kernels.schedule.loss_window import Loss
from hdet_kernels.schedule.options import HDETOptions, shows_options, with_defaults
from hdet_kernels.schedule.rehearsal import rehearse


class _WithCycle:
    """The methods that both schedulers have beside torch's own."""

    _cycle: Cycle | None = None

    @property
    def cycle(self) -> Cycle:
        """The cycle that this scheduler drives."""
        if self._cycle is None:
            raise RuntimeError("the scheduler is still being built")
        return self._cycle

    @property
    def history(self) -> list[SyncRecord]:
        """The records of the last 1000 syncs, oldest first."""
        return self.cycle.history.records

    @property
    def history_summary(self) -> HistorySummary:
        """Counts, extremes and a curve of all syncs so far, those before :attr:`history` included."""
        return self.cycle.history.summary

    @property
    def sync_every(self) -> int:
        """T, in steps."""
        return self.cycle.run.sync_every

    def get_base_lr(self) -> list[float | Tensor]:
        """Return the base learning rate of every parameter group now: the value that replicas are spread around."""
        return self.cycle.spread.base_rates()

    def record_loss(self, loss: Loss) -> None:
        """Add a training loss to those since the last sync, without waiting for the device.

        Call it any number of times before :meth:`step`: for gradient accumulation, or where a framework calls
        ``step()`` without a loss.

        Args:
            loss: a number or a scalar tensor; with a stack, the losses of its replicas.
        """
        self.cycle.window.record(loss)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"a {type(self).__name__} belongs to its processes and cannot be copied or pickled: save its state_dict(), "
            "and load it into a scheduler that is built anew"
        )

    def converge(self) -> None:
        """Average the replicas now, wherever in the cycle. Collective: every replica must call it.

        ``outer=`` takes a step here too, unless no step was made since the last average. With ``merge="best"`` the
        probe or the losses since the last sync decide; without any loss it is the mean.
        """
        self.cycle.converge()

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        """Hold the averaged model inside a ``with`` block, to evaluate or save it. Collective.

        This replica's own parameters come back afterwards. ``state_dict()`` refers to live tensors: save or clone it
        inside the block. It is the plain mean with ``outer=`` too; with ``merge="best"`` it is the best replica now, or
        the mean where no loss is known.
        """
        return self.cycle.consensus()


class HDETOneCycleLR(_WithCycle, OneCycleLR):
    """torch's ``OneCycleLR`` whose replicas train under a spread of learning rates and are averaged every T steps.

    The arguments up to ``last_epoch`` are torch's, in torch's order. Then, by keyword:

    Args:
        spread: α; replica values lie in base·[1 − α, 1 + α]. 0 is torch's OneCycleLR, bit for bit.
        sync_every: T, the steps between two averages. Default: 1.25 % of the run, or 2.5 % where the training losses of
            replicas with local gradients are compared, at most 1000; where other scalars are explored 2.5 %, at least
            30, or a tenth of the run.
        auto_lr: True for the regression controller, False, or a controller. It lowers a peak learning rate that is
            certainly too high, and undoes what broke, until that peak, or until 30 % of the run if that is later. Then
            all replicas have the same. It moves other scalars from 30 % to 90 %. With False replicas differ to the end.
            It needs losses: ``step(loss)`` or ``record_loss(loss)``. Without any spread it is off.
        trust: "the learning rate is right within this factor", for ``auto_lr=True``. 1: it is never changed, and
            replicas differ to the end. Above 3: it also follows the slopes of the losses, up and down, and a schedule
            that peaks before 15 % of the run is capped by a warm-up until 30 %. None: nothing is known of it.
        probe: returns this replica's loss (of a stack, those of its replicas, as ``stack.losses`` does) on a batch that
            is the same for all replicas. It runs without gradients at every sync at which the controller acts, and
            replaces the training loss there.
        explore: more :class:`hdet_kernels.Explore`.
        gradients: ``"shared"`` (averaged at every step, as DDP does), ``"local"``, or ``"auto"``: found out at every
            sync by comparing the replicas' gradients. A stack knows.
        ensemble: who the replicas are: ``stack.ensemble`` of a :class:`hdet_kernels.ReplicaStack`, or processes.
            Default: the default process group if it is initialised, else a single replica.
        average_state: average the optimizer's moments too: True, False, or ``"auto"``: with local gradients.
        average_buffers: average floating-point buffers (BatchNorm statistics) of ``model``; integer buffers become
            those of the first finite replica.
        model: the model, needed for its buffers only; a stack brings its own.
        bucket_bytes: the most that one collective carries. Default: 512 MiB.
        compress: ``"bf16"`` or ``"int8"``: the difference to the last average travels in that many bits, and the
            rounding error is sent the next time. Costs two copies of the parameters in memory.
        overlap_steps: the average starts at the sync and is applied this many steps later, over connections of its
            own, so that training does not wait. Costs three copies of what is averaged while it is under way.
        backup: keep a copy of what is averaged until all of it has arrived, so that everything is as it was if a peer
            dies in the middle. False saves that memory.
        outer: :class:`hdet_kernels.Outer` (lr, momentum, nesterov): every sync ends with a step of SGD whose gradient
            is the displacement from the last sync to the mean. On local gradients that is DiLoCo. Costs two copies of
            the parameters of one replica. Where replicas begin apart, the first average is a plain mean.
        merge: ``"mean"``, or ``"best"``: at every sync all replicas take parameters, buffers, state and step counts of
            the finite one with the lowest loss (on the probe, which then runs at every sync, or the mean training loss
            since the last one): the exploit step of population-based training.
        seed: of the permutations.
        history_file: a path; the first process appends the record of every sync to it, as a line of JSON. A resumed run
            continues the file. Without it only the last 1000 records are kept, and a summary of all.
    """

    @shows_options
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
        **options: Unpack[HDETOptions],
    ) -> None:
        complete = checked_options(with_defaults(options, type(self).__name__))
        arguments = one_cycle_arguments(
            optimizer,
            max_lr=max_lr,
            total_steps=total_steps,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            pct_start=pct_start,
            anneal_strategy=anneal_strategy,
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            three_phase=three_phase,
            last_epoch=last_epoch,
        )
        with untouched_on_error(optimizer):
            own_values_back(optimizer)
            super().__init__(optimizer, **arguments)
            facts = ScheduleFacts(
                "OneCycleLR", self.last_epoch, self.total_steps, arguments["pct_start"], arguments["cycle_momentum"]
            )
            self._cycle = build_cycle(optimizer, facts, complete)
            self._cycle.write()
            self._last_lr = learning_rates(optimizer)
        attach(self._cycle, self)

    def step(self, loss: Loss | None = None) -> None:
        """Record ``loss``, average the replicas if a sync is due, and set the next learning rates.

        Call it after ``optimizer.step()``. ``loss`` may be left out where :meth:`record_loss` was called, or where
        nothing needs it.
        """
        if self._cycle is None:  # torch's constructor takes the first values of the schedule
            super().step()
            return
        check_no_epoch(loss)
        changed = self._cycle.end_step(loss, self.total_steps)
        super().step()
        if changed:
            self._cycle.write()
        self._cycle.publish()

    def get_lr(self) -> list[float | Tensor]:
        scheduled = super().get_lr()
        return scheduled if self._cycle is None else self._cycle.spread.rates(scheduled)

    def state_dict(self) -> dict[str, Any]:
        state = {key: value for key, value in super().state_dict().items() if key != "_cycle"}
        return {**state, "hdet": checkpoint.state_of(self.cycle)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        hdet = checked(self.cycle, state_dict)
        here = {key: value for key, value in super().state_dict().items() if key != "_cycle"}
        schedule = checked_schedule(here, state_dict, hdet["step"], "scheduler")
        with checkpoint.undone_on_error(self.cycle, self):
            super().load_state_dict(schedule)
            _write_momentum(self)
            checkpoint.restore(self.cycle, hdet)
            self._last_lr = learning_rates(self.optimizer)


class HDETScheduler(_WithCycle, LRScheduler):
    """HDET around any torch learning-rate scheduler: ``HDETScheduler(CosineAnnealingLR(optimizer, 1000), spread=0.3)``.

    Step this scheduler instead of the wrapped one.

    ``auto_lr`` needs the schedule's peak and whether it anneals, and first plays a copy of it to its end. One that
    cannot be copied, or is longer than 100 000 steps, is taken to anneal from the learning rate that it began with.

    Args:
        base_scheduler: the scheduler to wrap.
        total_steps: the length of the run; schedulers that know it (OneCycleLR, CosineAnnealingLR) need not be told.
            Without it pass ``sync_every`` and ``auto_lr=False``, and call ``converge()`` after the last step.
        options: those of :class:`HDETOneCycleLR`.
    """

    @shows_options
    def __init__(
        self, base_scheduler: LRScheduler, *, total_steps: int | None = None, **options: Unpack[HDETOptions]
    ) -> None:
        complete = checked_options(with_defaults(options, type(self).__name__))
        if total_steps is not None:
            total_steps = check_steps("total_steps", total_steps)
        if isinstance(base_scheduler, ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau decides by a metric, and every replica has its own: the replicas would decide "
                "differently; wrap a schedule of steps and let auto_lr adapt it"
            )
        if not isinstance(base_scheduler, LRScheduler):
            raise TypeError(
                f"HDETScheduler wraps a torch LRScheduler, got {spell(base_scheduler)}: pass for example "
                "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)"
            )
        if isinstance(base_scheduler, _WithCycle):
            raise TypeError(f"{type(base_scheduler).__name__} has a cycle of its own; wrap a plain torch scheduler")
        # torch's constructor would take a first step, which the wrapped scheduler has done.
        self.base_scheduler = base_scheduler
        self.optimizer = base_scheduler.optimizer
        one_cycle = isinstance(base_scheduler, OneCycleLR)
        facts = ScheduleFacts(
            f"HDETScheduler around {type(base_scheduler).__name__}",
            getattr(base_scheduler, "last_epoch", 0),
            _run_length(base_scheduler) if total_steps is None else total_steps,
            _peak(base_scheduler),
            getattr(base_scheduler, "cycle_momentum", False),
            # OneCycleLR tells its peak, and it anneals.
            None if one_cycle else partial(rehearse, base_scheduler),
        )
        with untouched_on_error(self.optimizer):
            check_schedule_is_own(self.optimizer, base_scheduler)
            own_values_back(self.optimizer)
            self._cycle = build_cycle(self.optimizer, facts, complete)
            self._cycle.write()
        self._last_lr = learning_rates(self.optimizer)
        attach(self._cycle, base_scheduler)

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """Steps so far."""
        return self.cycle.step

    @property
    def base_lrs(self) -> list[float | Tensor]:  # type: ignore[override]
        """The learning rates that the wrapped scheduler began with."""
        return [group.get("initial_lr", group["lr"]) for group in self.optimizer.param_groups]

    def step(self, loss: Loss | None = None) -> None:
        """Record ``loss``, sync if one is due, and set the next learning rates, as :meth:`HDETOneCycleLR.step`."""
        check_no_epoch(loss)
        # OneCycleLR refuses to go on after its last step; the others do not end.
        last_step = self.base_scheduler.total_steps if isinstance(self.base_scheduler, OneCycleLR) else None
        changed = self.cycle.end_step(loss, last_step)
        groups = self.optimizer.param_groups
        # Chainable schedulers compute the next learning rate from the current one: give them the base back.
        for group, rate in zip(groups, self.cycle.spread.scheduled, strict=True):
            write_entry(group, "lr", rate)
        self.base_scheduler.step()
        for group, rate in zip(groups, self.cycle.spread.rates(learning_rates(self.optimizer)), strict=True):
            write_entry(group, "lr", rate)
        self._last_lr = learning_rates(self.optimizer)
        if changed:
            self.cycle.write()
        self.cycle.publish()

    def get_lr(self) -> list[float | Tensor]:
        return self.cycle.spread.rates(self.cycle.spread.scheduled)

    def state_dict(self) -> dict[str, Any]:
        return {"base_scheduler": self.base_scheduler.state_dict(), "hdet": checkpoint.state_of(self.cycle)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        hdet = checked(self.cycle, state_dict)
        base, here = self.base_scheduler, self.base_scheduler.state_dict()
        of_torch = type(base).__module__.startswith("torch.")
        schedule = checked_schedule(
            here, state_dict.get("base_scheduler"), hdet["step"], "base_scheduler", of_torch=of_torch
        )
        with checkpoint.undone_on_error(self.cycle, self), checkpoint.schedule_loaded(base, schedule):
            _write_momentum(base)
            checkpoint.restore(self.cycle, hdet)
            self._last_lr = learning_rates(self.optimizer)


def _peak(scheduler: LRScheduler) -> float:
    """Return the share of the run at which the learning rate peaks: OneCycleLR's own, else torch's default for it."""
    if isinstance(scheduler, OneCycleLR):
        return float((scheduler._schedule_phases[0]["end_step"] + 1) / scheduler.total_steps)
    return 0.3


def _run_length(scheduler: LRScheduler) -> int | None:
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max)
    return getattr(scheduler, "total_steps", None)


def _write_momentum(scheduler: LRScheduler) -> None:
    """Write the momentum of the current step to the groups, where the schedule sets it: loading a schedule does not."""
    if getattr(scheduler, "cycle_momentum", False):
        for number, group in enumerate(scheduler.optimizer.param_groups):
            for name in ("base_momentum", "max_momentum") if isinstance(scheduler, OneCycleLR) else ():
                if name not in group:
                    raise ValueError(
                        f"parameter group {number} of the optimizer has no {name!r}, which its schedule wrote there: "
                        "load an undamaged checkpoint of the optimizer"
                    )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects step() to call it
            OneCycleLR.get_lr(scheduler) if isinstance(scheduler, OneCycleLR) else scheduler.get_lr()
