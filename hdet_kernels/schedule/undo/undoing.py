"""Undo what broke: return all replicas to the start of the run, a limited number of times, and try what is in doubt.

The controller judges every sync at which it acts (:class:`.protocol.UndoingController`). All processes see the same
losses, so that they judge alike; the handshake of a sync tells whether all of them keep the same copies. After a return
the schedule begins again over the steps that remain, which is not done here. A return can be a trial: what was reached
is kept aside, and all replicas go back to it where the lower learning rate turns out no better.

The copy of the start (:class:`KeptStart`) has everything that training changes: the parameters of the replicas held
here (in full precision where they have master weights), the model's buffers, the whole state of the optimizer, and the
references of the outer optimizer, of the compression and of the hypergradient. It is made once, before the first step;
that of the buffers when the scheduler is built, before a forward pass changes them (BatchNorm). Replicas of a stack
that begin equal are copied once. A return writes into the tensors that are in use: captured CUDA graphs, views and
hooks keep their addresses.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.controller.protocol import Observation, Run, State, TryingController, UndoingController
from hdet_kernels.converge import Converger, Outcome
from hdet_kernels.fanout.spread import Spread
from hdet_kernels.optim.foreign import has_modes
from hdet_kernels.schedule.acts import Progress, Return, ReturnKind
from hdet_kernels.schedule.arguments import HasBuffers
from hdet_kernels.schedule.gradients import Displacement
from hdet_kernels.schedule.undo.copies import KeptTensors, Place, copy_all, reset_others, state_pairs, whole_state
from hdet_kernels.tensors import local, unique, wide_dtype

log = logging.getLogger("hdet_kernels")

#: Entries of a saved copy that tell what it is of.
_ABOUT = ("step", "part", "rows")

#: Elements of a parameter, about, by which it is noticed that somebody has written it.
FEW = 64


#: Fewest steps over which a schedule begins again: its first and its last.
FEWEST_LEFT = 2


class KeptStart:
    """Keeps a copy of the replicas held here as they are before their first step, and brings them back to it.

    Args:
        optimizer: its state is kept.
        converger: its parameters are kept, and what it remembers from one average to the next.
        displacement: of the hypergradient, if there is one: it begins anew after a return.
        buffers: returns the current buffers of the model.
        on: ``"auto"``: on the device of the tensors if there is room; ``"cpu"``: in pinned host memory.

    Attributes:
        step: the step after which the copy was made; None if there is none.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        converger: Converger,
        displacement: Displacement | None,
        buffers: Callable[[], Sequence[Tensor]],
        on: Place = "auto",
    ) -> None:
        self.optimizer, self.converger, self.displacement = optimizer, converger, displacement
        self.buffers = buffers
        self.step: int | None = None
        self.copy = KeptTensors(on)
        self._own = True  # a process with these replicas made the copy
        # The buffers with their copies before the first forward pass, in order and by their ids, and a few elements of
        # the parameters that they belong to.
        self._early: dict[int, tuple[Tensor, Tensor]] | None = None
        self._elements: Tensor | None = None

    @property
    def can_copy(self) -> bool:
        """Whether a copy can be made now. While a CUDA graph is captured, every replay would repeat it."""
        on_gpu = any(param.is_cuda for param in self.converger.tensors.params)
        return not (on_gpu and torch.cuda.is_current_stream_capturing())

    def keep(self, step: int) -> None:
        """Copy the replicas before the first step, after ``step`` steps of the schedule, with the buffers of
        :meth:`keep_buffers` if it was called. Replicas of a stack may begin apart, so that this waits.
        """
        params = self._full(read=True)
        if self._stacked and all(bool((param == param[:1]).all()) for param in params):
            params = [param[0] for param in params]
        self.step = None  # if it fails, there is no copy
        tensors, others = whole_state(self.optimizer)
        self.copy.copy(
            {
                "params": params,
                "buffers": self._buffers_of_start(),
                # None for empty dicts, which a distributed checkpoint would lose.
                "state": {name: _real(tensor) for name, tensor in tensors.items()} or None,
                "others": others or None,
                "compression": self.converger.state_dict(copied=False),
                "outer": self.converger.outer_state_dict(copied=False),
            }
        )
        self.step, self._own = step, True
        self.forget_buffers()

    def keep_buffers(self) -> None:
        """Copy the buffers before a forward pass changes them, for :meth:`keep`."""
        self._early = {id(buffer): (buffer, _copied(buffer)) for buffer in unique(self.buffers(), "buffers")}
        self._elements = self._few_elements()

    def model_loaded(self, module: HasBuffers) -> None:
        """Copy the buffers of a part of the model again, because it was loaded."""
        if self._early is None:
            return
        self._elements = None
        for buffer in module.buffers():
            if id(buffer) not in self._early:  # it took the place of another
                now = unique(self.buffers(), "buffers")
                self._early = {id(one): self._early.get(id(one), (one, _copied(one))) for one in now}
            self._early[id(buffer)] = buffer, _copied(buffer)

    def take_buffers(self, other: KeptStart) -> None:
        """Go on with the buffers that another one kept before the first forward pass."""
        self._early, self._elements = other._early, other._elements

    def forget_buffers(self) -> None:
        """Free the copies of :meth:`keep_buffers`."""
        self._early = self._elements = None

    @property
    def unmoved(self) -> bool:
        """Whether the parameters are those of :meth:`keep_buffers`, and were not loaded since then."""
        return self._elements is not None and torch.equal(self._few_elements(), self._elements)

    def _buffers_of_start(self) -> list[Tensor]:
        """Return the buffers before the first forward pass, or those of now if they do not belong to these parameters.

        Somebody who writes parameters by hand may have written the buffers too.
        """
        now = [_real(buffer) for buffer in self._buffers()]
        if self._early is None:
            return now
        early = [copied for _, copied in self._early.values()]
        same_count = len(now) == len(early)
        if same_count and (self._elements is None or self.unmoved):
            return [old.to(new) if new.shape == old.shape else new for new, old in zip(now, early, strict=True)]
        if not (same_count and all(torch.equal(new, old.to(new)) for new, old in zip(now, early, strict=True))):
            log.warning(
                "parameters were written after the scheduler was built, and not by load_state_dict() of the model, or "
                "buffers were registered: it is not known which buffers belong to them, and a return to the start "
                "brings back those that the first forward pass left. Do that before building the scheduler"
            )
        return now

    @torch.no_grad()
    def _few_elements(self) -> Tensor:
        """Return some elements of every parameter, on the CPU: they tell whether somebody has written it."""
        params = [torch.atleast_1d(_real(local(param))) for param in self.converger.tensors.params]
        few = [param[..., :: max(param.numel() // FEW, 1)].flatten() for param in params]
        wide = [part.to(wide_dtype(part.device)) for part in few]
        devices = dict.fromkeys(part.device for part in wide)
        return torch.cat([torch.cat([part for part in wide if part.device == each]).cpu() for each in devices])

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copy into the tensors that are in use.

        Raises:
            RuntimeError: with nothing changed, if parameters or state have other shapes now.
        """
        kept = self.copy.read()
        kept_state, kept_others = kept["state"] or {}, kept["others"] or {}
        full = self._full()
        params = zip(full, kept["params"], strict=True)
        named = [(f"flat parameter {number}", *pair) for number, pair in enumerate(params)]
        state = state_pairs(self.optimizer, kept_state)
        named += [(f"state {name}", _real(now), saved) for name, now, saved in state]
        for name, now, saved in named:
            if not fits(now, saved):
                raise RuntimeError(
                    f"{name} has shape {tuple(now.shape)}, and {tuple(saved.shape)} in the copy of the start, "
                    "so that the replicas cannot return to it: do not change the model while it is trained"
                )
        pairs = [*((now, saved) for _, now, saved in named), *self._buffer_pairs(kept["buffers"])]
        several = [now for now, saved in pairs if now.shape != saved.shape]
        copy_all([now if now.shape == saved.shape else now[0] for now, saved in pairs], [saved for _, saved in pairs])
        for rows in several:
            rows[1:].copy_(rows[:1])
        reset_others(self.optimizer, kept_state, kept_others)
        if (buckets := self.converger.tensors.buckets) is not None:
            buckets.write_full(full)
        self.converger.tensors.written()
        self.converger.load_state_dict(kept["compression"], own=self._own)
        self.converger.load_outer_state_dict(kept["outer"])
        if self.displacement is not None:
            self.displacement.begin_anew()
        self.copy.was_read()

    @contextlib.contextmanager
    def model_held(self) -> Iterator[None]:
        """Have the parameters and buffers of the copy inside the block, and the current ones again after it."""
        with torch.no_grad():
            own = [[each.clone() for each in now] for now in (self._full(read=True), map(_real, self._buffers()))]
            kept = self.copy.read()
            self._write_model(kept["params"], kept["buffers"])
            self.copy.was_read()
        state, modes = self.optimizer.state, has_modes(self.optimizer)
        if modes:  # eval() inside the block would compute the weights from the state of now
            self.optimizer.state = defaultdict(dict)
        try:
            yield
        finally:
            if modes:
                self.optimizer.state = state
            with torch.no_grad():
                self._write_model(*own)

    def _write_model(self, params: Sequence[Tensor], buffers: Sequence[Tensor | None]) -> None:
        """Write parameters in full precision, and buffers, to the tensors in use."""
        full = self._full()
        for target, value in (*zip(full, params, strict=True), *self._buffer_pairs(buffers)):
            target.copy_(value)
        if (buckets := self.converger.tensors.buckets) is not None:
            buckets.write_full(full)
        self.converger.tensors.written()

    def _buffer_pairs(self, saved: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """Return the buffers in use with their copies. Those that a module replaced by another shape are left out."""
        now = [_real(buffer) for buffer in self._buffers()]
        if len(now) != len(saved):
            log.warning(
                "the model has %d buffers, and had %d when the start was kept, so that it is not known which is which: "
                "buffers stay as they are, and everything else is that of the start. Register buffers before building "
                "the scheduler",
                *(len(now), len(saved)),
            )
            return []
        return [(new, old) for new, old in zip(now, saved, strict=True) if old is not None and fits(new, old)]

    def drop(self) -> None:
        """Free the copy."""
        self.step = None
        self.copy.drop()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the copy, as tensors that are never modified; None if there is none. Waits for the device."""
        if self.step is None:
            return None
        ensemble = self.converger.ensemble
        about = (self.step, [ensemble.part, ensemble.parts], ensemble.rows)
        kept, now = self.copy.lend(), [_real(buffer) for buffer in self._buffers()]
        # A return leaves a buffer that was replaced since then as it is. None stands for it, because it does not fit.
        saved = kept["buffers"] if len(kept["buffers"]) == len(now) else [None] * len(now)
        buffers = [old if fits(buffer, old) else None for buffer, old in zip(now, saved, strict=True)]
        return {**dict(zip(_ABOUT, about, strict=True)), **kept, "buffers": buffers}

    def check_state_dict(self, state: dict[str, Any] | None, path: str) -> None:
        """Raise ValueError, which names an entry below ``path``, unless :meth:`load_state_dict` accepts ``state``.

        Whether replicas of a stack have a state of their own is not compared: that may change when the optimizer is
        loaded, before this or after it.
        """
        if state is None or not self._is_of_here(state):
            return
        here = [param.shape[1:] if self._stacked else param.shape for param in self._full(read=True)]
        saved = [param.shape for param in state["params"]]
        rows = torch.Size([state["rows"]] if self._stacked else [])
        if len(saved) != len(here) or any(each not in (one, rows + one) for each, one in zip(saved, here, strict=True)):
            raise ValueError(
                f"the checkpoint's {path}.params have shapes {[tuple(shape) for shape in saved]}, those of "
                f"this model {[tuple(shape) for shape in here]}: resume with the model that it was saved with"
            )
        self._check_buffers(state["buffers"], path)
        for name, now, kept in state_pairs(self.optimizer, state["state"] or {}):
            fewer, more = sorted((_real(now).numel(), kept.numel()))
            if not (more in (fewer, fewer * state["rows"]) if self._stacked else fits(_real(now), kept)):
                raise ValueError(
                    f"the checkpoint's {path}.state.{name} has shape {tuple(kept.shape)}, the optimizer's "
                    f"{tuple(now.shape)}: resume with the model and the optimizer that it was saved with"
                )
        self.converger.check_state_dict(state["compression"])
        self.converger.check_outer_state_dict(state["outer"])

    def _check_buffers(self, saved: Sequence[Tensor | None], path: str) -> None:
        """Raise ValueError unless the buffers are those of this model, or one of the two runs did not know any."""
        here = [_real(buffer) for buffer in self._buffers()]
        if not (saved and here):  # without model=
            return
        pairs = zip(here, saved, strict=False)
        if len(here) != len(saved) or any(kept is not None and not fits(now, kept) for now, kept in pairs):
            shapes = [None if kept is None else tuple(kept.shape) for kept in saved]
            raise ValueError(
                f"the checkpoint's {path}.buffers have shapes {shapes}, those of this model "
                f"{[tuple(buffer.shape) for buffer in here]}: resume with the model that it was saved with"
            )

    def load_state_dict(self, state: dict[str, Any] | None, *, own: bool) -> None:
        """Take over a saved copy. ``own``: whether a process with the same replicas saved it.

        That of another part of a replica, or of another number of replicas in a process, is left out.
        """
        self.drop()
        if state is None or not self._is_of_here(state):
            return
        self.step, self._own = state["step"], own
        self.forget_buffers()
        self.copy.take({name: entry for name, entry in state.items() if name not in _ABOUT})

    def _is_of_here(self, state: dict[str, Any]) -> bool:
        ensemble = self.converger.ensemble
        return (list(state["part"]), state["rows"]) == ([ensemble.part, ensemble.parts], ensemble.rows)

    @property
    def _stacked(self) -> bool:
        buckets = self.converger.tensors.buckets
        return buckets is not None and buckets.replicas is not None

    def _full(self, *, read: bool = False) -> list[Tensor]:
        """Return the parameters in full precision: the tensors that hold them, or with ``read`` what these should hold.

        Master weights may be behind parameters that somebody else has written.
        """
        tensors = self.converger.tensors
        if tensors.buckets is None:
            return [_real(local(param)) for param in tensors.params]
        tensors.buckets.rehome()
        return list(tensors.buckets.read_full() if read else tensors.buckets.full)

    def _buffers(self) -> list[Tensor]:
        return [local(buffer) for buffer in unique(self.buffers(), "buffers")]


def fits(now: Tensor, saved: Tensor | None) -> bool:
    """Return whether ``saved`` can be written to ``now``: as it is, or that of one replica to each of several."""
    return saved is not None and now.shape in (saved.shape, now.shape[:1] + saved.shape)


def _copied(buffer: Tensor) -> Tensor:
    return _real(local(buffer)).clone()


def _described(rows: int, part: int, parts: int) -> str:
    return f"{rows} replica{'s' * (rows > 1)}" + (f", part {part + 1} of {parts}" if parts > 1 else "")


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _steps_left(run: Run, landed: int) -> bool:
    """Return whether a schedule can begin again, or go on, over the steps that remain after ``landed``."""
    return run.total_steps is None or run.total_steps - landed >= FEWEST_LEFT


class Undoing:
    """Keeps the start of a run, returns to it, tries lower learning rates, and counts the returns.

    Args:
        spread: its controller judges, and its state changes with a return.
        controller: that controller.
        start: the copy of the start.
        aside: the copy of what a trial is compared with, while there is one.

    Attributes:
        returns: how often the replicas have returned so far, trials included.
        attempt: what the trial under way is compared with; None if there is none.
    """

    def __init__(self, spread: Spread, controller: UndoingController, start: KeptStart, aside: KeptStart) -> None:
        self.spread, self.controller, self.start, self.aside = spread, controller, start, aside
        self.returns = 0
        self.attempt: Progress | None = None
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
            buffers: returns the buffers of the model. They are kept as they are now, before the first forward pass.
        """
        controller = spread.controller
        if not isinstance(controller, UndoingController) or not controller.undo:
            return None
        on: Place = getattr(controller, "undo_on", "auto")
        start, aside = (KeptStart(optimizer, converger, displacement, buffers, on) for _ in range(2))
        start.keep_buffers()
        return Undoing(spread, controller, start, aside)

    @property
    def kept(self) -> int | None:
        """The step to whose copy this process can return: that of the attempt aside, or of the start; None: neither.

        A process that lost one of two copies has none: the handshake compares one number, which stands for both.
        """
        can_return = self.returns < self.controller.undo
        if self.attempt is not None and self.aside.step is not None:
            return None if can_return and self.start.step is None else self.aside.step
        return self.start.step if can_return else None

    def keep_start(self, run: Run, step: int) -> None:
        """Keep the replicas as they are before the first step."""
        if self.returns >= self.controller.undo or not run.acts_after(self.controller, step):
            self.start.forget_buffers()
        elif self.start.can_copy:
            self.start.keep(step)
        else:
            log.warning(
                "the first step is captured in a CUDA graph, so that the start cannot be kept and nothing can be "
                "undone: make a step before capturing to have it kept"
            )

    def act(self, now: Progress, seen: Observation, outcome: Outcome, *, landed: int) -> Return | None:
        """Let the controller act on a sync: move the base values, return to the start, or end a trial.

        Args:
            now: where the run is, with the controller's state before the sync.
            seen: the sync.
            outcome: its average, which is in place.
            landed: the step after which that was applied.

        Returns:
            What the replicas returned to, and the run that begins or goes on then; None if they did not.
        """
        run, controller = now.run, self.controller
        agreed = outcome.kept is not None and outcome.kept == self.kept  # all processes keep the same copies
        possible, steps_left = agreed and self._possible(run, landed), _steps_left(run, landed)
        broke = controller.broke(run, now.state, seen)
        if broke and possible:
            return self.go_back(run, seen, landed=landed)
        trying = controller if isinstance(controller, TryingController) and not broke else None
        if trying and agreed and steps_left and self.attempt is not None and trying.worse(run, now.state, seen):
            return self._resume(self.attempt, landed=landed)
        self.spread.move(run, seen)
        if broke:
            self._tell(seen)
        if self.attempt is not None and self.spread.controller_state.get("trial") is None:
            self._forget_attempt()
        can_try = possible and self.attempt is None and self._can_try(run, landed)
        if trying and can_try and trying.doubts(run, now.state, seen):
            return self._try(now, seen, trying, landed=landed)
        if not run.acts_after(controller, seen.step):
            self.start.drop()
            self._forget_attempt()
        return None

    def go_back(self, run: Run, seen: Observation, *, landed: int) -> Return:
        """Return to the start. The schedule has to begin again, over the steps of the run that is returned.

        Args:
            run: the run so far.
            seen: the sync.
            landed: the step after which its average was applied: the last one before the new beginning.
        """
        # First, because a controller may raise.
        state = self.controller.begun_anew(run, self.spread.controller_state, seen)
        found = self._begin_again(state, run, landed, "return")
        self._forget_attempt()  # what is even higher is no better
        return found

    def _begin_again(self, state: State, run: Run, landed: int, kind: ReturnKind) -> Return:
        rest = self.controller.prepare(run.rest(landed))
        self.start.restore()
        self.spread.controller_state = state
        self.returns += 1
        if self.returns >= self.controller.undo or not rest.acts_after(self.controller, 0):
            self.start.drop()
        return Return(kind, replace(rest, slopes=run.slopes), self.returns, self.controller.undo)

    def _try(self, now: Progress, seen: Observation, controller: TryingController, *, landed: int) -> Return:
        """Keep what was reached, and return to the start with a lower learning rate."""
        state = controller.tried(now.run, now.state, seen)
        self.aside.keep(now.origin + landed)
        self.attempt = replace(now, state=self.spread.controller_state)
        return self._begin_again(state, now.run, landed, "trial")

    def _resume(self, attempt: Progress, *, landed: int) -> Return:
        """Go back to where the run was before the trial, with the steps that remain."""
        run = self.controller.prepare(attempt.run.rest(landed))
        self.aside.restore()
        self.spread.controller_state = attempt.state
        self._forget_attempt()
        resumed = replace(run, slopes=attempt.run.slopes)
        return Return("back", resumed, self.returns, self.controller.undo, attempt)

    def _forget_attempt(self) -> None:
        self.attempt = None
        self.aside.drop()

    def can_go_back(self, agreed: int | None, run: Run, landed: int) -> bool:
        """Return whether all processes keep the same copies, of step ``agreed``, and returns and steps are left."""
        return agreed is not None and agreed == self.kept and self._possible(run, landed)

    def _possible(self, run: Run, landed: int) -> bool:
        return self.start.step is not None and self.returns < self.controller.undo and _steps_left(run, landed)

    def _can_try(self, run: Run, landed: int) -> bool:
        """Return whether a trial has steps, and what follows it, a return for a break in it, and room for a copy."""
        enough = run.total_steps is not None and run.total_steps - 2 * landed >= FEWEST_LEFT
        return enough and self.returns + 1 < self.controller.undo and self.aside.can_copy

    def _tell(self, seen: Observation) -> None:
        """Warn, once and in the first process, that training broke and nothing can be undone."""
        ensemble = self.start.converger.ensemble
        if not self._told and (ensemble.replica, ensemble.part) == (0, 0):
            self._told = True
            finite = seen.losses[np.isfinite(seen.losses)]
            log.warning(
                "step %d: training broke (mean loss %s) and is not undone: returns made: %d of at most %d; the start "
                "is %skept",
                *(seen.step, f"{finite.mean():.4g}" if len(finite) else "not finite", self.returns),
                *(self.controller.undo, "" if self.start.step is not None else "not "),
            )

    def _tell_left_out(self, kept: dict[str, Any]) -> None:
        """Warn, in the processes of the first replica, that a saved copy of the start is of no use here."""
        ensemble = self.start.converger.ensemble
        if ensemble.replica == 0:
            here = _described(ensemble.rows, ensemble.part, ensemble.parts)
            log.warning(
                "the checkpoint's copy of the start of the run is of %s, and this process holds %s: the copy is left "
                "out. From here on training that breaks is not undone, no lower learning rate is tried, and a trial "
                "that is under way is not gone back from. Resume with as many replicas in a process, and as many "
                "processes for each replica, as the checkpoint was saved with to keep all that",
                *(_described(kept["rows"], *kept["part"]), here),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of returns, and the copies."""
        attempt = None
        if self.attempt is not None:
            names = ("origin", "step", "position", "state")
            attempt = {**{name: getattr(self.attempt, name) for name in names}, "kept": self.aside.state_dict()}
        return {"returns": self.returns, "kept": self.start.state_dict(), "attempt": attempt}

    def load_state_dict(
        self, state: dict[str, Any] | None, *, own: bool, run_from: Callable[[int], Run] | None = None
    ) -> None:
        """Load a saved state, if there is one.

        Args:
            state: what :meth:`state_dict` returned.
            own: whether a process with the same replicas saved it.
            run_from: returns the run that began after so many steps.
        """
        self.returns = 0 if state is None else state["returns"]
        kept = None if state is None else state["kept"]
        self.start.load_state_dict(kept, own=own)
        if kept is not None and self.start.step is None:
            self._tell_left_out(kept)
        self._forget_attempt()
        if state is not None and run_from is not None and (saved := state.get("attempt")) is not None:
            self.aside.load_state_dict(saved["kept"], own=own)
            entries = {name: saved[name] for name in ("origin", "step", "position", "state")}
            self.attempt = Progress(**entries, run=run_from(saved["origin"]))
