"""torch's OneCycleLR with a cycle of HDET around it, and before that, with ``max_lr=None``, a scouting phase.

The schedule is torch's own. It is begun anew for every scouting round, and once more for the run.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from hdet_kernels.ensemble import announced_size
from hdet_kernels.schedule.arguments import can_divide, check_no_epoch, run_length
from hdet_kernels.schedule.attachment import attach, own_values_back
from hdet_kernels.schedule.build import ScheduleFacts, build_cycle, built_state, ensemble_of, learning_rates
from hdet_kernels.schedule.checkpoint import saving
from hdet_kernels.schedule.checkpoint.checked_state import checked, checked_schedule
from hdet_kernels.schedule.checkpoint.packed import packed
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.guards import LateEnsemble
from hdet_kernels.schedule.losses import Loss
from hdet_kernels.schedule.scout.own_gradients import OwnGradients
from hdet_kernels.schedule.scout.phase import Scouted, Scouting, ratios_of
from hdet_kernels.schedule.scout.rounds import ScoutSettings, first_bracket, make_plan, middle
from hdet_kernels.schedule.scout.state import checked_scout, scout_state
from hdet_kernels.schedule.with_cycle import WithCycle

#: Attributes that are not part of torch's schedule.
_OWN = ("_cycle", "_phase", "_late", "_scouted", "_arguments", "_options", "_follows_ties", "_callbacks")


class ScoutingOneCycleLR(WithCycle, OneCycleLR):
    """The steps and checkpoints of :class:`.schedulers.HDETOneCycleLR`, which has the arguments.

    Attributes:
        _arguments: those of torch's OneCycleLR, checked.
        _scouted: the plan of a run with ``max_lr=None``, and what was found; None where ``max_lr`` was given.
        _phase: the scouting phase; None before and after it.
    """

    _arguments: dict[str, Any]
    _scouted: Scouted | None = None

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
        self._settle()
        self._check_outside_callbacks("step()")
        if self._phase is None:
            self._step_run(self._cycle, loss)
        else:
            self._step_phase(self._phase, loss)
        self._call_callbacks()

    def _step_run(self, cycle: Cycle, loss: Loss | None) -> None:
        changed = cycle.end_step(loss, self.total_steps)
        super().step()
        if changed:
            cycle.write()
        cycle.publish()

    def get_lr(self) -> list[float | Tensor]:
        scheduled = super().get_lr()
        if self._cycle is None:
            return scheduled
        return (self._cycle if self._phase is None else self._phase).spread.rates(scheduled)

    # The schedule, of a run or of a scouting round

    def _start_schedule(self, **given: Any) -> None:
        """Begin torch's schedule at its first step, with these arguments in the place of the user's."""
        self._cycle = None  # step() and get_lr() are torch's own meanwhile
        OneCycleLR.__init__(self, self.optimizer, **{**self._arguments, **given})

    def _build(self, **given: Any) -> Cycle:
        """Begin the schedule of the run, and return its cycle."""
        self._start_schedule(**given)
        return self._cycle_of(self.total_steps)

    def _cycle_of(self, total_steps: int) -> Cycle:
        before = 0 if self._scouted is None else self._scouted.plan.steps
        peak, cycle_momentum = self._arguments["pct_start"], self._arguments["cycle_momentum"]
        facts = ScheduleFacts("OneCycleLR", self.last_epoch, total_steps, peak, cycle_momentum, before=before)
        return build_cycle(self._inner, facts, self._options)

    def _begin(self) -> None:
        """Begin the schedule, and build its cycle or the scouting phase before it, with the user's arguments."""
        if self._arguments["max_lr"] is None:
            self._scouted = self._planned()
            self._phase = self._scout(self._scouted)
        else:
            self._cycle = self._build(max_lr=self._arguments["max_lr"])
            self._cycle.write()
        self._last_lr = learning_rates(self._inner)

    def _attach(self) -> None:
        if self._phase is None:
            attach(self.cycle, self, before=self._settle)
        else:
            self._attach_phase(self._phase)

    def _new_cycle(self) -> Cycle:
        return self._cycle_of(self.total_steps)

    # The scouting phase

    def _planned(self) -> Scouted:
        settings, given = self._options["scout"] or ScoutSettings(), self._options["ensemble"]
        ensemble = ensemble_of(self._inner.param_groups, given)
        # Before the process group exists the plan is that of as many processes as were announced.
        size = announced_size() if LateEnsemble(given, ensemble).open else ensemble.size
        workable = partial(can_divide, self._arguments["pct_start"])
        plan = make_plan(run_length(self._arguments), size, settings, workable=workable)
        return Scouted(plan, settings, ratios_of(self._inner))

    def _scout(self, scouted: Scouted) -> Scouting:
        """Begin the first miniature, and return the phase. The cycle that is built now checks all options."""
        first, plan = first_bracket(scouted.settings), scouted.plan
        self._start_schedule(**one_cycle(scouted.rates(middle(first)), plan.rounds[0]))
        cycle = self._cycle_of(plan.run)
        own = OwnGradients(self._inner, cycle.ensemble, self._options["model"], self._options["gradients"])
        phase = Scouting(cycle, scouted, own)
        phase.begin_round(learning_rates(self._inner))
        self._cycle = cycle
        return phase

    def _replace_phase(self) -> None:
        if self._phase is None or self._scouted is None:
            super()._replace_phase()
            return
        history, phase = self.cycle.history, self._phase
        own_values_back(self._inner)
        self._phase = self._scout(self._scouted)
        self._phase.take_start(phase)
        self._phase.own.take_over(phase.own)  # moments of the replicas that were loaded already stay their own
        self.cycle.history = history
        self._last_lr = learning_rates(self._inner)
        self._attach()

    def _attach_phase(self, phase: Scouting) -> None:
        attach(phase, self, before=self._settle, at_end=phase.own.end)
        phase.own.begin()

    def _step_phase(self, phase: Scouting, loss: Loss | None) -> None:
        """End a step of the scouting phase, and begin the next round or the run if it was the last of a round."""
        ended = phase.end_step(loss)
        if phase.scouted.found is not None:
            self._begin_run(phase.scouted)
            phase.tell_found()
        elif ended:
            self._begin_round(phase)
        else:
            super().step()
            phase.publish()

    def _begin_round(self, phase: Scouting) -> None:
        cycle = self.cycle
        self._start_schedule(**one_cycle(phase.peaks, phase.length))
        self._cycle = cycle
        phase.begin_round(learning_rates(self._inner))
        self._last_lr = learning_rates(self._inner)

    def _begin_run(self, scouted: Scouted) -> None:
        """Begin the run at the learning rate that was found."""
        before = self.cycle
        own_values_back(self._inner)
        self._phase = None
        cycle = self._build(**one_cycle(scouted.rates(scouted.found or 0.0), scouted.plan.run))
        self._cycle = before
        self._take(cycle)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        cycle = self.cycle  # first, because it may begin another schedule
        state = {**self._schedule_state(), "hdet": packed(saving.state_of(cycle))}
        return state if self._scouted is None else {**state, "scout": packed(scout_state(self._scouted, self._phase))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._settle()
        with self._tied_as_in(state_dict):
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        scout = checked_scout(self._scouted, self.cycle, state_dict)
        hdet = checked(self.cycle, state_dict)
        if scout is None or self._scouted is None:
            schedule = checked_schedule(self._schedule_state(), state_dict, hdet["step"], "scheduler")
            with saving.undone_on_error(self.cycle, self):
                self._load_schedule(schedule, hdet)
        else:
            self._load_scouted(self._scouted, scout, state_dict, hdet)
        self.cycle.steps.begin_anew()

    def _schedule_state(self) -> dict[str, Any]:
        """Return a copy of the state of torch's schedule alone: DCP writes into lists and tensors when it loads."""
        return copy.deepcopy({key: value for key, value in super().state_dict().items() if key not in _OWN})

    def _load_schedule(self, schedule: dict[str, Any], hdet: dict[str, Any]) -> None:
        super().load_state_dict(schedule)
        write_momentum(self)
        saving.restore(self.cycle, hdet)
        self._last_lr = learning_rates(self._inner)

    def _load_scouted(
        self, scouted: Scouted, scout: dict[str, Any], state_dict: dict[str, Any], hdet: dict[str, Any]
    ) -> None:
        """Load the state of a run with ``max_lr=None``: build what it was saved in, a round or the run, and go on."""
        saved = scout["phase"]
        target = Scouted(scouted.plan, scouted.settings, scout["ratios"])
        target.found = scout["found"]
        if saved is None:
            given, step = one_cycle(target.rates(scout["found"]), target.plan.run), hdet["step"]
        else:
            given = one_cycle(target.rates(middle(saved["bracket"])), target.plan.rounds[saved["round"]])
            step = saved["step"]
        as_built = built_state(self._inner, {**self._arguments, **given})
        schedule = checked_schedule(as_built, state_dict, step, "scheduler")
        parts = [] if self._phase is None else self._phase.parts()
        with saving.undone_on_error(self.cycle, self, *parts), self._attached_again_on_error():
            self._scouted = target
            if saved is None:
                self._begin_run(target)
                self._load_schedule(schedule, hdet)
            else:
                phase = self._phase_again(target)
                phase.load_state_dict(saved)
                self._begin_round(phase)
                self._load_schedule(schedule, hdet)
                phase.begin_round(scheduled_now(self))
                self._last_lr = learning_rates(self._inner)

    def _phase_again(self, scouted: Scouted) -> Scouting:
        """Return the scouting phase, begun anew if it is over."""
        if self._phase is None:
            own_values_back(self._inner)
            self._phase = self._scout(scouted)
            self._attach_phase(self._phase)
        self._phase.scouted = scouted
        return self._phase


def one_cycle(max_lr: list[float], total_steps: int) -> dict[str, Any]:
    """Return the arguments of a OneCycleLR that a run without a learning rate sets itself."""
    return {"max_lr": max_lr, "total_steps": total_steps, "epochs": None, "steps_per_epoch": None}


def write_momentum(scheduler: LRScheduler) -> None:
    """Write the momentum of the current step to the groups, where the schedule sets it: loading a schedule does not."""
    if getattr(scheduler, "cycle_momentum", False):
        for number, group in enumerate(scheduler.optimizer.param_groups):
            for name in ("base_momentum", "max_momentum") if isinstance(scheduler, OneCycleLR) else ():
                if name not in group:
                    raise ValueError(
                        f"parameter group {number} of the optimizer has no {name!r}, which its schedule wrote there: "
                        "load an undamaged checkpoint of the optimizer"
                    )
        scheduled_now(scheduler)


def scheduled_now(scheduler: LRScheduler) -> list[float | Tensor]:
    """Return the learning rates of torch's schedule at the current step. It writes the momentum to the groups."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch expects step() to call it
        return OneCycleLR.get_lr(scheduler) if isinstance(scheduler, OneCycleLR) else scheduler.get_lr()
