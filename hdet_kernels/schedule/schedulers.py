"""The schedulers: torch's OneCycleLR, or any torch scheduler, with HDET's cycle around it.

Both drive a :class:`.Cycle`: it is told that a step is finished (:meth:`.Cycle.end_step`) and what the schedule says
now. With ``max_lr=None`` a :class:`.Scouting` phase takes the cycle's place until a learning rate is found.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Never

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from hdet_kernels.checks import check_callable, check_flag, check_steps, spell
from hdet_kernels.controller.protocol import Controller
from hdet_kernels.converge import Averaging
from hdet_kernels.ensemble import Ensemble, announced_size
from hdet_kernels.fanout.explore import Explore, TieGroups, saved_ties
from hdet_kernels.fanout.spread import rates_of
from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.optim.group_entries import write_entry
from hdet_kernels.schedule import checkpoint, checkpoint_checks
from hdet_kernels.schedule.arguments import (
    GradientMode,
    HasBuffers,
    Options,
    Probe,
    can_divide,
    check_no_epoch,
    check_scout_used,
    one_cycle_arguments,
    refuse_unknown,
    run_length,
)
from hdet_kernels.schedule.attachment import (
    attach,
    call_after_loading,
    call_before_saving,
    check_schedule_is_own,
    outermost,
    own_values_back,
    untouched_on_error,
    unwrapped,
)
from hdet_kernels.schedule.build import (
    Rehearsal,
    ScheduleFacts,
    below_warm_up,
    build_cycle,
    built_state,
    ensemble_of,
    name_few_looks,
    name_one_replica,
    one_cycle_at,
    rehearse,
    write_momentum,
)
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.guards import LateEnsemble, RivalSchedules
from hdet_kernels.schedule.history import (
    HistorySummary,
    SyncCallback,
    SyncCallbacks,
    SyncRecord,
    flat,
    value_metrics,
)
from hdet_kernels.schedule.losses import Loss
from hdet_kernels.schedule.scout.own_gradients import OwnGradients, can_form_teams
from hdet_kernels.schedule.scout.phase import Scouted, Scouting, ratios_of
from hdet_kernels.schedule.scout.rounds import ScoutSettings, first_bracket, make_plan, middle
from hdet_kernels.stack import StackEnsemble
from hdet_kernels.torch_internals import one_cycle_peak

log = logging.getLogger("hdet_kernels")

#: Attributes of a scheduler that are not part of torch's schedule.
_OWN = (
    *("_cycle", "_phase", "_late", "_scouted", "_arguments", "_options", "_follows_ties", "_callbacks"),
    *("_told_of_saving", "_rivals"),
)


class WithCycle:
    """The methods that both schedulers have beside torch's own."""

    optimizer: Optimizer
    _last_lr: list[float | Tensor]
    _options: Options
    _cycle: Cycle | None = None  # None while the scheduler is built
    _phase: Scouting | None = None  # steps in the place of the cycle
    _late: LateEnsemble | None = None  # None while the scheduler is built, and after a group came
    _follows_ties = False  # the checkpoint that was loaded last decided which groups are tied
    _callbacks: SyncCallbacks | None = None
    _told_of_saving = False  # it was said that state_dict() of the model gave one replica of several
    _rivals: RivalSchedules | None = None  # None while the scheduler is built

    @property
    def cycle(self) -> Cycle:
        """The cycle that this scheduler drives."""
        if self._cycle is None:
            raise RuntimeError("the scheduler is still being built")
        if self._late is not None and self._late.arrived:
            self._take_processes()
        return self._cycle

    @property
    def _part(self) -> Cycle | Scouting:
        """The part of the run that is stepped now: the scouting phase, or the cycle."""
        cycle = self.cycle  # first, because it may build both again
        return cycle if self._phase is None else self._phase

    @property
    def _inner(self) -> Optimizer:
        return unwrapped(self.optimizer)

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

    @property
    def in_sync(self) -> bool:
        """Whether the parameters in this process are the average of all replicas now.

        True before the first step, after a sync or :meth:`converge` until the next step of the optimizer, inside
        :meth:`consensus`, and for a single replica. Also between syncs once replicas no longer differ: with shared
        gradients, after the controller stops, unless the optimizer has numbers of its own in its groups or its state is
        not averaged. A checkpoint of one process stands for all where it is True. With ``max_lr=None``, while a
        learning rate is looked for, it is True where the model is the one that the run begins with. Replicas that begin
        apart (warm noisy initialisation) are not told from others before the first sync.
        """
        return self._part.in_sync

    @property
    def scouting(self) -> bool:
        """Whether the run still looks for a learning rate (``max_lr=None``)."""
        return self._phase is not None

    def get_base_lr(self) -> list[float | Tensor]:
        """Return the base learning rate of every parameter group now: the value that replicas are spread around."""
        return self._part.spread.base_rates()

    def metrics(self, *, replicas: bool = True) -> dict[str, float]:
        """Return the numbers of the run under flat names, for a logger. ``docs/usage/loggers.md`` lists them.

        Base values and values of the replicas are those of now, totals are over all syncs, and everything else is of
        the last sync (:meth:`.SyncRecord.metrics`). What is not known, or not finite, is left out. It communicates with
        nobody; where learning rates are tensors on a GPU it waits for them. ``replicas``: every replica has entries of
        its own.
        """
        check_flag("replicas", replicas)
        spread, summary = self._part.spread, self.history_summary
        names, placed = [hyper.name for hyper in spread.hyperparameters], spread.placement()
        base = dict(zip(names, placed.base.tolist(), strict=True))
        values = dict(zip(names, placed.values.tolist(), strict=True))
        counted = ("syncs", "excluded", "lost", "seconds", "bytes", "collectives")
        totals = {"total/returns": summary.undone, **{f"total/{name}": getattr(summary, name) for name in counted}}
        found = self.history[-1].metrics(replicas=replicas) if self.history else {}
        return found | flat({**value_metrics(base, values, replicas=replicas), **totals})

    def record_loss(self, loss: Loss, *, divided_by: float = 1) -> None:
        """Add a training loss to those since the last sync, without waiting for the device.

        Call it any number of times before :meth:`step`: for gradient accumulation, or where a framework calls
        ``step()`` without a loss. What counts is the mean over all calls.

        Args:
            loss: a number or a scalar tensor; with a stack, the losses of its replicas.
            divided_by: what the loss was divided by before its backward pass: k where gradients are accumulated by
                ``(loss / k).backward()``. The k losses of a step then count as one, and the mean is that of whole
                batches, also where the last step of an epoch has fewer. Leave it out for losses that were not divided.
        """
        self._find_replicas()
        self._part.record(loss, divided_by)

    def converge(self) -> None:
        """Average the replicas now, wherever in the cycle. Collective: every replica must call it.

        ``outer=`` takes a step here too, unless no step was made since the last average. With ``merge="best"`` the
        probe or the losses since the last sync decide; without any loss it is the mean. With ``max_lr=None`` it raises
        while a learning rate is looked for: the replicas are not to be averaged then.
        """
        self._find_replicas()
        self._check_outside_callbacks("converge()")
        if self._part.converge():
            self._begin_schedule_again()
        self._note_rates()
        self._call_callbacks()

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        """Hold the averaged model inside a ``with`` block, to evaluate or save it. Collective.

        This replica's own parameters come back afterwards. ``state_dict()`` refers to live tensors: save or clone it
        inside the block. It is the plain mean with ``outer=`` too; with ``merge="best"`` it is the best replica now, or
        the mean where no loss is known. With ``max_lr=None``, while a learning rate is looked for, it is the model that
        the run begins with. The mode of an optimizer with ``eval()`` and ``train()`` is that of before again, too.
        """
        self._find_replicas()
        return self._part.consensus()

    def use_probe(self, probe: Probe) -> None:
        """Give the scheduler a probe, as if it had been built with ``probe=``. Every replica must do so.

        For frameworks that know the model and the data only after the scheduler is built: it raises after the first
        step. A default ``sync_every`` is chosen anew: with local gradients it is shorter with a probe.
        """
        check_callable("probe", probe, "probe()", takes=0, remedy="it takes no arguments and returns a loss")
        if self._part.begun:
            raise RuntimeError(
                "scheduler.use_probe() after the first step, or after a checkpoint was loaded: replicas were compared "
                "without it; call it before, or build the scheduler with probe="
            )
        with self._built_again(probe=probe):
            pass

    def on_sync(self, callback: SyncCallback, *, every_process: bool | None = None) -> RemovableHandle:
        """Call ``callback(record)`` after every sync, with its :class:`.SyncRecord`.

        It is called at the end of :meth:`step` or :meth:`converge`, when everything is in place for the next cycle, so
        that it may evaluate or save. Scouting rounds and returns to the start are such syncs too. An average
        that overlaps with training is reported where it is applied. All callbacks are called, in the order in which
        they came; then the exception of one that raised is raised, with the sync complete: catch it and training goes
        on. Callbacks are not part of a checkpoint. Returns a handle whose ``remove()`` ends this.

        Args:
            callback: is called with the record.
            every_process: False: only the first process calls it. Default: True, or as the callback's own attribute
                ``every_process`` says: the writers of :mod:`hdet_kernels.integrations.loggers` have it.
        """
        if self._callbacks is None:
            self._callbacks = SyncCallbacks()
        return self._callbacks.add(callback, every_process)

    def _call_callbacks(self) -> None:
        if self.cycle.history.unreported:
            records = self.cycle.history.take_unreported()
            if self._callbacks is not None:
                self._callbacks.call(records, first=self.cycle.first_process)

    def _check_outside_callbacks(self, method: str) -> None:
        if self._callbacks is not None and self._callbacks.running:
            raise RuntimeError(
                f"scheduler.{method} inside a callback of on_sync(): the replicas are averaged already, and a sync "
                "here would call it again; use consensus() or state_dict() there"
            )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"a {type(self).__name__} belongs to its processes and cannot be copied or pickled: save its state_dict(), "
            "and load it into a scheduler that is built anew"
        )

    # What the model does

    def _before_saving(self, *_: object) -> None:
        """Warn, once, if ``state_dict()`` of the model is that of one replica of several. A hook of ``model=``."""
        part = self._cycle if self._phase is None else self._phase
        if self._told_of_saving or part is None or part.replaced or part.in_sync:
            return
        # Without a spread replicas are equal where gradients are shared, which is not known before the first sync.
        if isinstance(part, Cycle) and not part.spread.diverges and part.known_shared is not False:
            return
        self._told_of_saving = True
        log.warning(
            "state_dict() of the model between two syncs: it is that of one of %d replicas, which differ. Call it "
            "in every process inside `with scheduler.consensus():`, where the model is %s, or where scheduler.in_sync "
            "is True",
            part.ensemble.size,
            "their average" if self._phase is None else "the one that the run begins with",
        )

    def _after_loading(self, module: HasBuffers, *_: object) -> None:
        """Notice that weights are loaded after the scheduler was built. A hook of the model."""
        part = self._cycle if self._phase is None else self._phase
        if part is not None and part.start is not None:
            part.start.model_loaded(module)

    # Who the replicas are

    def _built(self) -> None:
        """End the construction: hook the scheduler to the optimizer, and name the replicas if they are known."""
        self._late = LateEnsemble(self._options.ensemble, self.cycle.ensemble)
        self._note_rates()
        if not self._late.open:
            self._announce()
        self._attach()
        call_before_saving(self._options.model, self._before_saving)
        if self._part.start is not None:
            stack = self.cycle.ensemble.stack if isinstance(self.cycle.ensemble, StackEnsemble) else None
            call_after_loading(self._options.model if stack is None else stack, self._after_loading)

    def _note_rates(self) -> None:
        """Note the learning rates that this scheduler has written."""
        groups = self._inner.param_groups if self._cycle is None else self._cycle.optimizer.param_groups
        self._last_lr = rates_of(groups)
        if self._rivals is None:
            self._rivals = RivalSchedules()
        self._rivals.wrote(groups)

    def _before_step(self) -> None:
        """Look at what happened since the last step of the scheduler. Before every step of it and of the optimizer."""
        if self._rivals is not None and self._cycle is not None:
            optimizer = self._cycle.optimizer
            if self._rivals.wrote_since(optimizer.param_groups):
                self._rivals.find(optimizer, own=self, told=self._cycle.first_process)
        self._find_replicas()

    def _find_replicas(self) -> None:
        """Decide who the replicas are, before the first use: the process group that exists by now, or one replica."""
        self._follow_moved_model()
        late = self._late
        if late is None:
            return
        if late.arrived:
            self._take_processes()
        elif late.open:
            late.check_arrived()
            late.open = False
            self._announce()
        else:
            late.check_none_arrived()

    def _follow_moved_model(self) -> None:
        """Build the cycle again if the model was moved before the first step, and its fused optimizer with it."""
        if self._cycle is None or self._part.begun:  # first: this is checked before every step
            return
        optimizer = self._inner
        if not isinstance(optimizer, FusedOptimizer):
            return
        optimizer.rehome()
        known, now = self._cycle.converger.tensors.buckets, optimizer.buckets
        same_parameters = known is not None and list(map(id, known.params)) == list(map(id, now.params))
        if known is not now and same_parameters:
            with self._built_again():
                pass

    def _take_processes(self) -> None:
        """Build the cycle again, with the processes of the default group as replicas."""
        late, self._late = self._late, None
        try:
            with self._built_again():
                pass
        except BaseException:
            self._late = late
            raise
        self._announce()

    def _announce(self) -> None:
        name_one_replica(self.cycle)
        if self._phase is None:
            name_few_looks(self.cycle, self._options.sync_every)
        else:
            self._phase.announce()

    # Building the cycle again

    def _new_cycle(self) -> Cycle:
        """Return a cycle by the present options, for an optimizer that has its own values."""
        raise NotImplementedError

    def _attach(self) -> None:
        """Hook the phase, or the cycle if there is none, to the optimizer."""
        raise NotImplementedError

    def _scheduled(self) -> list[float | Tensor]:
        """Return the schedule's learning rates where the cycle is now, and write its momentum to the groups."""
        raise NotImplementedError

    def _begin_schedule_again(self) -> None:
        """Write the learning rates of the first step again, because the run begins anew between two steps."""
        cycle = self.cycle
        for group, rate in zip(self._inner.param_groups, cycle.spread.rates(self._scheduled()), strict=True):
            write_entry(group, "lr", rate)
        self._note_rates()
        cycle.write()
        cycle.publish()

    def _rebuild(self) -> None:
        """Build the cycle, or the phase before it, by the present options in the place of the one before."""
        own_values_back(self._inner)
        before = self.cycle.start
        self._take(self._new_cycle())
        if before is not None and (start := self.cycle.start) is not None:
            start.take_buffers(before)

    def _take(self, cycle: Cycle) -> None:
        """Go on with another cycle, and with the history and the losses of the one before."""
        before = self.cycle
        cycle.history, cycle.window = before.history, before.window
        cycle.write()
        self._cycle = cycle
        self._note_rates()
        self._attach()
        cycle.publish()

    @contextlib.contextmanager
    def _built_again(self, **changed: Any) -> Iterator[None]:
        """Build the cycle with other options, before the block. If that or the block raises, all is as before."""
        with self._undone_on_error():
            self._options = replace(self._options, **changed)
            self._rebuild()
            yield

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Bring the scheduler, its cycle or phase, and the optimizer back to what they were if the block raises."""
        phase, cycle = self._phase, self.cycle
        parts = [] if phase is None else phase.parts()
        with checkpoint.undone_on_error(cycle, self, *parts):
            try:
                yield
            except BaseException:
                if self._phase is not phase or self._cycle is not cycle:
                    self._phase, self._cycle = phase, cycle
                    self._attach()
                raise

    @contextlib.contextmanager
    def _tied_as_in(self, state_dict: object) -> Iterator[None]:
        """Tie the groups as a checkpoint did, for the block that loads it, where ``tie_groups`` leaves that open."""
        saved = saved_ties(checkpoint.config_of(state_dict).get("hyperparameters"))
        here = [hyper.groups for hyper in self.cycle.spread.hyperparameters if hyper.base is None]
        open_to_it = self._options.tie_groups == "auto" or self._follows_ties
        same_groups = saved is not None and sorted(sum(saved, ())) == sorted(sum(here, ()))
        if saved == here or not (open_to_it and same_groups):
            yield
            return
        with self._built_again(tie_groups=saved):
            self._follows_ties = True
            yield


class HDETOneCycleLR(WithCycle, OneCycleLR):
    """torch's ``OneCycleLR`` whose replicas train under a spread of learning rates and are averaged every T steps.

    The arguments up to ``last_epoch`` are torch's, in torch's order. ``max_lr=None`` is a run without a learning rate:
    for the first 23 % of the steps replicas, and then teams of them, try miniatures of the schedule at learning rates
    of their own. Then everything returns to the start, and the other steps are the run at the learning rate that was
    found (:attr:`scouted`). Parameter groups keep the ratios of their learning rates. Then, by keyword:

    Args:
        spread: α; replica values lie in base·[1 − α, 1 + α]. 0 is torch's OneCycleLR, bit for bit.
        sync_every: T, the steps between two averages. Default: 1.25 % of the run, at most 1000. It is 2.5 % where
            replicas with local gradients are compared by their training losses, and where other scalars are explored,
            with at least 30 steps then, or a tenth of the run.
        auto_lr: True for :class:`hdet_kernels.RegressionController`, False, or a controller. It lowers a learning rate
            that is certainly too high: all replicas return to the start, and the schedule begins again over the steps
            that remain. Where it is in doubt a sixth of it is tried, and all replicas go back if that is no better. It
            does so until the peak of the schedule, or until 30 % of the run if that is later; then all replicas have
            the same, and what breaks is undone until 60 %. It moves other scalars from 30 % to 90 %. With False
            replicas differ to the end. It needs losses: ``step(loss)`` or ``record_loss(loss)``. Without any
            spread it is off.
        trust: "my learning rate is right within this factor". 1: it is never changed, and replicas differ in it to the
            end. Up to 3: it is only lowered, where it is too high. More: it also follows the signs of slopes,
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
        averaging: :class:`hdet_kernels.Averaging`: compression, overlap with training, an outer optimizer, and what
            else concerns the averages. Default: a plain mean.
        model: the model, for its buffers; a stack brings its own. A ``state_dict()`` of it between two syncs, which is
            that of one replica, warns once. With ``max_lr=None`` under DDP it is the DDP model, whose averaging of
            gradients is switched off while a learning rate is looked for.
        seed: of the permutations.
        history_file: a path; the first process appends the record of every sync to it, as a line of JSON. A resumed run
            continues the file, and ``hdet-kernels report`` makes a page of it. Without it only the last 1000 records
            are kept, and a summary of all.
        scout: :class:`hdet_kernels.ScoutSettings`, the constants of the search with ``max_lr=None``.
    """

    _arguments: dict[str, Any]  # those of torch's OneCycleLR, checked
    _scouted: Scouted | None = None  # the plan of a run with max_lr=None, and what was found

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
        *,
        spread: float = 0.3,
        sync_every: int | None = None,
        auto_lr: bool | Controller = True,
        trust: float | None = 3.0,
        probe: Probe | None = None,
        explore: Iterable[Explore] = (),
        tie_groups: TieGroups = "auto",
        gradients: GradientMode = "auto",
        ensemble: Ensemble | None = None,
        averaging: Averaging | None = None,
        model: HasBuffers | None = None,
        seed: int = 0,
        history_file: str | os.PathLike[str] | None = None,
        scout: ScoutSettings | None = None,
        **unknown: Never,
    ) -> None:
        given = locals()
        refuse_unknown(unknown, type(self).__name__)
        self._options = Options.among(given)
        self._arguments = one_cycle_arguments(unwrapped(optimizer), given)
        check_scout_used(max_lr is None, scout)
        self.optimizer = outermost(optimizer)
        with untouched_on_error(self.optimizer):
            own_values_back(self._inner)
            schedule = self._arguments
            if max_lr is None:
                self._scouted = self._planned()
                schedule = schedule | self._scouted.run_arguments(middle(first_bracket(self._scouted.settings)))
            super().__init__(self.optimizer, **schedule)
            self._cycle = self._new_cycle()
            if self._scouted is None:
                self._cycle.write()
            else:
                self._phase = self._new_phase(self._scouted)
            self._note_rates()
        self._built()

    @property
    def scouted(self) -> float | None:
        """The peak learning rate that a run with ``max_lr=None`` found: of the parameter group with the largest.

        None before the end of the search, and where ``max_lr`` was given.
        """
        return None if self._scouted is None else self._scouted.found

    def step(self, loss: Loss | None = None) -> None:
        """Record ``loss``, average the replicas if a sync is due, and set the next learning rates.

        Call it after ``optimizer.step()``. ``loss`` may be left out where :meth:`record_loss` was called, or where
        nothing needs it.
        """
        if self._cycle is None:  # torch's constructor takes the first values of the schedule
            super().step()
            return
        check_no_epoch(loss)
        self._before_step()
        self._check_outside_callbacks("step()")
        if (phase := self._phase) is not None:
            phase.end_step(loss)
            if phase.scouted.found is not None:
                self._begin_run(phase.scouted)
            self._note_rates()
        else:
            cycle = self._cycle
            changed = cycle.end_step(loss, self.total_steps)
            super().step()
            if changed:
                cycle.write()
            cycle.publish()
            self._note_rates()
        self._call_callbacks()

    def get_lr(self) -> list[float | Tensor]:
        if self._cycle is None:
            return super().get_lr()
        if self._phase is not None:
            return self._phase.spread.rates(self._phase.spread.scheduled)
        return self._cycle.spread.rates(self._scheduled())

    def _scheduled(self) -> list[float | Tensor]:
        # Where the run did not begin again torch computes it as ever, with no more work at every step.
        return one_cycle_at(self, self.cycle.position) if self.cycle.origin else super().get_lr()

    def _new_cycle(self) -> Cycle:
        before = 0 if self._scouted is None else self._scouted.plan.steps
        peak, cycle_momentum = self._arguments["pct_start"], self._arguments["cycle_momentum"]
        facts = ScheduleFacts("OneCycleLR", self.last_epoch, self.total_steps, peak, cycle_momentum, before=before)
        return build_cycle(self.optimizer, facts, self._options)

    def _attach(self) -> None:
        if self._phase is None:
            attach(self.cycle, self, before=self._before_step)
        else:
            attach(self._phase, self, before=self._before_step, at_end=self._phase.own.end)
            self._phase.own.begin()

    # The scouting phase

    def _planned(self) -> Scouted:
        settings, given = self._options.scout or ScoutSettings(), self._options.ensemble
        ensemble = ensemble_of(self._inner.param_groups, given)
        # Before the process group exists the plan is that of as many processes as were announced.
        size = announced_size() if LateEnsemble(given, ensemble).open else ensemble.size
        workable = partial(can_divide, self._arguments["pct_start"])
        teams = can_form_teams(ensemble, self._options.model)
        plan = make_plan(run_length(self._arguments), size, settings, teams=teams, workable=workable)
        return Scouted(plan, settings, ratios_of(self._inner))

    def _new_phase(self, scouted: Scouted) -> Scouting:
        model, gradients = self._options.model, self._options.gradients
        own = OwnGradients(self._inner, self.cycle.ensemble, model, gradients, teams=scouted.plan.teams > 0)
        return Scouting(self.cycle, scouted, own, self.optimizer, self._arguments)

    def _rebuild(self) -> None:
        before = self._phase
        if before is None or self._scouted is None:
            super()._rebuild()
            return
        history = self.cycle.history
        own_values_back(self._inner)
        self._cycle = self._new_cycle()
        self._cycle.history = history
        self._phase = self._new_phase(self._scouted)
        self._phase.replace(before)
        self._note_rates()
        self._attach()

    def _begin_run(self, scouted: Scouted) -> None:
        """Begin the run at the learning rate that was found: torch's schedule at its first step, and a new cycle."""
        own_values_back(self._inner)
        self._phase = None
        self.last_epoch, self._step_count = 0, 1
        groups = self._inner.param_groups
        for group, peak in zip(groups, scouted.rates(scouted.found or 0.0), strict=True):
            group["max_lr"], group["initial_lr"] = peak, peak / self._arguments["div_factor"]
            group["min_lr"] = group["initial_lr"] / self._arguments["final_div_factor"]
        self.base_lrs = [group["initial_lr"] for group in groups]
        for group, rate in zip(groups, one_cycle_at(self, 0), strict=True):
            write_entry(group, "lr", rate)
        self._take(self._new_cycle())

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        cycle = self.cycle  # first, because it may build the phase again
        schedule = self._schedule_state() if self._phase is None else copy.deepcopy(self._phase.schedule.state_dict())
        state = {**schedule, "hdet": checkpoint.packed(checkpoint.state_of(cycle))}
        if self._scouted is not None:
            state["scout"] = checkpoint.packed(checkpoint.scout_state(self._scouted, self._phase))
        return state

    def _schedule_state(self) -> dict[str, Any]:
        """Return a copy of the state of torch's schedule alone: DCP writes into lists and tensors when it loads."""
        return copy.deepcopy({key: value for key, value in super().state_dict().items() if key not in _OWN})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._find_replicas()
        with self._tied_as_in(state_dict):
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        scout = checkpoint_checks.checked_scout(self._scouted, self.cycle, state_dict)
        hdet = checkpoint_checks.checked(self.cycle, state_dict)
        scouted, phase = self._scouted, None
        if scout is not None and scouted is not None:
            scouted, phase = Scouted(scouted.plan, scouted.settings, scout.ratios, scout.found), scout.phase
        if phase is None or scouted is None:
            made = hdet.origin + hdet.step
            schedule = checkpoint_checks.checked_schedule(self._schedule_state(), state_dict, made, "scheduler")
        else:
            miniature = scouted.round_arguments(phase.round, phase.bracket)
            as_built = built_state(self._inner, {**self._arguments, **miniature})
            schedule = checkpoint_checks.checked_schedule(as_built, state_dict, phase.step, "scheduler")
        with self._undone_on_error():
            self._scouted = scouted
            if phase is None or scouted is None:
                if scouted is not None:
                    self._begin_run(scouted)
                super().load_state_dict(schedule)
                checkpoint.restore(self.cycle, hdet)
                write_momentum(self, self.cycle.position)
            else:
                if self._phase is None:  # it is over here
                    own_values_back(self._inner)
                    self._phase = self._new_phase(scouted)
                    self._attach()
                self._phase.scouted = scouted
                checkpoint.restore(self.cycle, hdet)
                self._phase.load_state_dict(checkpoint.to_plain(phase), schedule)
            self._note_rates()
        self.cycle.steps.begin_anew()


