"""Say what the controller did at a sync, and why, in one sentence: for records, logs, pages and loggers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hdet_kernels.controller.protocol import ExplainingController, Findings, Observation, Run, State
from hdet_kernels.fanout.spread import Spread

log = logging.getLogger("hdet_kernels")

ActKind = Literal["return", "cut", "move", "found"]

#: Acts that are events of a run. The others move values little by little, at sync after sync.
EVENTS = ("return", "cut", "found")


@dataclass(frozen=True)
class Return:
    """A return of all replicas to an earlier average.

    Args:
        step: the step of that average.
        level: mean loss there, if it is known.
        number: how many returns there were so far, this one included.
        most: how many there can be in a run.
    """

    step: int
    level: float | None
    number: int
    most: int

    def words(self, before: int) -> str:
        """Return what was undone; ``before``: the steps of the scouting phase, which come before step 0."""
        level = "" if self.level is None else f" (mean loss {self.level:.4g})"
        where = f"the average of step {before + self.step}" if self.step else "the start"
        return f"all replicas return to {where}{level}"


@dataclass(frozen=True)
class Act:
    """One act of the controller at a sync.

    Args:
        kind: ``"return"``: all replicas returned to an earlier average; ``"cut"``: learning rates were lowered at
            once; ``"move"``: values were moved by a little; ``"found"``: a scouting phase found the learning rate.
        why: one sentence: the step, the reason with its numbers, old and new values, and what is left.
    """

    kind: ActKind
    why: str

    def log(self) -> None:
        """Log it: as a warning where training was undone, for debugging where it happens at sync after sync."""
        levels = {"return": logging.WARNING, "found": logging.WARNING, "move": logging.DEBUG}
        log.log(levels.get(self.kind, logging.INFO), "%s", self.why)


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
        undone: the return to an earlier average, if there was one.
        offset: steps before step 0: those of a scouting phase.
        cause: why there was a return, if the controller was not asked.
    """
    controller, findings = spread.controller, None
    if isinstance(controller, ExplainingController):
        returned = undone is not None
        findings = controller.findings(run, before.state, spread.controller_state, seen, returned=returned)
    changes = _changes(spread, run, before)
    if not changes and undone is None:
        return findings, None
    why = cause or (findings.why if findings else "") or f"by {type(controller).__name__}"
    left = findings.left if findings else ""
    kind: ActKind = "cut" if findings and findings.cut else "move"
    if undone is not None:
        changes.insert(0, undone.words(offset))
        kind, left = "return", f"{undone.most - undone.number} of {undone.most} returns left"
    sentence = f"step {offset + seen.step}: {why}: {', '.join(changes)}"
    return findings, Act(kind, f"{sentence}; {left}" if left else sentence)


def _changes(spread: Spread, run: Run, before: Before) -> list[str]:
    """Return old and new value of every hyperparameter that the controller moved, in words."""
    old_factors, factors = factors_of(spread, before.state), factors_of(spread, spread.controller_state)
    changes = []
    for index, (hyper, old, new) in enumerate(
        zip(spread.hyperparameters, before.base, spread.placement().base.tolist(), strict=True)
    ):
        peak = ""
        if old_factors is not None and factors is not None:
            if old_factors[index] == factors[index]:  # a warm-up's cap moves the value too, and is no act
                continue
            old = new * old_factors[index] / factors[index]
            if index < len(run.peaks) and (given := run.peaks[index]) is not None:
                peak = f" (peak {given * old_factors[index]:.3g} → {given * factors[index]:.3g})"
        if old != new:
            changes.append(f"{hyper.name} {old:.3g} → {new:.3g}{peak}")
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
