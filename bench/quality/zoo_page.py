"""Write the part of docs/quality.md about the zoo: bars, excess from each start, sensitivity beside other methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from . import designs, held_out
from .bars import HARM, RECOVERY
from .designs import Outcome
from .excess import MODES, PLAIN, PROBE, TRAINING, Excesses, excesses, way_of
from .held_out import Constants
from .results import Report
from .spec import Record
from .zoo_plots import FRONTIER_PLOT, SENSITIVITY_PLOT, STARTS_PLOT, plots
from .zoo_tables import (
    bars_met,
    bars_table,
    constants_table,
    designs_table,
    percent,
    sensitivity_table,
    summary_table,
    tasks_table,
    yardsticks_table,
)

EXPLANATION = """Numbers are the *excess* over plain training at its best learning rate, in % of its loss: the mean
over the seeds of a task, seed by seed where both have the seed. The starts are factors of the best learning rate of
an earlier grid, of powers of two. There, and half an octave below and above it, plain training was run with ten seeds
(two for the large transformer). The lowest of several means flatters itself: so the yardstick is the loss of the odd
seeds at the learning rate that the even seeds choose, and the other way round. *Flattery* is how far the lowest mean,
by the seeds that chose it, is below that. σ is the standard deviation over seeds. Where the yardstick's learning rate
is not that of the earlier grid, the starts are half an octave off it.

A run that raised an error, is not finite or ends above the level of the untrained model counts as one at that level,
and none counts with more than 100 %. *Worse than plain*: by more than two standard errors of the difference to plain
training from the same start with the same seed. Behind a mean over tasks is the standard error of the mean
difference."""

ONE_SEED = """**There is one seed from each start.** A task has then no standard error of its own: the variance of a
difference is taken as twice that of plain training at the best over ten seeds, as for independent runs. So one task
says little, and the mean over tasks has the error beside it."""

SENSITIVITY = """The *learning-rate sensitivity* is the mean excess over starts from 1/30 to 30 times the best learning
rate (arXiv 2309.14322). A method that does not depend on a start has one excess, and one without runs from all seven
starts has only that at the best. Methods were run on different tasks: the last column has HDET on those of each."""

LEFT_OUT = (
    """Each task's constants were fitted without its family: all tasks that share its data or its architecture."""
)

BOLD = "Excess in %; **bold** where it is worse than plain training from the same start."

FRONTIER = """Each point is a design of the controller: its mean excess at the best learning rate, and its median
excess from ten times too low and too high together. The line joins designs that no other beats in both. **These are
not real runs**: each design was played through logs of plain runs (`python -m bench.quality replay --designs`). It
sees what was logged at the learning rate nearest to its own, and ends with the loss of plain training at its last
learning rate, so that what training lost before a learning rate fell is not counted."""


def zoo_section(report: Report, constants: Constants | None = None, tried: Sequence[Outcome] | None = None) -> str:
    """Return the text of the zoo, without its heading.

    Args:
        report: The results of ``--size zoo``.
        constants: Constants by task; None: those of ``results/constants.json``.
        tried: Outcomes of designs; None: those of ``results/designs.json``.
    """
    constants = held_out.read() if constants is None else constants
    found, outcomes = excesses(report.records), designs.read() if tried is None else tried
    images = {name: f"![{caption}]({name})" for name, (caption, _) in plots(found, outcomes).items()}
    parts = [
        *report.sources,
        *report.notes,
        EXPLANATION,
        ONE_SEED if found.single_seeds else "",
        left_out(report, found),
    ]
    parts.append(held_out.verdict(report.records, constants))
    if any(found.means(mode, 1.0) for mode in MODES):
        parts += [
            f"{headline(found, report.records)} {noisy(found)}".strip(),
            "### The goals",
            bars_table(found),
            bars_met(found),
        ]
        parts += ["### From every start", summary_table(found), images.get(STARTS_PLOT, "")]
    parts += ["### Sensitivity to the learning rate", SENSITIVITY, sensitivity_table(found)]
    parts.append(images.get(SENSITIVITY_PLOT, ""))
    if FRONTIER_PLOT in images:
        parts += [
            "### Harm against recovery",
            FRONTIER,
            designs_table(outcomes),
            images[FRONTIER_PLOT],
            choice(outcomes),
        ]
    for way in (*MODES, PLAIN):
        if found.means(way, 1.0):
            parts += [f"### Task by task: {way}", BOLD if way != PLAIN else "", tasks_table(found, way)]
    parts += ["### Tasks and yardsticks", yardsticks_table(found)]
    if constants:
        parts += ["### Constants without a family", LEFT_OUT, constants_table(constants)]
    return "\n\n".join(filter(None, parts))


