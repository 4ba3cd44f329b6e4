"""Format the excess over plain training on all tasks of the zoo as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bench.markdown import table_lines

from .bars import verdicts
from .designs import Outcome, frontier
from .excess import MODES, PLAIN, Excesses, Start
from .held_out import Constants, spreads
from .suite import STARTS
from .tasks import TASKS

# Limits whose share of tasks is shown, in percent of the loss.
LIMITS = (1.0, 3.0, 5.0)

EVERY_START: tuple[Start, ...] = (*STARTS, None)


def bars_table(excesses: Excesses) -> str:
    """Return the bars from each start, a row for each mode, with what was measured."""
    rows = [
        [start_name(found.start), found.mode, found.text, f"{found.figure:.2f} %", "met" if found.met else "**missed**"]
        for found in verdicts(excesses)
    ]
    return _table(["start", "", "bar", "measured", ""], rows, left=3)


def bars_met(excesses: Excesses) -> str:
    """Say how many bars are met in each mode."""
    found = verdicts(excesses)
    counts = [
        f"{sum(one.met for one in found if one.mode == mode)} of {sum(one.mode == mode for one in found)} ({mode})"
        for mode in MODES
    ]
    return f"Bars met: {', '.join(counts)}."


def summary_table(excesses: Excesses) -> str:
    """Return mean, median and worst excess over the tasks from each start, for plain training and both modes."""
    rows = []
    for way in (PLAIN, *MODES):
        for start in EVERY_START:
            found = excesses.summary(way, start)
            if found is None:
                continue
            cells = [way, start_name(start), f"{found.tasks}", *map(percent, (found.mean, found.median))]
            cells.append(f"{percent(found.worst)} ({found.worst_task})")
            cells += [f"{excesses.share_within(way, start, limit):.0%}" for limit in LIMITS]
            against = way != PLAIN and found.compared
            cells += [f"{count} of {found.compared}" if against else "–" for count in (found.worse, found.better)]
            rows.append(cells)
    shares = [f"tasks ≤ {limit:g} %" for limit in LIMITS]
    head = ["", "start", "tasks", "mean", "median", "worst", *shares, "worse than plain", "better than plain"]
    return _table(head, rows, left=2)


def sensitivity_table(excesses: Excesses) -> str:
    """Return the learning-rate sensitivity of every method, the lowest mean first.

    Methods without runs from all starts follow, with what they have.
    """
    rows = []
    for name, by_task in sensitivities(excesses).items():
        values = list(by_task.values())
        best = excesses.summary(name, 1.0)
        rows.append(
            [name, f"{len(values)}", percent(float(np.mean(values))), percent(float(np.median(values))),
             percent(max(values)), percent(best.mean) if best else "same"]
        )  # fmt: skip
    for name in excesses.ways:
        best = excesses.summary(name, 1.0)
        if best is not None and not excesses.sensitivity(name):
            rows.append([name, f"{best.tasks}", "–", "–", "–", percent(best.mean)])
    head = ["", "tasks", "sensitivity, mean over tasks", "median", "worst task", "at the best"]
    return _table(head, rows)


def sensitivities(excesses: Excesses) -> dict[str, dict[str, float]]:
    """Return the sensitivity by method and task, the lowest mean first; runs without a learning rate are a method."""
    found = {way: excesses.sensitivity(way) for way in excesses.ways}
    found |= {f"{mode}, no learning rate": excesses.means(mode, None) for mode in MODES}
    known = {name: by_task for name, by_task in found.items() if by_task}
    return dict(sorted(known.items(), key=lambda item: float(np.mean(list(item[1].values())))))


def tasks_table(excesses: Excesses, way: str) -> str:
    """Return the excess on each task from each start; bold where plain training from there is better by 2 errors."""
    columns = [start for start in EVERY_START if excesses.means(way, start)]
    means = {start: excesses.means(way, start) for start in columns}
    worse = {start: {task for task, one in excesses.differences(way, start).items() if one.worse} for start in columns}
    rows = [
        [task, *(_cell(means[start], task, task in worse[start]) for start in columns)]
        for task in excesses.yardsticks
        if any(task in found for found in means.values())
    ]
    return _table(["task", *map(start_name, columns)], rows)


def yardsticks_table(excesses: Excesses) -> str:
    """Return the tasks with the best learning rate of plain training and its loss."""
    rows = []
    for task, found in excesses.yardsticks.items():
        kind = TASKS.get(task)
        size = [kind.title, kind.optimizer, f"{kind.steps}", f"{kind.replicas} × {kind.batch}"] if kind else ["–"] * 4
        best = f"{found.best:.2g}{' (end of the grid)' if found.at_the_end else ''}"
        rows.append([task, *size, best, f"{found.mean:.4f} ± {found.error:.4f}", f"{len(found.losses)}",
                     percent(100 * found.deviation / found.mean), percent(found.flattery)])  # fmt: skip
    head = ["task", "data, model", "optimizer", "steps", "replicas × batch", "best learning rate"]
    return _table([*head, "plain there", "seeds", "σ, %", "flattery, %"], rows, left=3)


def constants_table(constants: Constants) -> str:
    """Return how far each constant differs over the families that were left out."""
    return _table(["constant", "lowest", "median", "highest", "highest / lowest"], spreads(constants))


def designs_table(found: Sequence[Outcome]) -> str:
    """Return the designs that were tried, the least harmful first; those on the frontier are marked."""
    best = [one for mode in MODES for one in frontier([one for one in found if one.mode == mode])]
    rows = [
        [one.design, one.mode, f"{one.tasks}", f"{one.harm:.2f}", percent(one.worst), f"{one.recovery:.2f}",
         "yes" if one in best else ""]
        for one in sorted(found, key=lambda one: (MODES.index(one.mode), one.harm))
    ]  # fmt: skip
    head = ["design", "", "tasks", "at the best: mean", "at the best: worst", "10× off: median", "on the frontier"]
    return _table(head, rows, left=2)


def start_name(start: Start) -> str:
    """Return a start in words."""
    if start is None:
        return "no learning rate"
    return "at the best" if start == 1.0 else f"{1 / start:.0f}× too low" if start < 1 else f"{start:.0f}× too high"


def percent(value: float) -> str:
    """Format percents with one digit after the point, large ones without."""
    text = f"{value:.1f}" if abs(value) < 9.95 else f"{value:.0f}"
    return "0.0" if text == "-0.0" else text.replace("-", "−")


def _cell(means: Mapping[str, float], task: str, worse: bool) -> str:
    if task not in means:
        return "–"
    return f"**{percent(means[task])}**" if worse else percent(means[task])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    return "\n".join(table_lines(head, rows, left))
