"""The scouting phase of a run with ``max_lr=None``, which finds the learning rate before training proper.

In each of a few rounds every replica, or later each of two teams of replicas, trains a short run with a learning rate
of its own. All of them begin at the start of the run, and return to it after the round. At the end of a round, read
:meth:`Scouting._end_round`: gather the losses of all replicas, narrow the range or choose, and return to the start.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Never

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet_kernels.converge.attendance import Attendance
from hdet_kernels.converge.handshake import check_same_everywhere
from hdet_kernels.fanout.spread import Spread, rates_of
from hdet_kernels.optim.base import Pairs
from hdet_kernels.optim.foreign import same_modes
from hdet_kernels.optim.group_entries import write_entry
from hdet_kernels.schedule.acts import Act
from hdet_kernels.schedule.build import one_cycle_at, write_momentum
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.gradients import Fingerprint
from hdet_kernels.schedule.losses import NONE_RECORDED, Loss, checked_loss, run_probe
from hdet_kernels.schedule.scout.comparison import (
    RoundLosses,
    compare,
    gather_numbers,
    raise_failed_probe,
    scout_record,
)
from hdet_kernels.schedule.scout.own_gradients import OwnGradients, differ
from hdet_kernels.schedule.scout.rounds import (
    Bracket,
    Comparison,
    Plan,
    ScoutSettings,
    Verdict,
    by_team,
    candidates,
    choose,
    choose_near,
    first_bracket,
    first_pair,
    first_team,
    middle,
    narrow,
    next_pair,
    tail_steps,
    team_candidates,
    together,
)
from hdet_kernels.schedule.undo.undoing import KeptStart

log = logging.getLogger("hdet_kernels")


class Scouted:
    """The plan of a scouting phase, and the learning rate that it found.

    Args:
        plan: the rounds.
        settings: the constants.
        ratios: the learning rate of every parameter group over the largest.
        found: the peak learning rate of the group with the largest; None before the end of the phase.
    """

    def __init__(
        self, plan: Plan, settings: ScoutSettings, ratios: Sequence[float], found: float | None = None
    ) -> None:
        self.plan, self.settings, self.ratios, self.found = plan, settings, list(ratios), found

    def rates(self, largest: float) -> list[float]:
        """Return the peak learning rates of all parameter groups, where the largest is ``largest``."""
        return [largest * ratio for ratio in self.ratios]

    def run_arguments(self, largest: float) -> dict[str, Any]:
        """Return the arguments of the run's OneCycleLR that the phase decides, with the peak ``largest``."""
        return {"max_lr": self.rates(largest), "total_steps": self.plan.run, "epochs": None, "steps_per_epoch": None}

    def round_arguments(self, number: int, bracket: Bracket) -> dict[str, Any]:
        """Return the same of the miniature of round ``number``, which peaks in the middle of ``bracket``."""
        return {**self.run_arguments(middle(bracket)), "total_steps": self.plan.rounds[number]}

    @property
    def config(self) -> dict[str, Any]:
        """The settings that must be equal on all replicas, and in a checkpoint that is loaded."""
        return {
            "scout": self.settings.to_dict(),
            "total_steps": self.plan.total_steps,
            "rounds": list(self.plan.rounds),
            "teams": self.plan.teams,
        }


