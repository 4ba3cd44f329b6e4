"""The methods that all HDET schedulers have beside torch's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hdet_kernels.checks import check_callable
from hdet_kernels.ensemble import Ensemble
from hdet_kernels.fanout.explore import saved_ties
from hdet_kernels.optim.base import FusedOptimizer
from hdet_kernels.optim.rowwise_adagrad import FusedRowWiseAdagrad
from hdet_kernels.schedule.arguments import HDETOptions, Probe
from hdet_kernels.schedule.attachment import own_values_back, unwrapped
from hdet_kernels.schedule.build import learning_rates, name_one_replica
from hdet_kernels.schedule.checkpoint import saving
from hdet_kernels.schedule.checkpoint.packed import unpacked
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.guards import LateEnsemble
from hdet_kernels.schedule.history import HistorySummary, SyncCallback, SyncCallbacks, SyncRecord, flat, value_metrics
from hdet_kernels.schedule.losses import Loss
from hdet_kernels.schedule.scout.phase import Scouting


class WithCycle:
    """The methods that both schedulers have beside torch's own.

    Attributes:
        _options: the keywords of the schedulers, checked.
        _follows_ties: whether the checkpoint that was loaded last decided which groups are tied.
    """

    optimizer: Optimizer
    _last_lr: list[float | Tensor]
    _cycle: Cycle | None = None
    _phase: Scouting | None = None
    #: Whether a process group may still come; None while the scheduler is built, and after a group came.
    _late: LateEnsemble | None = None
    _options: HDETOptions
    _follows_ties = False
    _callbacks: SyncCallbacks | None = None

    @property
    def cycle(self) -> Cycle:
        """The cycle that this scheduler drives."""
        if self._cycle is None:
            raise RuntimeError("the scheduler is still being built")
        if self._late is not None and self._late.arrived:
            self._take_processes()
        return self._cycle

    @property
    def _inner(self) -> Optimizer:
        """The optimizer inside its wrappers."""
        return unwrapped(self.optimizer)

    # Who the replicas are

    def _built(self, given: Ensemble | None) -> None:
        """End the construction with ``ensemble=given``."""
        self._late = LateEnsemble(given, self.cycle.ensemble)
        if not self._late.open:
            self._announce()

    def _settle(self) -> None:
        """Decide who the replicas are, before the first use: the process group that exists by now, or one replica.

        Raises:
            RuntimeError: a group should exist, or was initialised after the decision.
        """
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
        if self._cycle is None or self._begun:  # first: this is looked at before every step
            return
        optimizer = self._inner
        if not isinstance(optimizer, FusedOptimizer | FusedRowWiseAdagrad):
            return
        optimizer.rehome()
        known, now = self._cycle.converger.tensors.buckets, optimizer.buckets
        same_parameters = known is not None and list(map(id, known.params)) == list(map(id, now.params))
        if known is not now and same_parameters:
            with self._built_again():
                pass

    @property
    def _begun(self) -> bool:
        """Whether a step was made, here or in the run of a checkpoint."""
        return self.cycle.begun if self._phase is None else self._phase.begun

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
        if self._phase is not None:
            self._phase.announce()

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
        gradients, after the controller stops. A checkpoint of one process stands for all where it is True. With
        ``max_lr=None``, while a learning rate is looked for, it is True where the model is the one that the run begins
        with. Replicas that begin apart (warm noisy initialisation) are not told from others before the first sync.
        """
        return self.cycle.in_sync if self._phase is None else self._phase.in_sync

    @property
    def scouting(self) -> bool:
        """Whether the run still looks for a learning rate (``max_lr=None``)."""
        return self._phase is not None

    def get_base_lr(self) -> list[float | Tensor]:
        """Return the base learning rate of every parameter group now: the value that replicas are spread around."""
        return self.cycle.spread.base_rates() if self._phase is None else self._phase.spread.base_rates()

    def on_sync(self, callback: SyncCallback, *, every_process: bool | None = None) -> RemovableHandle:
        """Call ``callback(record)`` after every sync, with its :class:`.SyncRecord`.

        It is called at the end of :meth:`step` or :meth:`converge`, when everything is in place for the next cycle, so
        that it may evaluate or save. Scouting rounds and returns to an earlier average are such syncs too. An average
        that overlaps with training is told where it lands. All callbacks are called, in the order in which they came;
        then the exception of one that raised is raised, with the sync complete: catch it and training goes on.
        Callbacks are not part of a checkpoint.

        Args:
            callback: is called with the record.
            every_process: False: only the first process calls it. Default: True, or as the callback's own attribute
                ``every_process`` says: the writers of :mod:`hdet_kernels.integrations.loggers` have it.

        Returns:
            A handle whose ``remove()`` ends this.
        """
        if self._callbacks is None:
            self._callbacks = SyncCallbacks()
        return self._callbacks.add(callback, every_process)

    def _call_callbacks(self) -> None:
        """Call the callbacks with the records that they have not seen."""
        if self.cycle.history.untold:
            records = self.cycle.history.take_untold()
            if self._callbacks is not None:
                ensemble = self.cycle.ensemble
                self._callbacks.call(records, first=(ensemble.replica, ensemble.part) == (0, 0))

    def _check_outside_callbacks(self, method: str) -> None:
        if self._callbacks is not None and self._callbacks.running:
            raise RuntimeError(
                f"scheduler.{method} inside a callback of on_sync(): the replicas are averaged already, and a sync "
                "here would call it again; use consensus() or state_dict() there"
            )

    def metrics(self, *, replicas: bool = True) -> dict[str, float]:
        """Return the numbers of the run under flat names, for a logger. ``docs/usage/loggers.md`` lists them.

        Base values and values of the replicas are those of now, totals are over all syncs, and everything else is of
        the last sync (:meth:`.SyncRecord.metrics`). What is not known, or not finite, is left out. It communicates with
        nobody; where learning rates are tensors on a GPU it waits for them.

        Args:
            replicas: whether every replica has entries of its own.
        """
        spread, summary = (self.cycle if self._phase is None else self._phase).spread, self.history_summary
        names, placed = [hyper.name for hyper in spread.hyperparameters], spread.placement()
        base = dict(zip(names, placed.base.tolist(), strict=True))
        values = dict(zip(names, placed.values.tolist(), strict=True))
        totals = {
            "syncs": summary.syncs,
            "excluded": summary.excluded,
            "returns": summary.undone,
            "seconds": summary.seconds,
            "bytes": summary.bytes,
            "collectives": summary.collectives,
        }
        found = self.history[-1].metrics(replicas=replicas) if self.history else {}
        found |= flat(value_metrics(base, values, replicas=replicas))
        return found | flat({f"total/{name}": value for name, value in totals.items()})

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
        self._settle()
        if self._phase is None:
            self.cycle.window.record(loss, divided_by)
        else:
            self._phase.record(loss, divided_by)

    def use_probe(self, probe: Probe) -> None:
        """Give the scheduler a probe, as if it had been built with ``probe=``. Every replica must do so.

        For frameworks that know the model and the data only after the scheduler is built. A default ``sync_every`` is
        chosen anew: with local gradients it is shorter with a probe.

        Args:
            probe: as ``probe=`` of the scheduler.

        Raises:
            RuntimeError: after the first step.
        """
        check_callable("probe", probe, "probe()", remedy="it takes no arguments and returns a loss")
        if self._begun:
            raise RuntimeError(
                "scheduler.use_probe() after the first step, or after a checkpoint was loaded: replicas were compared "
                "without it; call it before, or build the scheduler with probe="
            )
        with self._built_again(probe=probe):
            pass

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"a {type(self).__name__} belongs to its processes and cannot be copied or pickled: save its state_dict(), "
            "and load it into a scheduler that is built anew"
        )

    def converge(self) -> None:
        """Average the replicas now, wherever in the cycle. Collective: every replica must call it.

        ``outer=`` takes a step here too, unless no step was made since the last average. With ``merge="best"`` the
        probe or the losses since the last sync decide; without any loss it is the mean. With ``max_lr=None`` it raises
        while a learning rate is looked for: the replicas are not to be averaged then.
        """
        self._settle()
        if self._phase is not None:
            raise RuntimeError(
                f"scheduler.converge() at step {self._phase.made}: until step {self._phase.scouted.plan.steps} every "
                "replica tries another learning rate, and there is nothing to average; call it later"
            )
        self._check_outside_callbacks("converge()")
        self.cycle.converge()
        self._call_callbacks()

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        """Hold the averaged model inside a ``with`` block, to evaluate or save it. Collective.

        This replica's own parameters come back afterwards. ``state_dict()`` refers to live tensors: save or clone it
        inside the block. It is the plain mean with ``outer=`` too; with ``merge="best"`` it is the best replica now, or
        the mean where no loss is known. With ``max_lr=None``, while a learning rate is looked for, it is the model that
        the run begins with.
        """
        self._settle()
        return self.cycle.consensus() if self._phase is None else self._phase.consensus()

    # Building the cycle again

    def _new_cycle(self) -> Cycle:
        """Return a cycle by the present options, for an optimizer that has its own values."""
        raise NotImplementedError

    def _attach(self) -> None:
        """Hook the phase, or the cycle if there is none, to the optimizer."""
        raise NotImplementedError

    def _replace_phase(self) -> None:
        """Build the cycle, or the phase before it, by the present options in the place of the one before."""
        own_values_back(self._inner)
        self._take(self._new_cycle())

    def _take(self, cycle: Cycle) -> None:
        """Go on with another cycle, and with the history and the losses of the one before."""
        before = self.cycle
        cycle.history, cycle.window = before.history, before.window
        cycle.write()
        self._cycle = cycle
        self._last_lr = learning_rates(self._inner)
        self._attach()
        cycle.publish()

    @contextlib.contextmanager
    def _built_again(self, **changed: Any) -> Iterator[None]:
        """Build the cycle with other options, before the block. If that or the block raises, all is as before."""
        parts = [] if self._phase is None else self._phase.parts()
        with saving.undone_on_error(self.cycle, self, *parts), self._attached_again_on_error():
            self._options = cast(HDETOptions, {**self._options, **changed})
            self._replace_phase()
            yield

    @contextlib.contextmanager
    def _attached_again_on_error(self) -> Iterator[None]:
        """Attach the phase or the cycle of before again if the block raises after another took its place."""
        phase, cycle = self._phase, self.cycle
        try:
            yield
        except BaseException:
            if self._phase is not phase or self._cycle is not cycle:
                self._phase, self._cycle = phase, cycle
                self._attach()
            raise

    @contextlib.contextmanager
    def _tied_as_in(self, state_dict: object) -> Iterator[None]:
        """Tie the groups as a checkpoint did, for the block that loads it, where ``tie_groups`` leaves that open.

        Groups that were saved apart, by a version that tied none for example, go on apart.
        """
        saved = saved_ties(_config_of(state_dict).get("hyperparameters"))
        here = [hyper.groups for hyper in self.cycle.spread.hyperparameters if hyper.base is None]
        open_to_it = self._options["tie_groups"] == "auto" or self._follows_ties
        same_groups = saved is not None and sorted(sum(saved, ())) == sorted(sum(here, ()))
        if saved == here or not (open_to_it and same_groups):
            yield
            return
        with self._built_again(tie_groups=saved):
            self._follows_ties = True
            yield


def _config_of(state_dict: object) -> dict[str, Any]:
    """Return the settings in a scheduler's state; empty if it is damaged."""
    hdet = unpacked(state_dict.get("hdet")) if isinstance(state_dict, dict) else None
    config = hdet.get("config") if isinstance(hdet, dict) else None
    return config if isinstance(config, dict) else {}
