"""The methods that all HDET schedulers have beside torch's own."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.ensemble import Ensemble
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.history import HistorySummary, SyncRecord
from hdet_kernels.schedule.late_ensemble import LateEnsemble, name_one_replica
from hdet_kernels.schedule.loss_window import Loss
from hdet_kernels.schedule.scouting import Scouting
from hdet_kernels.schedule.wrapped import unwrapped


class WithCycle:
    """The methods that both schedulers have beside torch's own."""

    _cycle: Cycle | None = None
    _phase: Scouting | None = None
    #: Whether a process group may still come; None while the scheduler is built, and after a group came.
    _late: LateEnsemble | None = None
    optimizer: Optimizer

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

    def _take_processes(self) -> None:
        """Build the cycle again, with the processes of the default group as replicas."""
        late, self._late = self._late, None
        try:
            self._build_again()
        except BaseException:
            self._late = late
            raise
        self._announce()

    def _build_again(self) -> None:
        raise NotImplementedError

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

    def record_loss(self, loss: Loss) -> None:
        """Add a training loss to those since the last sync, without waiting for the device.

        Call it any number of times before :meth:`step`: for gradient accumulation, or where a framework calls
        ``step()`` without a loss.

        Args:
            loss: a number or a scalar tensor; with a stack, the losses of its replicas.
        """
        self._settle()
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
        self._settle()
        if self._phase is not None:
            raise RuntimeError(
                f"scheduler.converge() at step {self._phase.made}: until step {self._phase.scouted.plan.steps} every "
                "replica tries another learning rate, and there is nothing to average; call it later"
            )
        self.cycle.converge()

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        """Hold the averaged model inside a ``with`` block, to evaluate or save it. Collective.

        This replica's own parameters come back afterwards. ``state_dict()`` refers to live tensors: save or clone it
        inside the block. It is the plain mean with ``outer=`` too; with ``merge="best"`` it is the best replica now, or
        the mean where no loss is known. With ``max_lr=None``, while a learning rate is looked for, it is the model that
        the run begins with.
        """
        self._settle()
        return self.cycle.consensus() if self._phase is None else self._phase.consensus()
