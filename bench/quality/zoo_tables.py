"""Format the excess over plain training on all tasks of the zoo as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from bench.markdown import table_lines

from .bars import Verdict, verdicts
from .designs import Outcome, frontier
from .excess import MODES, PLAIN, PROBE, Excesses, Start
from .held_out import Constants, spreads
from .suite import STARTS
from .tasks import TASKS

# Limits whose share of tasks is shown, in percent of the loss.
LIMITS = (1.0, 3.0, 5.0)

EVERY_START: tuple[Start, ...] = (*STARTS, None)


def bars_table(excesses: Excesses) -> str:
    """Return the bars from each start, with what was measured in each mode."""
    rows = [
        [start_name(start), *(cell for mode in MODES for cell in _bar(found.get(mode)))]
        for start, found in verdicts(excesses)
    ]
    head = ["start", *(cell for mode in MODES for cell in (f"goal, {mode}", "measured", ""))]
    return _table(head, rows)


def bars_met(excesses: Excesses) -> str:
    """Say how many bars are met in each mode."""
    counts = []
    for mode in MODES:
        found = [modes[mode].met for _, modes in verdicts(excesses) if mode in modes]
        counts.append(f"{sum(found)} of {len(found)} ({mode})")
    return f"Goals met: {', '.join(counts)}."


def _bar(found: Verdict | None) -> list[str]:
    if found is None:
        return ["–"] * 3
    return [found.text, f"{found.figure:.2f} %".replace("-", "−"), "met" if found.met else "**missed**"]


def summary_table(excesses: Excesses) -> str:
    """Return mean, median and worst excess over the tasks from each start, for plain training and both modes."""
    rows = []
    for way in (PLAIN, *MODES):
        for start in EVERY_START:
            found = excesses.summary(way, start)
            if found is None:
                continue
            error = f" ± {found.error:.1f}" if way != PLAIN and found.error is not None else ""
            cells = [way, start_name(start), f"{found.tasks}", f"{percent(found.mean)}{error}", percent(found.median)]
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

    A method may have runs on some tasks only: the last column has HDET with a probe on the same tasks. Methods without
    runs from all starts follow, with what they have.
    """
    rows, ours = [], excesses.sensitivity(PROBE)
    for name, by_task in sensitivities(excesses).items():
        values = list(by_task.values())
        best = excesses.summary(name, 1.0)
        same = [ours[task] for task in by_task if task in ours]
        rows.append(
            [name, f"{len(values)}", percent(fmean(values)), percent(float(np.median(values))), percent(max(values)),
             percent(best.mean) if best else "same", percent(fmean(same)) if same else "–"]
        )  # fmt: skip
    for name in excesses.ways:
        best = excesses.summary(name, 1.0)
        if best is not None and not excesses.sensitivity(name):
            rows.append([name, f"{best.tasks}", "–", "–", "–", percent(best.mean), "–"])
    head = [
        "",
        "tasks",
        "sensitivity: mean",
        "median",
        "worst task",
        "at the best: mean",
        f"{PROBE}, these tasks: mean",
    ]
    return _table(head, rows)


def sensitivities(excesses: Excesses) -> dict[str, dict[str, float]]:
    """Return the sensitivity by method and task, the lowest mean first; runs without a learning rate are a method."""
    found = {way: excesses.sensitivity(way) for way in excesses.ways}
    found |= {f"{mode}, no learning rate": excesses.means(mode, None) for mode in MODES}
    known = {name: by_task for name, by_task in found.items() if by_task}
    return dict(sorted(known.items(), key=lambda item: fmean(item[1].values())))


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
                     percent(found.relative_deviation), percent(found.flattery)])  # fmt: skip
    head = ["task", "data, model", "optimizer", "steps", "replicas × batch", "best learning rate"]
    return _table([*head, "plain there", "seeds", "σ, %", "flattery, %"], rows, left=3)


def constants_table(constants: Constants) -> str:
    """Return how far each constant differs over the families that were left out."""
    return _table(["constant", "lowest", "median", "highest", "highest / lowest"], spreads(constants))


def designs_table(found: Sequence[Outcome]) -> str:
    """Return the designs that were tried, the least harmful first; those on the frontier are marked."""
    best = [one for mode in MODES for one in frontier([one for one in found if one.mode == mode])]
    rows = [
        [one.design, one.mode, f"{one.tasks}", f"{one.harm:.2f}", percent(one.worst), f"{one.low:.1f}",
         f"{one.high:.1f}", f"{one.recovery:.1f}", "yes" if one in best else ""]
        for one in sorted(found, key=lambda one: (MODES.index(one.mode), one.harm))
    ]  # fmt: skip
    head = ["design", "", "tasks", "at the best: mean", "at the best: worst", "10× too low: median",
            "10× too high: median", "both: median", "on the frontier"]  # fmt: skip
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
