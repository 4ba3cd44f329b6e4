"""Say what the controller did at a sync, and why, in one sentence: for records, logs, pages and loggers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hdet_kernels.controller.protocol import (
    ExplainingController,
    Findings,
    Observation,
    Run,
    State,
    TryingController,
)
from hdet_kernels.fanout.spread import Spread

log = logging.getLogger("hdet_kernels")

ReturnKind = Literal["return", "trial", "back"]
ActKind = Literal["return", "trial", "back", "won", "lost", "move", "found"]

#: Acts that are events of a run. The others move values little by little, at sync after sync.
EVENTS = ("return", "trial", "back", "won", "lost", "found")


@dataclass(frozen=True)
class Progress:
    """How far a run has come, for a sync; and what it goes back to if a trial is no better.

    Args:
        origin: steps that were made before the schedule began, or began again.
        step: steps of that schedule that were made.
        position: the step of the whole schedule that they had come to; see :attr:`.Cycle.position`.
        run: the run over the steps since the origin.
        state: the controller's state.
    """

    origin: int
    step: int
    position: float
    run: Run
    state: State


@dataclass(frozen=True)
class Return:
    """A return of all replicas: to the start, or back to where the run was before a trial.

    Args:
        kind: ``"return"`` or ``"trial"``: to the start, for good or to compare; ``"back"``: to before the trial.
        run: the run that begins or goes on then, as its controller prepared it.
        number: how many returns to the start there were so far, this one included.
        most: how many there can be.
        to: where the run was before the trial, for ``"back"``.
    """

    kind: ReturnKind
    run: Run
    number: int
    most: int
    to: Progress | None = None

    def words(self, offset: int) -> str:
        """Say what the replicas returned to. ``offset``: steps before step 0 of the run that ends here."""
        if self.to is not None:
            return f"all replicas go back to where they were at step {offset}"
        left = self.run.total_steps
        over = "" if left is None else f", and the run begins anew over the {left} steps that remain"
        return f"all replicas return to the start{over}{' as a trial' if self.kind == 'trial' else ''}"


@dataclass(frozen=True)
class Act:
    """One act of the controller at a sync.

    Args:
        kind: ``"return"``: all replicas returned to the start, with lower learning rates; ``"trial"``: the same, to
            compare; ``"back"``: a trial was no better, and they went back; ``"won"``: it was better, and goes on;
            ``"lost"``: it was no better, and goes on because it cannot be undone;
            ``"move"``: values were moved by a little; ``"found"``: a scouting phase found the learning rate.
        why: one sentence: the step, the reason with its numbers, old and new values, and what is left.
    """

    kind: ActKind
    why: str

    def log(self) -> None:
        """Log it: as a warning where training was undone, for debugging where it happens at sync after sync."""
        log.log(logging.DEBUG if self.kind == "move" else logging.WARNING, "%s", self.why)


def factors_of(spread: Spread, state: State) -> list[float] | None:
    """Return the factor by which each hyperparameter is above what was given; None if the controller does not tell."""
    if spread.controller is None:
        return [1.0] * len(spread.hyperparameters)
    return spread.controller.factors(state) if isinstance(spread.controller, ExplainingController) else None


@dataclass(frozen=True)
class Before:
    """The controller's state and the base values before it acts at a sync."""

    state: State
    base: list[float]

    @staticmethod
    def of(spread: Spread) -> Before:
        """Return those of now."""
        return Before(spread.controller_state, spread.placement().base.tolist())


def explained(
    spread: Spread,
    run: Run,
    before: Before,
    seen: Observation,
    undone: Return | None,
    *,
    offset: int = 0,
    cause: str | None = None,
) -> tuple[Findings | None, Act | None]:
    """Return the findings of the controller at a sync, if it tells them, and what it did, if it moved something.

    Args:
        spread: the values, with the controller and its state after the sync.
        run: the run.
        before: how both were before it.
        seen: the sync.
        undone: the return to the start, if there was one.
        offset: steps before step 0: those of a scouting phase.
        cause: why there was a return, if the controller was not asked.
    """
    controller, findings = spread.controller, None
    if isinstance(controller, ExplainingController):
        returned = undone is not None
        findings = controller.findings(run, before.state, spread.controller_state, seen, returned=returned)
    changes = _changes(spread, run, before, anew=undone is not None)
    ended = undone is None and before.state.get("trial") is not None and spread.controller_state.get("trial") is None
    if not changes and undone is None and not ended:
        return findings, None
    why = cause or (findings.why if findings else "") or f"by {type(controller).__name__}"
    sentence = f"step {offset + seen.step}: {why}: "
    if ended:
        lost = isinstance(controller, TryingController) and controller.worse(run, before.state, seen)
        goes_on = "it cannot be undone, and the run goes on with it" if lost else "the run goes on with it"
        peaks = peak_words(peaks_of(spread, run, [hyper.name for hyper in spread.hyperparameters]) or {})
        words = ", ".join(filter(None, [goes_on, peaks, *changes]))
        return findings, Act("lost" if lost else "won", sentence + words)
    if undone is None:
        return findings, Act("move", sentence + ", ".join(changes))
    left = f"{undone.most - undone.number} of {undone.most} returns left"
    return findings, Act(undone.kind, f"{sentence}{', '.join([undone.words(offset), *changes])}; {left}")


def _changes(spread: Spread, run: Run, before: Before, *, anew: bool) -> list[str]:
    """Return old and new value of every hyperparameter that the controller moved, in words.

    Where the schedule begins anew (``anew``) only the peaks of learning rates tell something.
    """
    old_factors, factors = factors_of(spread, before.state), factors_of(spread, spread.controller_state)
    changes = []
    for index, (hyper, old, new) in enumerate(
        zip(spread.hyperparameters, before.base, spread.placement().base.tolist(), strict=True)
    ):
        peak = None
        if old_factors is not None and factors is not None:
            if old_factors[index] == factors[index]:  # a warm-up's cap moves the value too, and is no act
                continue
            old = new * old_factors[index] / factors[index]
            if index < len(run.peaks) and (given := run.peaks[index]) is not None:
                peak = f"{given * old_factors[index]:.3g} → {given * factors[index]:.3g}"
        if peak is not None and anew:
            changes.append(f"peak of {hyper.name} {peak}")
        elif old != new:
            changes.append(f"{hyper.name} {old:.3g} → {new:.3g}" + (f" (peak {peak})" if peak else ""))
    return changes


def peaks_of(spread: Spread, run: Run, names: Sequence[str]) -> dict[str, list[float]] | None:
    """Return the given peak and the present one of every learning rate that has one; None if they are not known."""
    factors = factors_of(spread, spread.controller_state)
    if factors is None:
        return None
    peaks = {n: [p, p * f] for n, p, f in zip(names, run.peaks, factors, strict=False) if p is not None}
    return peaks or None


def peak_words(peaks: Mapping[str, Sequence[float]]) -> str:
    """Return given and used peaks in words: "peak of lr/0 0.2 given, 0.0667 used"."""
    return ", ".join(
        f"peak of {name} {given:.3g}" + (" as given" if given == used else f" given, {used:.3g} used")
        for name, (given, used) in peaks.items()
    )