def zoo_plots(report: Report) -> dict[str, tuple[str, Callable[[Path], None]]]:
    """Return caption and function of each plot, by file name."""
    return plots(excesses(report.records), designs.read())


def left_out(report: Report, found: Excesses) -> str:
    """Name the tasks that have runs and no yardstick; nothing where there are none."""
    names = sorted({record["task"] for record in report.records} - found.yardsticks.keys())
    if not names:
        return ""
    return (
        f"Left out: {', '.join(names)}. At every learning rate of its grid some seed of plain training diverges, so "
        "that there is nothing to measure by."
    )


def choice(outcomes: Sequence[Outcome]) -> str:
    """Say which design recovers most among those that meet the goal for harm, and whether it meets both."""
    said = []
    for mode, harm, recovery in zip(MODES, HARM, RECOVERY, strict=True):
        within = [one for one in outcomes if one.mode == mode and one.harm <= harm]
        if within:
            best = min(within, key=lambda one: one.recovery)
            both = "meets" if best.recovery <= recovery else "misses"
            said.append(f"{mode}: {best.design}, which {both} the goal for recovery (median ≤ {recovery:g} %)")
    return f"Of the designs whose mean at the best is at most {HARM[0]:g} %, most is recovered by: {'; '.join(said)}."


def headline(found: Excesses, records: Sequence[Record]) -> str:
    """Return the harm at the best learning rate in a few words: mean, median and worst over the zoo, in both modes."""
    said, acted = [], []
    for mode, name in ((PROBE, "with a probe"), (TRAINING, "with training losses only")):
        one = found.summary(mode, 1.0)
        if one is None:
            continue
        worse = [
            f"{task}, by {percent(difference.mean)} %"
            for task, difference in found.differences(mode, 1.0).items()
            if difference.worse
        ]
        error = f" ± {one.error:.1f}" if one.error is not None else ""
        sigma = found.yardsticks[one.worst_task].relative_deviation
        said.append(
            f"by {percent(one.mean)}{error} % on average {name} (median {percent(one.median)} %; worst "
            f"{percent(one.worst)} %: {one.worst_task}, whose σ over seeds is {percent(sigma)} %; worse by two "
            f"standard errors on {len(worse)} of {one.compared} tasks{': ' if worse else ''}{'; '.join(worse)})"
        )
        acted.append(str(len(touched(records, mode) & found.yardsticks.keys())))
    return (
        f"Started at the best learning rate, HDET ends above plain training {', and '.join(said)}. The controller "
        f"changed it on {' and '.join(acted)} of these tasks."
    )


def touched(records: Sequence[Record], mode: str) -> set[str]:
    """Return the tasks with a run at the best learning rate in which the controller changed it, went back or failed."""
    return {
        record["task"]
        for record in records
        if record["kind"] == "start" and record.get("factor") == 1.0 and way_of(record) == mode
        if "error" in record or any(record.get("mu", ())) or record.get("returns")
    }


def noisy(found: Excesses) -> str:
    """Name the tasks whose deviation over seeds is a tenth of the loss or more; nothing where there are none."""
    loud = {task: ruler.relative_deviation for task, ruler in found.yardsticks.items()}
    names = [
        f"{task} {percent(loud[task])} %" for task in sorted(loud, key=lambda task: -loud[task]) if loud[task] >= 10
    ]
    return f"Plain training's σ over seeds is large on some: {', '.join(names)} of the loss." if names else ""
