"""The scouting phase of a run with ``max_lr=None``: rounds of miniatures, from the start of the run and back to it.

A scheduler builds torch's OneCycleLR of a round's length around the middle of the candidates, tells the phase that a
step is finished (:meth:`Scouting.end_step`), and asks it for the learning rates of the replicas held here
(:attr:`Scouting.spread`). At the end of a round, read :meth:`Scouting._end_round`: gather the losses of all replicas,
narrow the range or choose, and return to the start.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.converge.handshake import check_same_everywhere
from hdet_kernels.ensemble import Ensemble
from hdet_kernels.fanout.spread import Spread
from hdet_kernels.schedule.cycle import Cycle
from hdet_kernels.schedule.gradient_hooks import fingerprint
from hdet_kernels.schedule.history import SyncRecord
from hdet_kernels.schedule.last_sound import LastSound
from hdet_kernels.schedule.loss_window import Loss, run_probe
from hdet_kernels.schedule.round_losses import RoundLosses
from hdet_kernels.schedule.scouted import Scouted
from hdet_kernels.scout import Comparison, OwnGradients, candidates, choose, narrow
from hdet_kernels.scout.own_gradients import differ
from hdet_kernels.scout.plan import Bracket, first_bracket, middle, tail_steps

log = logging.getLogger("hdet_kernels")

Array = NDArray[np.float64]


class Scouting:
    """The phase between the first step and the run, in this process.

    Args:
        cycle: the cycle of the run, which does not begin before the phase ends. Its ensemble, probe and history are
            used here too.
        scouted: the plan, the constants, and the place of the outcome.
        own: lets the replicas train on their own gradients.

    Attributes:
        round: number of the current round.
        step: finished steps of it.
        bracket: range of the current round.
        start: a copy of everything as it was before the first step.
        spread: the learning rates of all replicas.
    """

    def __init__(self, cycle: Cycle, scouted: Scouted, own: OwnGradients) -> None:
        self.cycle, self.scouted, self.own = cycle, scouted, own
        self.optimizer, self.ensemble = cycle.optimizer, cycle.ensemble
        self.round = self.step = 0
        self.bracket: Bracket = first_bracket(scouted.settings)
        self.start = LastSound(cycle.optimizer, cycle.converger, None, cycle.buffers)
        self.losses = RoundLosses(cycle.ensemble.rows)
        self.spread = Spread(
            cycle.spread.hyperparameters,
            None,
            cycle.ensemble,
            seed=cycle.spread.seed,
            scheduled=cycle.spread.scheduled,
        )
        self.replaced = self.in_consensus = False
        # Of the first step: the loss on the probe before it, or why there is none, and the gradients' fingerprint.
        self._probed: float | Tensor = math.nan
        self._failure: Exception | None = None
        self._fingerprint: Tensor | None = None
        #: Whether it is known that the replicas have different gradients.
        self.certain = own.certain

    @property
    def length(self) -> int:
        """Steps of the current round."""
        return self.scouted.plan.rounds[self.round]

    @property
    def candidates(self) -> tuple[float, ...]:
        """The peak learning rate of each replica in the current round, ascending."""
        return candidates(self.bracket, self.ensemble.size)

    @property
    def peaks(self) -> list[float]:
        """The peak learning rate of every parameter group in the middle of the candidates."""
        return self.scouted.rates(middle(self.bracket))

    @property
    def made(self) -> int:
        """Steps of the phase that are finished."""
        return self.scouted.plan.before(self.round) + self.step

    def announce(self) -> None:
        """Log what the phase costs."""
        plan = self.scouted.plan
        if self._tells:
            log.warning(  # not info: it should be seen without any configuration of logging
                "max_lr=None: %d of %d steps (%.0f %%), in rounds of %s steps, find the learning rate between %.1g and "
                "%.1g on %d replicas; the run is the other %d steps",
                *(plan.steps, plan.total_steps, 100 * plan.steps / plan.total_steps),
                " and ".join(map(str, plan.rounds)),
                *(self.scouted.settings.lowest, self.scouted.settings.highest, self.ensemble.size, plan.run),
            )

    # The learning rates

    def begin_round(self, scheduled: list[float | Tensor]) -> None:
        """Give every replica its candidate. ``scheduled``: learning rates of the groups for the middle candidate."""
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
        """Copy everything before the first step, and look at the gradients. A hook of the optimizer."""
        if self.start.step is None and self.start.can_copy:
            self.own.share_state()
            self.start.keep_start(0)
            self.own.separate_state()
            if self.cycle.probe is not None:
                probed, self._failure = run_probe(self.cycle.probe, self.ensemble.rows)
                self._probed = math.nan if probed is None else probed
        if not self.certain:
            self._fingerprint = fingerprint(self.optimizer.param_groups)

    def record(self, loss: Loss) -> None:
        """Add a training loss of the current step."""
        self.losses.record(loss, self.step, self.length - tail_steps(self.length, self.scouted.settings))

    def end_step(self, loss: Loss | None) -> bool:
        """End a step of the optimizer. Raises with nothing changed.

        Returns:
            Whether a round ended: then everything is as before the first step, and either the next round begins or,
            with :attr:`.Scouted.found`, the run.
        """
        self._check_step()
        mark = self.losses.mark()
        try:
            if loss is not None:
                self.record(loss)
            if self.cycle.probe is None and not self.losses.ever:
                raise RuntimeError(
                    "max_lr=None compares losses, and none was recorded: call scheduler.step(loss), or "
                    "scheduler.record_loss(loss) before scheduler.step() where a framework calls it bare; or pass probe="
                )
            if not self.certain or self.made == 0:
                self._end_first_steps()
            ended = self.step + 1 == self.length
            if ended:
                self._end_round()
        except BaseException:
            self.losses.reset(mark)
            raise
        if not ended:
            self.step += 1
        return ended

    def _check_step(self) -> None:
        if self.replaced:
            raise RuntimeError(
                "the optimizer has another HDET scheduler now, or was released from this one: step the newest scheduler"
            )
        if self.in_consensus:
            raise RuntimeError("scheduler.step() inside scheduler.consensus(): the block is for evaluating and saving")
        if self.start.step is None:
            raise RuntimeError(
                "scheduler.step() before the first optimizer.step(), or a first step that was captured as a CUDA graph: "
                "with max_lr=None the parameters are copied at the first step; make it outside of a graph"
            )

    def _end_first_steps(self) -> None:
        """Check, with the other replicas, that all do the same on gradients of their own. Collective."""
        if self.made == 0:
            same = "all replicas must build the scheduler with the same arguments"
            check_same_everywhere(self.ensemble, {**self.cycle.config, **self.scouted.config}, "the settings", same)
        found = self._gathered({"failed": float(self._failure is not None), "gradients": self._fingerprint})
        self._raise_failed(found["failed"], self._failure)
        self.certain = self.certain or differ(found["gradients"]) is True

    # The end of a round

    def _end_round(self) -> None:
        """Compare the replicas, narrow the range or choose, record it, and return to the start. Collective."""
        seen, probes = self._compare()
        last = self.round + 1 == len(self.scouted.plan.rounds)
        settings = self.scouted.settings
        verdict = choose(seen, self.ensemble.size, settings) if last else None
        bracket = narrow(seen, self.bracket, settings)
        self._record(seen, probes)
        self._return_to_start(last=last)
        self._log_round(seen, bracket, None if verdict is None else verdict.how)
        self.losses.clear()
        self.step = 0
        self.round += 1
        if verdict is None:
            self.bracket = bracket
        else:
            self.scouted.found = verdict.rate

    def _return_to_start(self, *, last: bool) -> None:
        # State is copied in the layout that it had before the phase.
        if last:
            self.own.end()
        else:
            self.own.share_state()
        self.start.restore()
        if last:
            self.start.drop()
        else:
            self.own.separate_state()

    def _compare(self) -> tuple[Comparison, Array | None]:
        """Return the losses of all replicas, and their losses on the probe if there is one. Collective."""
        probe, losses = self.cycle.probe, self.losses
        probed, failure = (math.nan, None) if probe is None else run_probe(probe, self.ensemble.rows)
        found = self._gathered(
            {
                "step": float(self.made),
                "failed": float(failure is not None),
                "probe": probed,
                "level": self._probed,
                "first": losses.first.sum,
                "firsts": float(losses.first.count),
                "tail": losses.tail.sum,
                "squares": losses.squares.sum,
                "count": float(losses.tail.count),
            }
        )
        if (found["step"] != found["step"][0]).any():
            raise RuntimeError(
                f"the replicas have made {found['step'].astype(int).tolist()} steps: all must step equally often"
            )
        self._raise_failed(found["failed"], failure)
        count = found["count"]
        if probe is None and not (count > 0).all():
            raise RuntimeError(
                f"replicas {np.flatnonzero(count == 0).tolist()} recorded no loss in the last steps of a scouting round: "
                "call scheduler.step(loss) at every step, or pass probe="
            )
        with np.errstate(all="ignore"):  # losses may be infinite, or none
            mean = found["tail"] / count
            spread = np.maximum(found["squares"] / count - mean**2, 0.0)
            errors = np.sqrt(spread / np.maximum(count - 1, 1))
            first = found["first"] / found["firsts"]
        rates = np.array(self.candidates)
        if probe is None:
            return Comparison(rates, mean, errors, _mean(first)), None
        return Comparison(rates, found["probe"], np.zeros_like(mean), _mean(found["level"])), mean

    def _record(self, seen: Comparison, training: Array | None) -> None:
        """Add the round to the history: every replica's peak learning rate, and its loss."""
        names = [hyper.name for hyper in self.spread.hyperparameters]
        base = [*self.peaks, *(float(hyper.base or 0.0) for hyper in self.spread.hyperparameters[len(self.peaks) :])]
        factors = seen.rates / middle(self.bracket)
        values = [
            [value] * len(factors) if index >= len(self.peaks) else (value * factors).tolist()
            for index, value in enumerate(base)
        ]
        step = self.made + 1
        record = SyncRecord(
            step=step,
            cycle=self.round,
            kind="scout",
            losses=(seen.losses if training is None else training).tolist(),
            probes=None if training is None else seen.losses.tolist(),
            base=dict(zip(names, base, strict=True)),
            values=dict(zip(names, values, strict=True)),
            excluded=np.flatnonzero(~np.isfinite(seen.losses)).tolist(),
            gradients="local",
            bytes=0,
            collectives=int(self.ensemble.talks),
            seconds=0.0,
            landed=step,
        )
        self.cycle.add_record(record)

    def _log_round(self, seen: Comparison, bracket: Bracket, how: str | None) -> None:
        if not self._tells:
            return
        pairs = ", ".join(f"{rate:.2g}: {loss:.4g}" for rate, loss in zip(seen.rates, seen.losses, strict=True))
        log.info("scouting round %d, learning rate and loss: %s", self.round + 1, pairs)
        if not seen.learned(self.scouted.settings):
            log.warning(
                "scouting round %d says little: no learning rate brought the loss below the %.4g of the start; the "
                "range narrows to %.2g to %.2g only",
                *(self.round + 1, seen.level, math.exp(bracket[0]), math.exp(bracket[1])),
            )
        if how is not None:
            log.info("the learning rate is %s", how)

    # With the other replicas

    @property
    def _tells(self) -> bool:
        return self.ensemble.replica == 0 and self.ensemble.part == 0

    def _gathered(self, columns: Mapping[str, float | Tensor | None]) -> dict[str, Array]:
        """Return [N] for each of the numbers, or [rows] tensors, of this process; the mean over parts. Collective."""
        return gathered(self.ensemble, columns)

    def _raise_failed(self, failed: Array, failure: Exception | None) -> None:
        if failed.any():
            replicas = np.flatnonzero(failed).tolist()
            raise RuntimeError(f"probe() raised on replicas {replicas}: correct it, or leave probe= out") from failure

    # The model that the run begins with

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Hold the model as it was before the first step inside the block, and this replica's own after it."""
        if self.in_consensus:
            raise RuntimeError("scheduler.consensus() inside scheduler.consensus(): the model is that of the start already")
        if self.start.step is None:
            yield
            return
        own = LastSound(self.optimizer, self.cycle.converger, None, self.cycle.buffers)
        own.keep_start(self.made)
        self.in_consensus = True
        self.own.share_state()
        try:
            self.start.restore()
            yield
        finally:
            self.own.separate_state()
            own.restore()
            self.in_consensus = False

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as plain values and tensors that ``weights_only=True`` loads."""
        if self.in_consensus:
            raise RuntimeError(
                f"the scheduler cannot be saved inside scheduler.consensus() before step {self.scouted.plan.steps}, while "
                "it looks for a learning rate: the model there is that of the start; save outside of the block"
            )
        ensemble = self.ensemble
        probed = self._probed.tolist() if isinstance(self._probed, Tensor) else self._probed
        return {
            "replicas": [ensemble.size, ensemble.replica, ensemble.rows, ensemble.part],
            "round": self.round,
            "step": self.step,
            "bracket": list(self.bracket),
            "losses": self.losses.state_dict(),
            "probed": probed,
            "certain": self.certain,
            "shared_state": self.own.shared_state,
            "start": self.start.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that was checked. The schedule of its round must have been built."""
        self.round, self.step = state["round"], state["step"]
        self.bracket = (state["bracket"][0], state["bracket"][1])
        self.losses.load_state_dict(state["losses"])
        probed = state["probed"]
        self._probed = torch.tensor(probed, dtype=torch.float64, device="cpu") if isinstance(probed, list) else probed
        self.certain = state["certain"]
        self.own.shared_state = state["shared_state"]
        self.start.load_state_dict(state["start"], own=True)


def gathered(ensemble: Ensemble, columns: Mapping[str, float | Tensor | None]) -> dict[str, Array]:
    """Return [N] for each of the numbers, or [rows] tensors, of every process; the mean over parts. Collective.

    None counts as NaN.
    """
    rows = [
        value.detach().double().cpu().expand(ensemble.rows)
        if isinstance(value, Tensor)
        else torch.full((ensemble.rows,), math.nan if value is None else value, dtype=torch.float64, device="cpu")
        for value in columns.values()
    ]
    found = ensemble.gather(torch.stack(rows, dim=1)).double().mean(dim=1).numpy()
    return {name: found[:, index] for index, name in enumerate(columns)}


def _mean(levels: Array) -> float:
    """Return the mean of those that are finite; NaN without any."""
    finite = levels[np.isfinite(levels)]
    return float(finite.mean()) if len(finite) else math.nan