class HDETScheduler(WithCycle, LRScheduler):
    """HDET around any torch learning-rate scheduler: ``HDETScheduler(CosineAnnealingLR(optimizer, 1000), spread=0.3)``.

    Step this scheduler instead of the wrapped one.

    ``auto_lr`` needs the schedule's peak and whether it anneals, and first plays a copy of it to its end. One that
    cannot be copied, or is longer than 100 000 steps, is taken to anneal from the learning rate that it began with.

    Args:
        base_scheduler: the scheduler to wrap.
        total_steps: the length of the run; schedulers that know it (OneCycleLR, CosineAnnealingLR) need not be told.
            Without it pass ``sync_every`` and ``auto_lr=False``, and call ``converge()`` after the last step.

    The other keywords are those of :class:`HDETOneCycleLR`. Where training broke, a schedule that was played begins
    again over the steps that remain, and any other goes on below a warm-up.
    """

    _played: Rehearsal | None = None  # the wrapped schedule, played to its end

    def __init__(
        self,
        base_scheduler: LRScheduler,
        *,
        total_steps: int | None = None,
        spread: float = 0.3,
        sync_every: int | None = None,
        auto_lr: bool | Controller = True,
        trust: float | None = 3.0,
        probe: Probe | None = None,
        explore: Iterable[Explore] = (),
        tie_groups: TieGroups = "auto",
        gradients: GradientMode = "auto",
        ensemble: Ensemble | None = None,
        averaging: Averaging | None = None,
        model: HasBuffers | None = None,
        seed: int = 0,
        history_file: str | os.PathLike[str] | None = None,
        scout: ScoutSettings | None = None,
        **unknown: Never,
    ) -> None:
        given = locals()
        refuse_unknown(unknown, type(self).__name__)
        self._options = Options.among(given)
        check_scout_used(False, scout)
        self._total_steps = None if total_steps is None else check_steps("total_steps", total_steps)
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
        check_schedule_is_own(self._inner, base_scheduler)
        with untouched_on_error(self.optimizer):
            own_values_back(self._inner)
            self._cycle = self._new_cycle()
            self._cycle.write()
        self._note_rates()
        self._built()

    def _new_cycle(self) -> Cycle:
        base, total_steps = self.base_scheduler, self._total_steps
        facts = ScheduleFacts(
            f"HDETScheduler around {type(base).__name__}",
            getattr(base, "last_epoch", 0),
            _run_length(base) if total_steps is None else total_steps,
            # Of others it is not known: torch's default for OneCycleLR.
            one_cycle_peak(base) if isinstance(base, OneCycleLR) else 0.3,
            getattr(base, "cycle_momentum", False),
            # OneCycleLR tells its peak, and it anneals.
            None if isinstance(base, OneCycleLR) else self._rehearsed,
        )
        return build_cycle(self.optimizer, facts, self._options)

    def _rehearsed(self, total_steps: int) -> Rehearsal | None:
        self._played = rehearse(self.base_scheduler, total_steps)
        return self._played

    def _attach(self) -> None:
        attach(self.cycle, self.base_scheduler, before=self._before_step)

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        return self.cycle.made

    @property
    def base_lrs(self) -> list[float | Tensor]:  # type: ignore[override]
        """The learning rates that the wrapped scheduler began with."""
        return [group.get("initial_lr", group["lr"]) for group in self.optimizer.param_groups]

    def step(self, loss: Loss | None = None) -> None:
        """Record ``loss``, sync if one is due, and set the next learning rates, as :meth:`HDETOneCycleLR.step`."""
        check_no_epoch(loss)
        self._before_step()
        self._check_outside_callbacks("step()")
        # OneCycleLR refuses to go on after its last step; the others do not end.
        last_step = self.base_scheduler.total_steps if isinstance(self.base_scheduler, OneCycleLR) else None
        cycle = self.cycle
        changed = cycle.end_step(loss, last_step)
        groups = self._inner.param_groups
        # Chainable schedulers compute the next learning rate from the current one: give them their own back.
        if cycle.origin:
            cycle.spread.scheduled = self.base_scheduler.get_last_lr()
        cycle.spread.give_back(groups)
        self.base_scheduler.step()
        for group, rate in zip(groups, cycle.spread.rates(self._scheduled()), strict=True):
            write_entry(group, "lr", rate)
        self._note_rates()
        if changed:
            cycle.write()
        cycle.publish()
        self._call_callbacks()

    def get_lr(self) -> list[float | Tensor]:
        return self.cycle.spread.rates(self.cycle.spread.scheduled)

    def _scheduled(self) -> list[float | Tensor]:
        """Return the learning rates of the wrapped schedule, which has made its step, where the cycle is now.

        Where the run began again, OneCycleLR is computed there, and others are read from what was played ahead. One
        that was not played from the first step of the run goes on, below a warm-up.
        """
        now, cycle = rates_of(self._inner.param_groups), self.cycle
        if not cycle.origin:
            return now
        if isinstance(self.base_scheduler, OneCycleLR):
            return one_cycle_at(self.base_scheduler, cycle.position)
        if self._played is not None and self._played.first <= cycle.first:
            return self._played.at(cycle.position - self._played.first, like=now)
        if cycle.first_process and not cycle.step:  # the run begins anew now
            log.warning(
                "%s cannot be played from the first step of the run, and goes on where it is, below a warm-up",
                type(self.base_scheduler).__name__,
            )
        return below_warm_up(now, self._inner.param_groups, cycle)

    def state_dict(self) -> dict[str, Any]:
        cycle = self.cycle  # first, because it may write other learning rates
        schedule = self.base_scheduler.state_dict()
        return {"base_scheduler": checkpoint.packed(schedule), "hdet": checkpoint.packed(checkpoint.state_of(cycle))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._find_replicas()
        with self._tied_as_in(state_dict):
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        hdet = checkpoint_checks.checked(self.cycle, state_dict)
        base, saved = self.base_scheduler, checkpoint.unpacked(state_dict.get("base_scheduler"))
        of_torch = type(base).__module__.startswith("torch.")
        schedule = checkpoint_checks.checked_schedule(
            base.state_dict(), saved, hdet.origin + hdet.step, "base_scheduler", of_torch=of_torch
        )
        with self._undone_on_error(), checkpoint.schedule_loaded(base, schedule):
            checkpoint.restore(self.cycle, hdet)
            write_momentum(base, self.cycle.position)
            self._note_rates()
        self.cycle.steps.begin_anew()


def _run_length(scheduler: LRScheduler) -> int | None:
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max) if scheduler.T_max < math.inf else None
    return getattr(scheduler, "total_steps", None)
