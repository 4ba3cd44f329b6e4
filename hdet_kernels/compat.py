"""The class that the paper's authors published, with its arguments and names, and without its defects.

It is a frontend of its own: torch's OneCycleLR here, and a cycle by the names of :mod:`hdet_kernels.frontend` alone in
``published_cycle.py``.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.hooks import RemovableHandle

from hdet_kernels.frontend import (
    Run,
    SoftmaxController,
    SyncRecord,
    check_flag,
    check_number,
    check_positive,
    check_share,
    check_whole,
    default_ensemble,
    release,
)
from hdet_kernels.published_cycle import PublishedCycle

log = logging.getLogger("hdet_kernels")


class OneCycleAutoLR(OneCycleLR):
    """``OneCycleAutoLR`` of the paper's authors, as a frontend of its own.

    Arguments, their order and their defaults are the published ones, and so is ``step(loss)``. It differs where the
    published class does not do what it was meant to do: the spread reaches the optimizer from the first step, replicas
    are averaged also with ``enable_auto_lr=False``, the learning rate decays to OneCycle's floor, every rank draws the
    same permutation, no global generator is reseeded, and the average takes a few collectives.

    ``rank`` and ``world_size`` are those of the process group if one is initialised, whatever is passed.
    """

    _cycle: PublishedCycle | None = None

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
        auto_lr_warmup_steps: int = 100_000,
        ensemble_lr_spread_ratio: float = 0.0,
        model_sync_interval: int = 1000,
        rank: int = 0,
        world_size: int = 1,
        enable_auto_lr: bool = False,
        loss_scale: float = 0.002,
        lr_of_lr: float = 0.5,
        momentum_of_lr: float = 0.9,
    ) -> None:
        check_whole("auto_lr_warmup_steps", auto_lr_warmup_steps, at_least=0)
        spread = check_number("ensemble_lr_spread_ratio", ensemble_lr_spread_ratio, at_least=0, below=1)
        sync_every = check_whole("model_sync_interval", model_sync_interval, at_least=1)
        check_flag("enable_auto_lr", enable_auto_lr)
        check_positive("loss_scale", loss_scale)
        check_positive("lr_of_lr", lr_of_lr)
        check_share("momentum_of_lr", momentum_of_lr, below_one=True)
        _check_place(check_whole("rank", rank, at_least=0), check_whole("world_size", world_size, at_least=1))
        controller = SoftmaxController(auto_lr_warmup_steps, scale=loss_scale, rate=lr_of_lr, beta=momentum_of_lr)
        self.enable_auto_lr = bool(enable_auto_lr)
        self.ensemble_lr_spread_ratio, self.model_sync_interval = spread, sync_every
        release(optimizer)  # an HDET scheduler that it had before
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
        floors = tuple(float(group["min_lr"]) for group in optimizer.param_groups)
        run = Run(self.total_steps, sync_every, pct_start, floors)
        chosen = controller if enable_auto_lr else None
        self._cycle = PublishedCycle(optimizer, run, chosen, spread, self.last_epoch)
        self._follow(self._cycle)

    def step(self, loss: float | Tensor | None = None) -> None:
        """Record ``loss``, average the replicas if a sync is due, and set the next learning rates.

        Call it after ``optimizer.step()``. ``loss`` may be left out where :meth:`record_loss` was called, or where
        nothing needs it.
        """
        if self._cycle is None:  # torch's constructor takes the first values of the schedule
            super().step()
            return
        if isinstance(loss, int) and not isinstance(loss, bool):
            raise TypeError(f"step({loss}) looks like torch's step(epoch), but takes the loss: call step(float(loss))")
        if self._cycle.step >= self.total_steps:
            raise ValueError(
                f"step {self._cycle.step + 1} is past the end: total_steps is {self.total_steps}; stop there, or build "
                "the scheduler with the number of steps that you mean to make"
            )
        synced = self._cycle.end_step(loss)
        super().step()
        self._follow(self._cycle)
        if synced:
            self._cycle.tell()

    def _follow(self, cycle: PublishedCycle) -> None:
        self._last_lr = cycle.follow()

    @property
    def cycle(self) -> PublishedCycle:
        """The cycle that this scheduler drives."""
        if self._cycle is None:
            raise RuntimeError("the scheduler is still being built")
        return self._cycle

    @property
    def rank(self) -> int:
        """The number of this replica."""
        return self.cycle.ensemble.replica

    @property
    def world_size(self) -> int:
        """The number of replicas."""
        return self.cycle.ensemble.size

    @property
    def history(self) -> list[SyncRecord]:
        """The records of the last 1000 syncs, oldest first."""
        return self.cycle.history

    @property
    def in_sync(self) -> bool:
        """Whether the parameters of this process are the average of all replicas."""
        return self.cycle.in_sync

    def on_sync(
        self, callback: Callable[[SyncRecord], object], *, every_process: bool | None = None
    ) -> RemovableHandle:
        """Call ``callback`` with the record of every sync from now on, until ``remove()`` of the returned handle.

        Args:
            callback: is called at the end of :meth:`step` or :meth:`converge`.
            every_process: False: only the first process calls it. Default: True, or as the callback's own attribute
                ``every_process`` says.
        """
        return self.cycle.callbacks.add(callback, every_process)

    def metrics(self, *, replicas: bool = True) -> dict[str, float]:
        """Return the numbers of the last sync under flat names, for a logger; nothing before the first.

        Args:
            replicas: whether every replica has entries of its own.
        """
        return self.history[-1].metrics(replicas=replicas) if self.history else {}

    def get_base_lr(self) -> list[float | Tensor]:
        """Return the base learning rate of every parameter group now: the value that replicas are spread around."""
        return self.cycle.spread.base_rates()

    def record_loss(self, loss: float | Tensor, *, divided_by: float = 1) -> None:
        """Add a training loss to those since the last sync, without waiting for the device.

        Args:
            loss: a number or a scalar tensor.
            divided_by: what the loss was divided by before its backward pass: the number of micro-batches.
        """
        self.cycle.window.record(loss, divided_by)

    def converge(self) -> None:
        """Average the replicas now, wherever in the cycle. Collective: every replica must call it."""
        self.cycle.converge()

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        """Hold the averaged model inside a ``with`` block, to evaluate or save it. Collective."""
        return self.cycle.consensus()

    def state_dict(self) -> dict[str, Any]:
        # A tuple is one object to torch.distributed.checkpoint, which cannot load what has grown entry by entry.
        return {**self._schedule(), "hdet": (self.cycle.state_dict(),)}

    def _schedule(self) -> dict[str, Any]:
        """Return a copy of the state of torch's schedule alone."""
        state = {name: value for name, value in super().state_dict().items() if name != "_cycle"}
        return copy.deepcopy(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.cycle.take_group()
        hdet = state_dict.get("hdet")
        hdet = self.cycle.check_state_dict(hdet[0] if isinstance(hdet, tuple) and hdet else hdet)
        super().load_state_dict({name: state_dict[name] for name in self._schedule() if name in state_dict})
        self.cycle.load_state_dict(hdet)
        self._last_lr = self.cycle.rates()


def _check_place(rank: int, world_size: int) -> None:
    """Raise if there is no process group of the given size; warn if it says otherwise."""
    ensemble = default_ensemble()
    if world_size > 1 and ensemble.size == 1:
        raise ValueError(
            f"world_size={world_size}, but there is no process group of that size: call "
            "torch.distributed.init_process_group() before building the scheduler"
        )
    if world_size not in (1, ensemble.size) or (world_size > 1 and rank != ensemble.replica):
        log.warning(
            "rank=%d, world_size=%d were passed; the process group says %d of %d, and that is used",
            *(rank, world_size, ensemble.replica, ensemble.size),
        )
