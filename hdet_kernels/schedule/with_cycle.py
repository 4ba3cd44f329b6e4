"""The methods that all HDET schedulers have beside torch's own."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.history import HistorySummary, SyncRecord
from hdet_kernels.schedule.loss_window import Loss
from hdet_kernels.schedule.metrics import flat, value_metrics
from hdet_kernels.schedule.scouting import Scouting
from hdet_kernels.schedule.sync_callbacks import SyncCallback, SyncCallbacks


class WithCycle:
    """The methods that both schedulers have beside torch's own."""

    _cycle: Cycle | None = None
    _phase: Scouting | None = None
    _callbacks: SyncCallbacks | None = None

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
        ensemble = self.cycle.ensemble
        return self._callbacks.add(callback, every_process, first=(ensemble.replica, ensemble.part) == (0, 0))

    def _call_callbacks(self) -> None:
        """Call the callbacks with the records that they have not seen."""
        if self.cycle.history.untold:
            records = self.cycle.history.take_untold()
            if self._callbacks is not None:
                self._callbacks.call(records)

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

    def record_loss(self, loss: Loss) -> None:
        """Add a training loss to those since the last sync, without waiting for the device.

        Call it any number of times before :meth:`step`: for gradient accumulation, or where a framework calls
        ``step()`` without a loss.

        Args:
            loss: a number or a scalar tensor; with a stack, the losses of its replicas.
        """
        if self._phase is None:
            self.cycle.window.record(loss)
        else:
            self._phase.record(loss)

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
        return self.cycle.consensus() if self._phase is None else self._phase.consensus()
