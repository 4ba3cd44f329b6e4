"""The schedulers: torch's OneCycleLR, or any torch scheduler, with HDET's cycle around it."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, Unpack

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from hdet_kernels.checks import check_steps, spell
from hdet_kernels.optim.group_entries import write_entry
from hdet_kernels.schedule.arguments import (
    HDETOptions,
    check_no_epoch,
    check_scout_used,
    checked_options,
    one_cycle_arguments,
    shows_options,
    with_defaults,
)
from hdet_kernels.schedule.attachment import (
    attach,
    check_schedule_is_own,
    outermost,
    own_values_back,
    untouched_on_error,
    unwrapped,
)
from hdet_kernels.schedule.build import ScheduleFacts, build_cycle, learning_rates, rehearse
from hdet_kernels.schedule.checkpoint import saving
from hdet_kernels.schedule.checkpoint.checked_state import checked, checked_schedule
from hdet_kernels.schedule.checkpoint.packed import packed, unpacked
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.losses import Loss
from hdet_kernels.schedule.one_cycle import ScoutingOneCycleLR, write_momentum
from hdet_kernels.schedule.with_cycle import WithCycle
from hdet_kernels.torch_internals import one_cycle_peak


class HDETOneCycleLR(ScoutingOneCycleLR):
    """torch's ``OneCycleLR`` whose replicas train under a spread of learning rates and are averaged every T steps.

    The arguments up to ``last_epoch`` are torch's, in torch's order. ``max_lr=None`` is a run without a learning rate:
    for the first 15 % of the steps every replica tries miniatures of the schedule at learning rates of its own. Then
    everything returns to the start, and the other steps are the run at the learning rate that was found
    (:attr:`scouted`). Parameter groups keep the ratios of their learning rates. Then, by keyword:

    Args:
        spread: α; replica values lie in base·[1 − α, 1 + α]. 0 is torch's OneCycleLR, bit for bit.
        sync_every: T, the steps between two averages. Default: 1.25 % of the run, at most 1000. It is 2.5 % where
            replicas with local gradients are compared by their training losses, and where other scalars are explored,
            with at least 30 steps then, or a tenth of the run.
        auto_lr: True for :class:`hdet_kernels.RegressionController`, False, or a controller. It lowers a learning rate
            that is certainly too high, and has all replicas return to the last sound average where training broke, at
            every sync until the peak of the schedule, or until 30 % of the run if that is later. Then it leaves it,
            and all replicas have the same. It moves other scalars from 30 % to 90 %. With False replicas differ to the
            end. It needs losses: ``step(loss)`` or ``record_loss(loss)``. Without any spread it is off.
        trust: "my learning rate is right within this factor". 1: it is never changed, and replicas differ in it to the
            end. Up to 3: it is lowered only where it is certainly too high. More: it also follows the signs of slopes,
            by a factor of 55 at most, and a schedule that peaks before 15 % of the run is capped by a warm-up until
            30 %. None: nothing is known of it. For ``auto_lr=True``; a controller has a trust of its own.
        probe: returns this replica's loss (of a stack, those of its replicas, as ``stack.losses`` does) on a batch that
            is the same for all replicas. It runs without gradients at every sync at which the controller acts, and
            replaces the training loss there. With shared gradients slopes of learning rates come from the gradients,
            and need none.
        explore: more :class:`hdet_kernels.Explore`.
        tie_groups: which parameter groups have one learning rate: one multiplier, one slope and one decision of the
            controller, named after the first of them. ``"auto"``: those whose hyperparameters are equal, except for
            weight decay, and with a checkpoint those that were tied when it was saved. True: all, at the ratios of
            their learning rates. False: none. Or a list of lists of groups, ``[[0, 1], [2, 3]]``.
        gradients: ``"shared"`` (averaged at every step, as DDP does), ``"local"``, or ``"auto"``: found out at every
            sync by comparing the replicas' gradients. A stack knows.
        ensemble: who the replicas are: ``stack.ensemble`` of a :class:`hdet_kernels.ReplicaStack`, or processes.
            Default: the default process group if it is initialised by the first step, else a single replica.
        average_state: average the optimizer's moments too: True, False, or ``"auto"``: with local gradients.
        average_buffers: average floating-point buffers (BatchNorm statistics) of ``model``; integer buffers become
            those of the first finite replica.
        model: the model, for its buffers; a stack brings its own. With ``max_lr=None`` under DDP it is the DDP model,
            whose averaging of gradients is switched off while a learning rate is looked for.
        bucket_bytes: the most that one collective carries. Default: 512 MiB.
        compress: ``"bf16"`` or ``"int8"``: the difference to the last average travels in that many bits, and the
            rounding error is sent the next time. Costs two copies of the parameters in memory.
        overlap_steps: the average starts at the sync and is applied this many steps later, over connections of its
            own, so that training does not wait. Costs three copies of what is averaged while it is under way.
        backup: keep a copy of what is averaged until all of it has arrived, so that everything is as it was if a peer
            dies in the middle. False saves that memory; over gloo, between the syncs.
        outer: :class:`hdet_kernels.Outer` (lr, momentum, nesterov): every sync ends with a step of SGD whose gradient
            is the displacement from the last sync to the mean. On local gradients that is DiLoCo. Costs two copies of
            the parameters of one replica. Where replicas begin apart, the first average is a plain mean.
        merge: ``"mean"``, or ``"best"``: at every sync all replicas take parameters, buffers, state and step counts of
            the finite one with the lowest loss (on the probe, which then runs at every sync, or the mean training loss
            since the last one): the exploit step of population-based training.
        seed: of the permutations.
        history_file: a path; the first process appends the record of every sync to it, as a line of JSON. A resumed run
            continues the file, and ``hdet-kernels report`` makes a page of it. Without it only the last 1000 records
            are kept, and a summary of all.
        scout: :class:`hdet_kernels.ScoutSettings`, the constants of the search with ``max_lr=None``.
    """

    @shows_options
    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | list[float] | None,
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
            unwrapped(optimizer),
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
        check_scout_used(max_lr is None, complete["scout"])
        self._arguments, self._options = arguments, complete
        self.optimizer = outermost(optimizer)
        with untouched_on_error(self.optimizer):
            own_values_back(self._inner)
            self._begin()
        self._built(complete["ensemble"])
        self._attach()


class HDETScheduler(WithCycle, LRScheduler):
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
        check_scout_used(False, complete["scout"])
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
        if isinstance(base_scheduler, WithCycle):
            raise TypeError(f"{type(base_scheduler).__name__} has a cycle of its own; wrap a plain torch scheduler")
        # torch's constructor would take a first step, which the wrapped scheduler has done.
        self.base_scheduler = base_scheduler
        self.optimizer = base_scheduler.optimizer
        self._options, self._total_steps = complete, total_steps
        check_schedule_is_own(self._inner, base_scheduler)
        with untouched_on_error(self.optimizer):
            own_values_back(self._inner)
            self._cycle = self._new_cycle()
            self._cycle.write()
        self._last_lr = learning_rates(self._inner)
        self._built(complete["ensemble"])
        self._attach()

    def _new_cycle(self) -> Cycle:
        base, total_steps = self.base_scheduler, self._total_steps
        facts = ScheduleFacts(
            f"HDETScheduler around {type(base).__name__}",
            getattr(base, "last_epoch", 0),
            _run_length(base) if total_steps is None else total_steps,
            _peak(base),
            getattr(base, "cycle_momentum", False),
            # OneCycleLR tells its peak, and it anneals.
            None if isinstance(base, OneCycleLR) else partial(rehearse, base),
        )
        return build_cycle(self._inner, facts, self._options)

    def _attach(self) -> None:
        attach(self.cycle, self.base_scheduler, before=self._settle)

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
        self._settle()
        self._check_outside_callbacks("step()")
        # OneCycleLR refuses to go on after its last step; the others do not end.
        last_step = self.base_scheduler.total_steps if isinstance(self.base_scheduler, OneCycleLR) else None
        changed = self.cycle.end_step(loss, last_step)
        groups = self._inner.param_groups
        # Chainable schedulers compute the next learning rate from the current one: give them the base back.
        self.cycle.spread.give_back(groups)
        self.base_scheduler.step()
        for group, rate in zip(groups, self.cycle.spread.rates(learning_rates(self._inner)), strict=True):
            write_entry(group, "lr", rate)
        self._last_lr = learning_rates(self._inner)
        if changed:
            self.cycle.write()
        self.cycle.publish()
        self._call_callbacks()

    def get_lr(self) -> list[float | Tensor]:
        return self.cycle.spread.rates(self.cycle.spread.scheduled)

    def state_dict(self) -> dict[str, Any]:
        cycle = self.cycle  # first, because it may write other learning rates
        return {"base_scheduler": packed(self.base_scheduler.state_dict()), "hdet": packed(saving.state_of(cycle))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._settle()
        with self._tied_as_in(state_dict):
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        hdet = checked(self.cycle, state_dict)
        base, here = self.base_scheduler, self.base_scheduler.state_dict()
        of_torch = type(base).__module__.startswith("torch.")
        schedule = checked_schedule(
            here, unpacked(state_dict.get("base_scheduler")), hdet["step"], "base_scheduler", of_torch=of_torch
        )
        with saving.undone_on_error(self.cycle, self), saving.schedule_loaded(base, schedule):
            write_momentum(base)
            saving.restore(self.cycle, hdet)
            self._last_lr = learning_rates(self._inner)
        self.cycle.steps.begin_anew()


def _peak(scheduler: LRScheduler) -> float:
    """Return the share of the run at which the learning rate peaks: OneCycleLR's own, else torch's default for it."""
    if isinstance(scheduler, OneCycleLR):
        return one_cycle_peak(scheduler)
    return 0.3


def _run_length(scheduler: LRScheduler) -> int | None:
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max)
    return getattr(scheduler, "total_steps", None)
