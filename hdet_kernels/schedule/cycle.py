"""One cycle of HDET: fan out, train T steps, compare and average the replicas, let the controller move, and again.

The schedulers own a :class:`Cycle` and tell it two things: a step is finished (:meth:`Cycle.end_step`), and what the
schedule says now (:meth:`.Spread.rates`). It does not know how the schedule is computed. The syncs are those of
:class:`.Syncing`; ``checkpoint/`` saves and restores a cycle.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from hdet_kernels.converge import AverageRequest
from hdet_kernels.schedule.gradients import fingerprint
from hdet_kernels.schedule.losses import Loss, checked_loss
from hdet_kernels.schedule.sync import Syncing, caused_by

log = logging.getLogger("hdet_kernels")


class Cycle(Syncing):
    """The state of a run between and at its syncs, in this process. Its arguments are those of :class:`.Syncing`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.first = self.step
        self.started = False  # whether a step was made; the outer optimizer starts from the parameters before it
        self.in_consensus = False  # the parameters are the average now, and not this replica's own
        self.averaged = True  # no step was made since the last average
        self.expects_state = False  # a checkpoint was loaded whose optimizer had state
        self.replaced = False  # another scheduler was built on the optimizer
        self._group_count = len(self.optimizer.param_groups)
        self._write_hyperparameters: Callable[[], None] | None = getattr(self.optimizer, "write_hyperparameters", None)
        self.fan_out()

    @property
    def in_sync(self) -> bool:
        """Whether the parameters in this process are the average of all replicas now."""
        if self.in_consensus or self.averaged or self.ensemble.size == 1:
            return True
        # Replicas that were averaged once, and have equal values and gradients since then, stay equal.
        stays = not self.spread.diverges and self._known_shared() is True and self.overlapping is None
        return stays and self.history.last_step is not None

    @property
    def begun(self) -> bool:
        """Whether a step was made, here or in the run of a checkpoint."""
        return self.started or self.step != self.first

    def fan_out(self) -> None:
        """Give every replica its multipliers for the cycle that begins now."""
        self.spread.begin_cycle(self.run, self.step)
        self._fingerprint = None

    def write(self) -> None:
        """Write this replica's values to the optimizer's groups and the user's setters."""
        self.spread.write(self.optimizer.param_groups)

    def publish(self) -> None:
        """Write the learning rates of this step where the optimizer reads them: by replica, and on the device.

        A step that is part of a captured CUDA graph cannot write its hyperparameter table itself.
        """
        self.spread.write_rates(self.optimizer.param_groups)
        if self._write_hyperparameters is not None:
            self._write_hyperparameters()

    # A step

    def end_step(self, loss: Loss | None, last_step: int | None) -> bool:
        """End a step of the optimizer: record the loss, sync if one is due, and apply an overlapping average if due.

        Raises with nothing changed, except that an average of the sync before may have been applied.

        Args:
            loss: training loss of the step, if it was not recorded before.
            last_step: last step of the schedule, if it has one.

        Returns:
            Whether values changed: then :meth:`write` is due once the schedule has moved on.
        """
        self._check_step(last_step)
        checked = None if loss is None else checked_loss(loss, "the loss", self.ensemble.rows)
        self.steps.check(self.optimizer.param_groups, self.ensemble.rank)
        step = self.step + 1
        syncs = self.run.syncs_at(step)
        lands = self.overlapping is not None and (syncs or step >= self.overlapping.due)
        mark = self.window.mark() if syncs or lands else None
        if checked is not None:
            self.window.add(checked)
        self._check_losses()
        if mark is not None:
            try:
                returned = self.land(step)
                if syncs:
                    self.sync(step, acting=self._acting(step) and not returned)
            except BaseException:
                self.window.reset(mark)
                raise
        self.step = step
        self.averaged = syncs and self.overlapping is None
        self.steps.scheduler_stepped(self.optimizer.param_groups)
        if syncs:
            self.window.clear()
            self.steps.synced()
            self.fan_out()
        return mark is not None

    def _check_step(self, last_step: int | None) -> None:
        if self.replaced:
            raise RuntimeError(
                "the optimizer has another HDET scheduler now, or was released from this one: step the newest scheduler"
            )
        if self.in_consensus:
            raise RuntimeError("scheduler.step() inside scheduler.consensus(): the block is for evaluating and saving")
        if len(self.optimizer.param_groups) != self._group_count:
            raise RuntimeError(
                f"the optimizer has {len(self.optimizer.param_groups)} parameter groups, the scheduler was built for "
                f"{self._group_count}: build the scheduler after the last add_param_group()"
            )
        if last_step is not None and self.step >= last_step:
            raise ValueError(
                f"step {self.before + self.step + 1} is past the end: total_steps is {self.before + last_step}; stop "
                "there, or build the scheduler with the number of steps that you mean to make"
            )

    def _check_losses(self) -> None:
        """Raise if losses decide at a sync and none was ever recorded."""
        if self.probe is not None or self.window.ever:
            return
        record = (
            "none was recorded: call scheduler.step(loss), or scheduler.record_loss(loss) before scheduler.step() "
            "where a framework calls it bare; or pass probe="
        )
        if self.spread.reads_losses:
            name = type(self.spread.controller).__name__
            raise RuntimeError(f"{name} needs losses, and {record}, or auto_lr=False (fan-out and averaging only)")
        if self._takes_best:
            raise RuntimeError(f"merge='best' copies the replica whose loss is lowest, but {record}")

    def before_optimizer_step(self) -> None:
        """Read the parameters before the first step and the gradients before every step. A hook of the optimizer."""
        if not self.started:  # not at construction: weights may be loaded, or noise added, after that
            self.started = True
            self.converger.begin()
            if self.displacement is not None:
                self.displacement.begin()
            if self.undoing is not None:
                self.undoing.keep_start(self.run, self.step)
        self.averaged = False
        if self.expects_state:
            self._check_state()
        if self.displacement is not None:
            self.displacement.measure()
        if self.gradients == "auto" and self.ensemble.size > 1 and self.run.syncs_at(self.step + 1):
            self._fingerprint = fingerprint(self.optimizer.param_groups)

    def _check_state(self) -> None:
        """Warn, once after a checkpoint was loaded, if the optimizer's part of it did not arrive."""
        self.expects_state = False
        if not any(self.optimizer.state.values()):
            log.warning(
                "the scheduler was resumed at step %d, and the optimizer has no state, which it had there: its moments "
                "begin at zero. Load its state_dict() too. torch.distributed.checkpoint loads only into state that "
                "exists: take the optimizer's state_dict from torch.distributed.checkpoint.state_dict.get_state_dict",
                self.before + self.step,
            )

    # Averages between syncs

    def converge(self) -> None:
        """Average all replicas now, wherever in the cycle; the cycle goes on.

        It differs from a sync in two ways: there is no outer step if no step was made since the last average, and
        without any loss ``merge="best"`` is the mean.
        """
        if self.in_consensus:
            raise RuntimeError("cannot average inside scheduler.consensus(): the parameters are averaged already")
        if self.overlapping is not None:
            self.land(self.step)
            self.write()
            self.publish()
        moved = self.started and self.history.last_step != self.before + self.step
        request = AverageRequest(
            "converge", average_state=self._average_state(), known_shared=self._known_shared(), outer=moved
        )
        report, failure = self._report(self.step, compares=self._takes_best)
        with caused_by(failure):
            outcome = self.converger.converge(report, request)
        self.averaged = True
        self._record(self.step, self.step, "manual", self.spread.placement(), outcome)

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Hold the averaged parameters and buffers inside the block, and this replica's own again after it.

        An overlapping average stays under way: the sum of its corrections over the replicas is zero.
        """
        if self.in_consensus:
            raise RuntimeError(
                "scheduler.consensus() inside scheduler.consensus(): the parameters are averaged already"
            )
        report, failure = self._report(self.step, compares=self._takes_best)
        with caused_by(failure), self.converger.consensus(report):
            self.in_consensus = True
            try:
                yield
            finally:
                self.in_consensus = False