def ratios_of(optimizer: Optimizer) -> list[float]:
    """Return the learning rate of every parameter group over the largest.

    Raises:
        ValueError: there is no largest one.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if not rates or not all(map(math.isfinite, rates)) or max(rates) <= 0:
        raise ValueError(
            f"max_lr=None keeps the ratios of the optimizer's learning rates, got {rates}: build the optimizer with "
            "positive ones, as lr=1.0 for all groups"
        )
    return [rate / max(rates) for rate in rates]


class Scouting:
    """The phase between the first step and the run, in this process. A scheduler steps it in the place of a cycle.

    Args:
        cycle: the cycle of the run, which does not begin before the phase ends. Its ensemble, probe and history are
            used here too.
        scouted: the plan, the constants, and the place of the outcome.
        own: lets the replicas train on their own gradients.
        optimizer: the one that the user gave, which may be a wrapper.
        arguments: those of torch's OneCycleLR, of which every round is a miniature.

    Attributes:
        schedule: torch's OneCycleLR of the current round, with the middle of the candidates as its peak.
        round: number of the current round.
        step: finished steps of it.
        bracket: range of the current round; of a team round the logarithms of its two learning rates.
        near: the outcomes of the team rounds so far; None before the end of the first.
        start: a copy of everything as it was before the first step.
        spread: the learning rates of all replicas.
    """

    schedule: OneCycleLR

    def __init__(
        self, cycle: Cycle, scouted: Scouted, own: OwnGradients, optimizer: Optimizer, arguments: dict[str, Any]
    ) -> None:
        self.cycle, self.scouted, self.own = cycle, scouted, own
        self._scheduled_optimizer, self._arguments = optimizer, arguments
        self.optimizer, self.ensemble = cycle.optimizer, cycle.ensemble
        self.round = self.step = 0
        self.bracket: Bracket = first_bracket(scouted.settings)
        self.near: Comparison | None = None
        self.start = KeptStart(cycle.optimizer, cycle.converger, None, cycle.buffers)
        self.start.keep_buffers()
        if cycle.start is not None:
            cycle.start.forget_buffers()  # the run, which begins after the phase, has another cycle
        self.losses = RoundLosses(cycle.ensemble.rows)
        self.spread = Spread(
            cycle.spread.hyperparameters,
            None,
            cycle.ensemble,
            seed=cycle.spread.seed,
            scheduled=cycle.spread.scheduled,
        )
        self.steps = cycle.steps
        self.replaced = self.in_consensus = False
        self.moved = False  # a step was made since the start, or since the last return to it
        self._fresh = False  # the optimizer had no state before the first step
        # Of the first step: the loss on the probe before it, or why there is none, and the gradients' fingerprint.
        self._probed: float | Tensor = math.nan
        self._failure: Exception | None = None
        self._fingerprint: Tensor | None = None
        self._compared: Fingerprint | None = None
        #: Whether it is known that the replicas have different gradients.
        self.certain = own.certain
        self._begin_round()

    def replace(self, before: Scouting) -> None:
        """Take the place of another phase before its first step, with the buffers that it kept at construction."""
        self.start.take_buffers(before.start)
        self.own.take_over(before.own)  # moments of the replicas that were loaded already stay their own

    @property
    def length(self) -> int:
        """Steps of the current round."""
        return self.scouted.plan.rounds[self.round]

    @property
    def candidates(self) -> tuple[float, ...]:
        """The peak learning rate of each replica in the current round, ascending."""
        if self.in_teams:
            return team_candidates(self.bracket, self.first_team, self.ensemble.size)
        return candidates(self.bracket, self.ensemble.size)

    @property
    def in_teams(self) -> bool:
        """Whether the current round is a team round."""
        return self.scouted.plan.in_teams(self.round)

    @property
    def first_team(self) -> int:
        """How many replicas the first team has."""
        return first_team(self.ensemble.size, self.ensemble.rows)

    @property
    def peaks(self) -> list[float]:
        """The peak learning rate of every parameter group in the middle of the candidates."""
        return self.scouted.rates(middle(self.bracket))

    @property
    def made(self) -> int:
        """Steps of the phase that are finished."""
        return self.scouted.plan.before(self.round) + self.step

    @property
    def in_sync(self) -> bool:
        """Whether the parameters in this process are those that the run begins with."""
        return self.in_consensus or not self.moved

    @property
    def begun(self) -> bool:
        """Whether a step was made, here or in the run of a checkpoint."""
        return self.made > 0 or self.start.step is not None

    def announce(self) -> None:
        """Log what the phase costs."""
        plan = self.scouted.plan
        *others, last = map(str, plan.rounds)
        rounds = " and ".join(filter(None, (", ".join(others), last)))
        if plan.teams:
            rounds = f"{rounds} steps, {plan.teams} of them on two teams of replicas"
        if self.cycle.first_process:
            log.warning(  # not info: it should be seen without any configuration of logging
                "max_lr=None: %d of %d steps (%.0f %%), in rounds of %s, find the learning rate between %.3g and "
                "%.3g on %d replicas; the run is the other %d steps",
                *(plan.steps, plan.total_steps, 100 * plan.steps / plan.total_steps),
                rounds if plan.teams else f"{rounds} steps",
                *(self.scouted.settings.lowest, self.scouted.settings.highest, self.ensemble.size, plan.run),
            )

    def _found(self, verdict: Verdict) -> str:
        """Return in one sentence which learning rate was found."""
        plan, rates = self.scouted.plan, dict.fromkeys(f"{rate:.3g}" for rate in self.scouted.rates(verdict.rate))
        found = f"step {plan.steps}: the peak learning rate is {', '.join(rates)}, {verdict.how}"
        return f"{found}; the run begins, with {plan.run} steps"

    # The learning rates

    def _begin_round(self) -> None:
        """Begin the miniature of this round, and give every replica its candidate."""
        miniature = self.scouted.round_arguments(self.round, self.bracket)
        self.schedule = OneCycleLR(self._scheduled_optimizer, **{**self._arguments, **miniature})
        self._fan_out(rates_of(self.optimizer.param_groups))

    def _fan_out(self, scheduled: list[float | Tensor]) -> None:
        """Give every replica its candidate, where the schedule says ``scheduled`` for the one in the middle."""
        self.spread.scheduled = scheduled
        self.spread.place(np.array(self.candidates) / middle(self.bracket))
        self.write()
        self.publish()

    def write(self) -> None:
        """Write the values of the replicas held here to the optimizer's groups and the user's setters."""
        self.spread.write(self.optimizer.param_groups)

    def publish(self) -> None:
        """Write the learning rates of this step where the optimizer reads them, as :meth:`.Cycle.publish`."""
        self.spread.write_rates(self.optimizer.param_groups)
        if (write := getattr(self.optimizer, "write_hyperparameters", None)) is not None:
            write()

    # A step

    def before_optimizer_step(self) -> None:
        """Copy everything before the first step. A hook of the optimizer, before every step."""
        if self.start.step is None and self.start.can_copy:
            self._keep_start()
        self.moved = True
        self._compared = None if self.certain else Fingerprint()

    def look(self, pairs: Pairs) -> None:
        """Read some of the gradients of a step, or all. A hook of the optimizer, before they are used."""
        if self._compared is not None:
            self._compared.look(pairs)

    def looked(self) -> None:
        """Note what all gradients of a step have shown. A hook of the optimizer, after every step."""
        if self._compared is not None:
            self._fingerprint = self._compared.value(self.optimizer.param_groups)

    def _keep_start(self) -> None:
        self.own.share_state()
        self.start.keep(0)
        self._fresh = not any(self.optimizer.state.values())
        self.own.separate_state()
        if self.cycle.probe is not None:
            probed, self._failure = run_probe(self.cycle.probe, self.ensemble.rows)
            self._probed = math.nan if probed is None else probed

    def record(self, loss: Loss, divided_by: float = 1) -> None:
        """Add a training loss of the current step, which was divided by ``divided_by`` before."""
        tail_from = self.length - tail_steps(self.length, self.scouted.settings)
        self.losses.record(loss, self.step, tail_from, divided_by)

    def end_step(self, loss: Loss | None) -> None:
        """End a step of the optimizer, and set the next learning rates. Raises with nothing changed.

        At the end of a round everything is as before the first step. Then the next round begins or, with
        :attr:`.Scouted.found`, the scheduler begins the run.
        """
        self._check_step()
        if loss is not None:
            loss = checked_loss(loss, "the loss", self.ensemble.rows)
        self.steps.check(self.ensemble.rank)
        unsure, ends = not self.certain or self.made == 0, self.step + 1 == self.length
        mark = self.losses.mark() if unsure or ends else None
        if loss is not None:
            self.record(loss)
        try:
            self._check_losses()
            if unsure:
                self._end_first_steps()
            if ends:
                self._end_round()
        except BaseException:
            if mark is not None:
                self.losses.reset(mark)
            raise
        self.steps.scheduler_stepped()
        if not ends:
            self._step_schedule()
        elif self.scouted.found is None:
            self._begin_round()
            self.own.share_in_teams(self.in_teams)

    def _step_schedule(self) -> None:
        self.step += 1
        self.schedule.step()
        groups = self.optimizer.param_groups
        for group, rate in zip(groups, self.spread.rates(rates_of(groups)), strict=True):
            write_entry(group, "lr", rate)
        self.publish()

    def _check_step(self) -> None:
        if self.replaced:
            raise RuntimeError(
                "the optimizer has another HDET scheduler now, or was released from this one: step the newest scheduler"
            )
        if self.in_consensus:
            raise RuntimeError("scheduler.step() inside scheduler.consensus(): the block is for evaluating and saving")
        if self.start.step is None and self.start.unmoved:
            self._keep_start()  # GradScaler may leave the first steps out
        if self.start.step is None:
            raise RuntimeError(
                "the parameters changed without a call of optimizer.step(), as by a captured CUDA graph: with "
                "max_lr=None they are copied before the first step; make it outside of a graph, and load weights "
                "before building the scheduler"
            )

    def _check_losses(self) -> None:
        if self.cycle.probe is None and not self.losses.ever:
            raise RuntimeError(f"max_lr=None compares losses, and {NONE_RECORDED}")

    def _end_first_steps(self) -> None:
        """Check, with the other replicas, that all do the same on gradients of their own. Collective."""
        attendance = self._meet()
        if self.made == 0:
            same = "all replicas must build the scheduler with the same arguments"
            settings = {**self.cycle.config, **self.scouted.config}
            check_same_everywhere(attendance, settings, "the settings", same)
        found = gather_numbers(attendance, {"failed": float(self._failure is not None), "gradients": self._fingerprint})
        raise_failed_probe(found["failed"], self._failure)
        self.certain = self.certain or differ(found["gradients"]) is True

    def _meet(self) -> Attendance:
        """Note that this process comes to the end of a step, and return what explains why others do not."""
        attendance = self.cycle.converger.attendance
        attendance.enter("scouting", self.made + 1)
        return attendance

    # The end of a round

    def _end_round(self) -> None:
        """Compare the replicas, narrow the range or choose, record it, and return to the start. Collective."""
        seen, training = compare(
            self._meet(), self.candidates, self.losses, self.cycle.probe, step=self.made + 1, level=self._probed
        )
        last = self.round + 1 == len(self.scouted.plan.rounds)
        compared = by_team(seen, self.first_team) if self.in_teams else seen
        near = together(self.near, compared) if self.in_teams else None
        verdict = self._choice(near, compared) if last else None
        bracket = self.bracket if last else self._next_bracket(near, compared)
        record = scout_record(
            self.spread.hyperparameters,
            self.peaks,
            seen,
            training,
            self.ensemble,
            step=self.made + 1,
            number=self.round,
            gradients="teams" if self.in_teams else "local",
        )
        act = None if verdict is None else Act("found", self._found(verdict))
        self.cycle.add_record(record if act is None else replace(record, act=act.kind, why=act.why))
        self._return_to_start(last=last)
        if self.cycle.first_process:
            self._log_round(compared, bracket)
            if act is not None:
                act.log()
        self.losses.clear()
        self.step = 0
        self.round += 1
        self.near, self.bracket = near, bracket
        if verdict is not None:
            self.scouted.found = verdict.rate

    def _choice(self, near: Comparison | None, seen: Comparison) -> Verdict:
        settings = self.scouted.settings
        return choose(seen, settings) if near is None else choose_near(near, settings)

    def _next_bracket(self, near: Comparison | None, seen: Comparison) -> Bracket:
        settings = self.scouted.settings
        if near is not None:
            return next_pair(near, settings)
        if self.scouted.plan.in_teams(self.round + 1):
            return first_pair(seen, self.ensemble.size, settings)
        return narrow(seen, self.bracket, settings)

    def _return_to_start(self, *, last: bool) -> None:
        # State is copied in the layout that it had before the phase.
        if last:
            self.own.end()
        else:
            self.own.share_state()
        self.start.restore()
        self.moved = False
        if self._fresh:
            self.optimizer.state.clear()  # not zeros, which a checkpoint would take for a state
        if last:
            self.start.drop()
        else:
            self.own.separate_state()

    def _log_round(self, seen: Comparison, bracket: Bracket) -> None:
        pairs = ", ".join(f"{rate:.2g}: {loss:.4g}" for rate, loss in zip(seen.rates, seen.losses, strict=True))
        log.info("scouting round %d, learning rate and loss: %s", self.round + 1, pairs)
        if not seen.learned(self.scouted.settings):
            log.warning(
                "scouting round %d says little: no learning rate brought the loss below the %.4g of the start; the "
                "range is %.2g to %.2g now",
                *(self.round + 1, seen.level, math.exp(bracket[0]), math.exp(bracket[1])),
            )

    # The model that the run begins with

    def converge(self) -> Never:
        """Raise RuntimeError: the replicas are not to be averaged now."""
        raise RuntimeError(
            f"scheduler.converge() at step {self.made}: until step {self.scouted.plan.steps} every replica tries "
            "another learning rate, and there is nothing to average; call it later"
        )

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Hold the model as it was before the first step inside the block, and this replica's own after it."""
        if self.in_consensus:
            raise RuntimeError(
                "scheduler.consensus() inside scheduler.consensus(): the model is that of the start already"
            )
        if self.start.step is None:
            yield
            return
        with self.start.model_held(), same_modes(self.optimizer):
            self.in_consensus = True
            try:
                yield
            finally:
                self.in_consensus = False

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as plain values and tensors that ``weights_only=True`` loads."""
        if self.in_consensus:
            log.warning(
                "step %d: the model inside scheduler.consensus() is the one that the run begins with, until a learning "
                "rate is found at step %d. A checkpoint that is saved there cannot be resumed: begin the run anew",
                *(self.made, self.scouted.plan.steps),
            )
        ensemble = self.ensemble
        probed = self._probed.tolist() if isinstance(self._probed, Tensor) else self._probed
        return {
            "replicas": [ensemble.size, ensemble.replica, ensemble.rows, ensemble.part],
            "round": self.round,
            "step": self.step,
            "consensus": self.in_consensus,
            "bracket": list(self.bracket),
            "near": [] if self.near is None else np.stack(self.near.columns, axis=1).tolist(),
            "losses": self.losses.state_dict(),
            "probed": probed,
            "certain": self.certain,
            "shared_state": self.own.shared_state,
            "fresh": self._fresh,
            "start": self.start.state_dict(),
        }

    def parts(self) -> list[object]:
        """Return the objects whose attributes change when a state is loaded."""
        return [self, self.own, self.spread]

    def load_state_dict(self, state: dict[str, Any], schedule: dict[str, Any]) -> None:
        """Continue from a state that was checked, with that of torch's schedule. Attributes of :meth:`parts` change."""
        self.round, self.step = state["round"], state["step"]
        self.moved = self.step > 0
        self.bracket = (state["bracket"][0], state["bracket"][1])
        self.near = Comparison(*np.array(state["near"]).T) if state["near"] else None
        self.losses = RoundLosses(self.ensemble.rows)
        self.losses.load_state_dict(state["losses"])
        probed = state["probed"]
        self._probed = torch.tensor(probed, dtype=torch.float64, device="cpu") if isinstance(probed, list) else probed
        self.certain = state["certain"]
        self.own.shared_state, self._fresh = state["shared_state"], state["fresh"]
        self.start = KeptStart(self.optimizer, self.cycle.converger, None, self.cycle.buffers)
        self.start.keep_buffers()
        self.start.load_state_dict(state["start"], own=True)
        self._begin_round()
        self.schedule.load_state_dict(schedule)
        write_momentum(self.schedule, self.step)
        self._fan_out(one_cycle_at(self.schedule, self.step))
        self.own.share_in_teams(self.in_teams)  # last, because it is not undone if something raises
