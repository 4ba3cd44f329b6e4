"""The schedulers: torch's OneCycleLR, or any torch scheduler, with HDET's cycle around it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from hdet_kernels.controller.protocol import Controller
from hdet_kernels.converge import AverageState, Merge
from hdet_kernels.converge.compress import Format
from hdet_kernels.converge.outer import Outer
from hdet_kernels.ensemble import Ensemble
from hdet_kernels.fanout.explore import Explore, write_entry
from hdet_kernels.schedule.build import Buffered, build_cycle, learning_rates, untouched_on_error
from hdet_kernels.schedule.cycle import Cycle, GradientMode, Probe
from hdet_kernels.schedule.history import SyncRecord
from hdet_kernels.schedule.loss_window import Loss
from hdet_kernels.schedule.rehearsal import rehearse


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

    def get_base_lr(self) -> list[float | Tensor]:
        """The base learning rate of every parameter group now: what the replicas are spread around."""
        return self.cycle.spread.base_rates()

    def record_loss(self, loss: Loss) -> None:
        """Add a training loss (of a stack, those of its replicas) to the current window: any number of times before
        :meth:`step`, for gradient accumulation and for frameworks that call ``step()`` bare. Never waits for the
        device."""
        self.cycle.window.record(loss)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"a {type(self).__name__} belongs to its processes and cannot be copied or pickled: save its state_dict(), "
            "and load it into a scheduler that is built anew"
        )

    def converge(self) -> None:
        """Average the replicas now, wherever in the cycle. Collective: every replica must call it.

        ``outer=`` takes a step here too, unless no step was made since the last average. With ``merge="best"`` the
        probe or the losses since the last sync decide; where there are none, it is the mean."""
        self.cycle.converge()

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        """``with scheduler.consensus():`` evaluate or save the averaged model; this replica's own parameters come back
        afterwards. Collective: every replica must enter it. ``state_dict()`` refers to live tensors: save it, or
        clone it, inside the block.

        It is the plain mean with ``outer=`` too; with ``merge="best"`` the best replica as of now, or the mean where no
        loss is known."""
        return self.cycle.consensus()


class HDETOneCycleLR(_WithCycle, OneCycleLR):
    """torch's ``OneCycleLR`` whose replicas train under a spread of learning rates and are averaged every T steps.

    The arguments up to ``last_epoch`` are torch's, in torch's order. Then, by keyword:

    Args:
        spread: α; replica values lie in base·[1 − α, 1 + α]. 0 is torch's OneCycleLR, bit for bit.
        sync_every: T, the steps between two averages. Default: 2.5 % of the run, 1.25 % where a probe compares learning
            rates alone, at most 1000; where other scalars are explored at least 30, or a tenth of the run. Learning
            rates that are compared by a probe have averages after T/8, T/4 and T/2 too.
        auto_lr: True for the regression controller, False, or a controller. It moves the peak learning rate at every
            sync until that peak, or until 30 % of the run if that is later, by a factor of 55 at most, and then leaves
            it, and all replicas have the same; other scalars it moves from 30 % to 90 %: ``docs/controller.md``. What
            peaks before 15 % of the run is held under a ceiling that climbs until 30 %. With False replicas differ to
            the end.
            It needs losses: ``step(loss)`` or ``record_loss(loss)``. Without any spread there is nothing to learn from,
            and it is off.
        probe: returns this replica's loss (of a stack, those of its replicas, as ``stack.losses`` does) on a batch that
            is the same for all replicas; it runs without gradients at every sync at which the controller acts, and
            replaces the training loss there.
        explore: more :class:`hdet_kernels.Explore`.
        gradients: ``"shared"`` (averaged at every step, as DDP does), ``"local"``, or ``"auto"``: found out at every
            sync by comparing the replicas' gradients. A stack knows.
        ensemble: who the replicas are: ``stack.ensemble`` of a :class:`hdet_kernels.ReplicaStack`, or processes.
            Default: the default process group if initialised, else a single replica.
        average_state: average the optimizer's moments too: True, False, or ``"auto"``, with local gradients.
        average_buffers: average floating-point buffers (BatchNorm statistics) of ``model``; integer buffers become
            those of the first sound replica.
        model: the model, needed for its buffers alone; a stack brings its own.
        bucket_bytes: what one collective carries at most. Default: 512 MiB.
        compress: ``"bf16"`` or ``"int8"``: what travels is the difference to the last average in that many bits, and
            what the rounding took follows the next time. Costs two copies of the parameters in memory.
        overlap_steps: the average starts at the sync and lands this many steps later, so that training does not wait
            for it, over connections of its own. Costs three copies of what is averaged while it is on its way.
        backup: keep a copy of what is averaged until all of it has arrived, so that everything is as it was when a
            peer dies in the middle. False saves that memory.
        outer: :class:`hdet_kernels.Outer` (lr, momentum, nesterov): at every sync the replicas do not go on from their
            mean, but from where a step of SGD leads that takes the way from the last sync to the mean for its
            gradient. On local gradients that is DiLoCo. Costs two copies of the parameters of one replica. Where
            replicas begin apart, the first average is a plain mean.
        merge: ``"mean"``, or ``"best"``: at every sync all replicas take parameters, buffers, state and step counts of
            the sound one whose loss is lowest (on the probe, which then runs at every sync, or the mean training loss
            since the last one; the first of several): the exploit step of population-based training.
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
        gradients: GradientMode = "auto",
        ensemble: Ensemble | None = None,
        average_state: AverageState = "auto",
        average_buffers: bool = True,
        model: Buffered | None = None,
        bucket_bytes: int | None = None,
        compress: Format | None = None,
        overlap_steps: int = 0,
        backup: bool = True,
        outer: Outer | None = None,
        merge: Merge = "mean",
        seed: int = 0,
    ) -> None:
        with untouched_on_error(optimizer):
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
            explore = _several(explore)
            _refuse_scheduled_momentum(explore, cycle_momentum)
            self._cycle = build_cycle(
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
                bucket_bytes=bucket_bytes,
                compress=compress,
                overlap_steps=overlap_steps,
                backup=backup,
                outer=outer,
                merge=merge,
                seed=seed,
                schedule="OneCycleLR",
            )
            self._cycle.write()
            self._last_lr = learning_rates(optimizer)

    def step(self, loss: Loss | None = None) -> None:
        """After ``optimizer.step()``: record ``loss``, average the replicas if a sync is due, and set the next learning
        rates. ``loss`` may be left out where :meth:`record_loss` was called, or where nothing needs it."""
        if self._cycle is None:  # torch's constructor takes the first values of the schedule
            super().step()
            return
        turned = self._cycle.end_step(loss, self.total_steps)
        super().step()
        if turned:
            self._cycle.write()
        self._cycle.publish()

    def get_lr(self) -> list[float | Tensor]:
        scheduled = super().get_lr()
        return scheduled if self._cycle is None else self._cycle.spread.rates(scheduled)

    def state_dict(self) -> dict[str, Any]:
        state = {key: value for key, value in super().state_dict().items() if key != "_cycle"}
        return {**state, "hdet": self.cycle.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.cycle.check_state_dict(_own_part(state))
        hdet = state.pop("hdet")
        super().load_state_dict(state)
        self.cycle.load_state_dict(hdet)
        self._last_lr = learning_rates(self.optimizer)


class HDETScheduler(_WithCycle, LRScheduler):
    """HDET around any torch learning-rate scheduler: ``HDETScheduler(CosineAnnealingLR(optimizer, 1000), spread=0.3)``.

    Step this scheduler instead of the wrapped one. ``total_steps`` is the length of the run; schedulers that know it
    (OneCycleLR, CosineAnnealingLR) need not be told. Without it pass ``sync_every`` and ``auto_lr=False``, and call
    ``converge()`` after the last step. The other arguments are those of :class:`HDETOneCycleLR`.

    ``auto_lr`` needs the schedule's peak and whether it anneals, and first plays a copy of it to its end. One that
    cannot be copied, or is longer than 100 000 steps, is taken to anneal from the learning rate that it began with.
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
        gradients: GradientMode = "auto",
        ensemble: Ensemble | None = None,
        average_state: AverageState = "auto",
        average_buffers: bool = True,
        model: Buffered | None = None,
        bucket_bytes: int | None = None,
        compress: Format | None = None,
        overlap_steps: int = 0,
        backup: bool = True,
        outer: Outer | None = None,
        merge: Merge = "mean",
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
        with untouched_on_error(self.optimizer):
            explore = _several(explore)
            _refuse_scheduled_momentum(explore, getattr(base_scheduler, "cycle_momentum", False))
            self._cycle = build_cycle(
                self.optimizer,
                step=getattr(base_scheduler, "last_epoch", 0),
                total_steps=_run_length(base_scheduler) if total_steps is None else total_steps,
                peak=_peak(base_scheduler),
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
                bucket_bytes=bucket_bytes,
                compress=compress,
                overlap_steps=overlap_steps,
                backup=backup,
                outer=outer,
                merge=merge,
                seed=seed,
                schedule=f"HDETScheduler around {type(base_scheduler).__name__}",
                # OneCycleLR says what its peak is, and it anneals.
                rehearse=None if isinstance(base_scheduler, OneCycleLR) else partial(rehearse, base_scheduler),
            )
            self._cycle.write()
        self._last_lr = learning_rates(self.optimizer)

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        return self.cycle.step

    @property
    def base_lrs(self) -> list[float | Tensor]:  # type: ignore[override]
        return [group.get("initial_lr", group["lr"]) for group in self.optimizer.param_groups]

    def step(self, loss: Loss | None = None) -> None:
        """After ``optimizer.step()``, as :meth:`HDETOneCycleLR.step`."""
        # OneCycleLR refuses to go on; the others may be stepped for ever.
        last_step = self.base_scheduler.total_steps if isinstance(self.base_scheduler, OneCycleLR) else None
        turned = self.cycle.end_step(loss, last_step)
        groups = self.optimizer.param_groups
        # Chainable schedulers compute the next learning rate from the current one: theirs, not this replica's.
        for group, rate in zip(groups, self.cycle.spread.scheduled, strict=True):
            write_entry(group, "lr", rate)
        self.base_scheduler.step()
        for group, rate in zip(groups, self.cycle.spread.rates(learning_rates(self.optimizer)), strict=True):
            write_entry(group, "lr", rate)
        self._last_lr = learning_rates(self.optimizer)
        if turned:
            self.cycle.write()
        self.cycle.publish()

    def get_lr(self) -> list[float | Tensor]:
        return self.cycle.spread.rates(self.cycle.spread.scheduled)

    def state_dict(self) -> dict[str, Any]:
        return {"base_scheduler": self.base_scheduler.state_dict(), "hdet": self.cycle.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.cycle.check_state_dict(_own_part(state_dict))
        self.base_scheduler.load_state_dict(state_dict["base_scheduler"])
        self.cycle.load_state_dict(state_dict["hdet"])
        self._last_lr = learning_rates(self.optimizer)


def _peak(scheduler: LRScheduler) -> float:
    """The share of the run at which the learning rate is highest: OneCycleLR's own, else torch's default for it."""
    if isinstance(scheduler, OneCycleLR):
        return float((scheduler._schedule_phases[0]["end_step"] + 1) / scheduler.total_steps)
    return 0.3


def _run_length(scheduler: LRScheduler) -> int | None:
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max)
    return getattr(scheduler, "total_steps", None)


def _several(explore: Iterable[Explore]) -> tuple[Explore, ...]:
    if isinstance(explore, Explore):
        raise TypeError(f"explore= takes several: pass [{explore!r}]")
    return tuple(explore)


def _refuse_scheduled_momentum(explore: Sequence[Explore], cycle_momentum: bool) -> None:
    for e in explore:
        if cycle_momentum and isinstance(e, Explore) and e.apply is None and e.name in ("momentum", "betas[0]"):
            raise ValueError(
                f"{e.name!r} cannot be explored while the schedule sets it at every step: pass cycle_momentum=False"
            )


def _own_part(state: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(state.get("hdet"), dict) or "config" not in state["hdet"]:
        raise ValueError("this is not a checkpoint of an HDET scheduler: it has no 'hdet' entry")
    own: dict[str, Any] = state["hdet"]
    return own
