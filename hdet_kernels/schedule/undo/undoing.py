"""Undo what broke: return all replicas to the last sound average, a limited number of times in a run.

The controller judges every sync at which it acts (:class:`.protocol.UndoingController`). All processes see the same
losses, so that they judge alike; the handshake of a sync tells whether all of them keep the same average.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.controller.protocol import Observation, Run, UndoingController, returns_allowed
from hdet_kernels.converge import Converger, Outcome
from hdet_kernels.fanout.spread import Spread
from hdet_kernels.schedule.gradient_hooks import Displacement
from hdet_kernels.schedule.undo.last_sound import LastSound

log = logging.getLogger("hdet_kernels")


class Undoing:
    """Keeps the last sound average, returns to it, and counts the returns.

    Args:
        spread: its controller judges, and its state changes with a return.
        controller: that controller.
        last_sound: the copy of the average.

    Attributes:
        returns: how often the replicas have returned so far.
    """

    def __init__(self, spread: Spread, controller: UndoingController, last_sound: LastSound) -> None:
        self.spread, self.controller, self.last_sound = spread, controller, last_sound
        self.returns = 0
        self._told = False

    @staticmethod
    def of(
        optimizer: Optimizer,
        spread: Spread,
        converger: Converger,
        displacement: Displacement | None,
        buffers: Callable[[], Sequence[Tensor]] = tuple,
    ) -> Undoing | None:
        """Return one for a scheduler; None if its controller never undoes anything.

        Args:
            optimizer: its parameters and state are kept.
            spread: the spread of the scheduler, with its controller.
            converger: averages the replicas.
            displacement: measures slopes, if any are measured.
            buffers: returns the buffers of the model, which are kept too.
        """
        controller = spread.controller
        if not isinstance(controller, UndoingController) or not returns_allowed(controller):
            return None
        return Undoing(spread, controller, LastSound(optimizer, converger, displacement, buffers))

    @property
    def kept(self) -> int | None:
        """The step of the average to which this process can return; None if it cannot."""
        return self.last_sound.step if self.returns < self.controller.undo else None

    def keep_start(self, run: Run, step: int) -> None:
        """Keep the replicas as they are before the first step, which is sound."""
        if self.returns >= self.controller.undo or not run.acts_after(self.controller, step):
            return
        if self.last_sound.can_copy:
            self.last_sound.keep_start(step)
        else:
            log.warning(
                "the first step is captured in a CUDA graph, so that the start cannot be kept: nothing can be undone "
                "before the first sound average; make a step before capturing to have it kept"
            )

    def act(self, run: Run, seen: Observation, outcome: Outcome, *, landed: int) -> int | None:
        """Let the controller act on a sync: move the base values, or return to the last sound average.

        Args:
            run: the run.
            seen: the sync.
            outcome: its average, which is in place.
            landed: the step after which the average was applied.

        Returns:
            The step of the average that was taken again; None if there was no return.
        """
        judgement = self.controller.judge(run, self.spread.controller_state, seen)
        if judgement == "broken" and self.can_go_back(outcome.kept):
            return self.go_back(run, seen)
        self.spread.move(run, seen)
        if judgement == "broken":
            self._tell(seen)
        if not run.acts_after(self.controller, seen.step):
            self.last_sound.drop()
        elif judgement == "sound" and self.returns < self.controller.undo:
            alike = landed == seen.step  # replicas that have trained on while they were averaged are apart
            self.last_sound.keep(seen.step, _level(seen), params_alike=alike, state_alike=alike and outcome.state)
        return None

    def go_back(self, run: Run, seen: Observation) -> int:
        """Return to the last sound average and return its step."""
        kept, before = self.last_sound, self.spread.placement().base
        state = self.controller.undone(run, self.spread.controller_state, seen)  # first, because it may raise
        kept.restore()
        self.spread.controller_state = state
        self.returns += 1
        step, level = kept.step or 0, _level(seen)
        names = [hyper.name for hyper in self.spread.hyperparameters]
        moved = zip(names, before.tolist(), self.spread.placement().base.tolist(), strict=True)
        log.warning(
            "step %d: training broke (%s; %s at step %d): all replicas return to the average of step %d, with %s "
            "(return %d of at most %d)",
            seen.step,
            "no replica is finite" if level is None else f"mean loss {level:.4g}",
            "not known" if kept.level is None else f"{kept.level:.4g}",
            *(step, step),
            ", ".join(f"{name}={new:.3g} after {old:.3g}" for name, old, new in moved if new != old) or "no change",
            *(self.returns, self.controller.undo),
        )
        if self.returns >= self.controller.undo or not run.acts_after(self.controller, seen.step):
            kept.drop()
        return step

    def can_go_back(self, agreed: int | None) -> bool:
        """Return whether all processes keep the same average, of step ``agreed``, and returns are left."""
        return agreed is not None and agreed == self.kept

    def _tell(self, seen: Observation) -> None:
        """Warn, once, that training broke and nothing can be undone."""
        if not self._told:
            self._told = True
            log.warning(
                "step %d: training broke (mean loss %s) and is not undone: returns made: %d of at most %d, last sound "
                "average: step %s",
                *(seen.step, _level(seen), self.returns, self.controller.undo, self.last_sound.step),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of returns, and the copy."""
        return {"returns": self.returns, "kept": self.last_sound.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None, *, own: bool) -> None:
        """Load a saved state, if there is one. ``own``: whether a process with the same replicas saved it."""
        self.returns = 0 if state is None else state["returns"]
        self.last_sound.load_state_dict(None if state is None else state["kept"], own=own)


def _level(seen: Observation) -> float | None:
    """Return the mean of the finite losses; None if there is none."""
    finite = seen.losses[np.isfinite(seen.losses)]
    return float(finite.mean()) if len(finite) else None
