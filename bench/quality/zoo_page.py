"""Write the part of docs/quality.md about the zoo: bars, excess from each start, sensitivity beside other methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from . import designs, held_out
from .designs import Outcome
from .excess import MODES, PLAIN, PROBE, TRAINING, Excesses, excesses
from .held_out import Constants
from .results import Report
from .spec import Record
from .zoo_plots import FRONTIER_PLOT, SENSITIVITY_PLOT, STARTS_PLOT, plots
from .zoo_tables import (
    bars_met,
    bars_table,
    constants_table,
    designs_table,
    sensitivity_table,
    summary_table,
    tasks_table,
    yardsticks_table,
)

EXPLANATION = """Numbers are the *excess* over plain training at its best learning rate, in % of its loss: the mean over
the seeds of a task, seed by seed where both have the seed. The best learning rate is that of a grid of powers of two,
and then of one half as far apart around the best. The lowest of several means flatters itself: so the yardstick is the
loss of the odd seeds at the learning rate that the even seeds choose, and the other way round. *Flattery* is how far
the best of the first grid, by the few seeds that chose it, is below that. σ is the standard deviation over seeds.

A run that raised an error, is not finite or ends above the level of the untrained model counts as one at that level,
and none counts with more than 100 %. *Worse than plain*: by more than two standard errors of the differences to plain
training from the same start with the same seed. Their variance on a task, from few seeds, is averaged with the one to
be expected: σ² of the task times the median over tasks of the ratio of the two, which counts like four more seeds. In
a simulation without any difference 4 % of tasks with five seeds were worse, and 6 % of those with three. Behind a mean
over tasks is the standard error of the mean difference."""

SENSITIVITY = """The *learning-rate sensitivity* is the mean excess over starts from 1/30 to 30 times the best learning
rate (arXiv 2309.14322). A method that does not depend on a start has one excess, and one without runs from all seven
starts has only that at the best."""

LEFT_OUT = (
    """Each task's constants were fitted without its family: all tasks that share its data or its architecture."""
)

BOLD = "Excess in %; **bold** where it is worse than plain training from the same start."

FRONTIER = """Each point is a design of the controller: its mean excess at the best learning rate, and its median excess
from ten times too low and too high. The line joins designs that no other beats in both."""


def zoo_section(
    report: Report, constants: Constants | None = None, tried: Mapping[str, Sequence[Record]] | None = None
) -> str:
    """Return the text of the zoo, without its heading.

    Args:
        report: The results of ``--size zoo``.
        constants: Constants by task; None: those of ``results/constants.json``.
        tried: Records of designs by name; None: those of ``results/designs``.
    """
    constants = held_out.read() if constants is None else constants
    found, outcomes = _compared(report, tried)
    images = {name: f"![{caption}]({name})" for name, (caption, _) in plots(found, outcomes).items()}
    parts = [*report.sources, EXPLANATION, held_out.verdict(report.records, constants)]
    if any(found.means(mode, 1.0) for mode in MODES):
        parts += [headline(found), "### The bars", bars_table(found), bars_met(found)]
        parts += ["### From every start", summary_table(found), images.get(STARTS_PLOT, "")]
    parts += ["### Sensitivity to the learning rate", SENSITIVITY, sensitivity_table(found)]
    parts.append(images.get(SENSITIVITY_PLOT, ""))
    if FRONTIER_PLOT in images:
        parts += ["### Harm against recovery", FRONTIER, designs_table(outcomes), images[FRONTIER_PLOT]]
    for way in (*MODES, PLAIN):
        if found.means(way, 1.0):
            parts += [f"### Task by task: {way}", BOLD if way != PLAIN else "", tasks_table(found, way)]
    parts += ["### Tasks and yardsticks", yardsticks_table(found)]
    if constants:
        parts += ["### Constants without a family", LEFT_OUT, constants_table(constants)]
    return "\n\n".join(filter(None, parts))


def zoo_plots(report: Report) -> dict[str, tuple[str, Callable[[Path], None]]]:
    """Return caption and function of each plot, by file name."""
    return plots(*_compared(report, None))


def _compared(report: Report, tried: Mapping[str, Sequence[Record]] | None) -> tuple[Excesses, list[Outcome]]:
    found = excesses(report.records)
    return found, designs.outcomes(found, designs.read() if tried is None else tried)


def headline(found: Excesses) -> str:
    """Return one sentence on the harm at the best learning rate: mean and worst over the zoo, in both modes."""
    said = []
    for mode, name in ((PROBE, "with a probe"), (TRAINING, "with training losses only")):
        one = found.summary(mode, 1.0)
        if one is not None:
            mean, worst = (f"{value:.1f} %".replace("-", "−") for value in (one.mean, one.worst))
            said.append(f"{mean} on average and {worst} at worst ({one.worst_task}) {name}")
    tasks = max(len(found.means(mode, 1.0)) for mode in MODES)
    error = float(np.median([100 * ruler.error / ruler.mean for ruler in found.yardsticks.values()]))
    return (
        f"Started at the best learning rate, HDET ends above plain training by {', and by '.join(said)}, over {tasks} "
        f"tasks; the standard error of plain training is {error:.1f} % in the median."
    )
