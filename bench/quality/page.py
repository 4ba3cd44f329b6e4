"""Write docs/quality.md and its plots, and what ``python -m bench.quality run`` prints, from results files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pandas as pd

from bench.markdown import percent, table, wrapped
from bench.plots import new_figure, save
from bench.tables import NOTHING, render

from . import designs, held_out
from .excess import CAP, GOALS, GROUPS, MODES, PLAIN, PROBE, TRAINING, Excesses, Start, excesses, way_of, yardsticks
from .results import Record, Report, joined, select
from .scalars import SCALARS
from .search import METHODS, SHARES
from .suite import STARTS, TRUST_STARTS, TRUSTS
from .tasks import TASKS

EVERY_START: tuple[Start, ...] = (*STARTS, None)
# Starts of the table of README.md. Below the best the controller does nothing by default: one row shows it.
README_STARTS: tuple[Start, ...] = (0.1, 1.0, 3.0, 10.0, 30.0, None)
# Starts at which the controller may do harm or help.
HIGH_STARTS = (1.0, 3.0, 10.0, 30.0)
STARTS_PLOT, SENSITIVITY_PLOT = "quality_zoo_starts.png", "quality_zoo_sensitivity.png"
COLOURS = {PLAIN: "0.45", PROBE: "C0", TRAINING: "C1"}
# Excesses are linear below 1 % and logarithmic above: they may be negative, and range over decades.
TICKS = (-1, 0, 1, 3, 10, 30, 100)


def read(folder: Path) -> list[Report]:
    """Read all results files of a folder; a file without records, such as the constants', is none."""
    contents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [Report(**content) for content in contents if "records" in content]


def zoo_of(reports: Sequence[Report]) -> Report:
    """Return the results of the zoo, of several files together."""
    found = [report for report in reports if report.size == "zoo"]
    if not found:
        raise ValueError("no results of --size zoo: docs/quality.md is about these")
    return joined(found)


def text(reports: Sequence[Report]) -> str:
    """Return docs/quality.md."""
    zoo = zoo_of(reports)
    found = excesses(zoo.records)
    return render(
        "quality.md",
        headline=headline(found, zoo.records),
        met=bars_met(found),
        noisy=noisy(found),
        runs=len(zoo.records),
        tasks=len(found.yardsticks),
        machine=zoo.machine.split(";")[0],
        constants=held_out.verdict(zoo.records, held_out.read()),
        notes=zoo.notes,
        left_out=sorted({record["task"] for record in zoo.records} - found.yardsticks.keys()),
        starts=starts_table(found),
        groups=groups_table(found),
        goals=bars_table(found),
        sensitivity=sensitivity_table(found),
        there=bool(found.sensitivity(PROBE)),
        designs=designs_table(designs.read()),
        trust=trust_table(found, zoo.records),
        search=search_table(zoo.records),
        by_task=tasks_table(found),
        scalars="\n\n".join(filter(None, map(scalars_table, reports))),
    )


def readme_text(reports: Sequence[Report]) -> str:
    """Return the sentence and the table of README.md: HDET with its defaults, which reads training losses."""
    zoo = zoo_of(reports)
    found = excesses(zoo.records)
    rows = [readme_row(found, start) for start in README_STARTS if found.summary(TRAINING, start)]
    right, plain, lowered = (
        percent(found.summary(way, start).median) for way, start in ((TRAINING, 1.0), (PLAIN, 10.0), (TRAINING, 10.0))
    )
    words = render("readme_quality.md", tasks=len(found.yardsticks), right=right, plain=plain, lowered=lowered)
    head = ["learning rate at the start", PLAIN, "HDET", "HDET better", "worse"]
    return f"{wrapped(words)}\n\n{table(head, rows)}"


def readme_row(found: Excesses, start: Start) -> list[str]:
    """Return a row of README's table: median and mean excess, and on how many tasks HDET is better and worse."""
    cells = [start_name(start)]
    for way in (PLAIN, TRAINING):
        one = found.summary(way, start)
        cells.append(f"{percent(one.median)} % ({percent(one.mean)} %)" if one else NOTHING)
    ours = found.summary(TRAINING, start)
    return [*cells, *([str(ours.better), str(ours.worse)] if ours and ours.compared else [NOTHING, NOTHING])]


def printed(report: Report) -> str:
    """Return the tables of a run: the excess from each start for the zoo, else losses of all parts and methods."""
    parts = [*report.sources, *report.notes]
    if report.size == "zoo":
        found = excesses(report.records)
        parts += [starts_table(found), groups_table(found), bars_table(found), trust_table(found, report.records)]
        parts += [search_table(report.records), sensitivity_table(found)]
    else:
        parts += [losses_table(report), scalars_table(report)]
    return "\n\n".join(filter(None, parts))


def search_table(records: Sequence[Record]) -> str:
    """Return the excess after searches for a learning rate, by method and share; empty without searches.

    A cell has the median over tasks, the mean, and what nine in ten are below: the choice alone, and then with the
    shorter run. Tasks that overfit are left out.
    """
    best = {task: found for task, found in yardsticks(records).items() if not TASKS[task].overfits}
    body = []
    for share in SHARES:
        for method in METHODS:
            runs = [run for run in select(records, kind="chosen", by=method, share=share) if run["task"] in best]
            excess = pd.DataFrame(
                {
                    "task": run["task"],
                    "alone": run["steps"] is None,
                    "excess": np.fmin(100 * (run["val"] / best[run["task"]].mean - 1), CAP),
                }
                for run in runs
            )
            if not excess.empty:
                cells = []
                for alone in (True, False):
                    means = excess[excess["alone"] == alone].groupby("task")["excess"].mean()
                    figures = means.median(), means.mean(), means.quantile(0.9)
                    complete = len(means) == excess["task"].nunique()  # a time limit leaves out the last runs
                    cells.append(" / ".join(f"{figure:.1f}" for figure in figures) if complete else NOTHING)
                body.append([f"{share:g}", method, *cells])
    return table(["share", "search", "choice alone", "with the shorter run"], body, left=2) if body else ""


def trust_table(found: Excesses, records: Sequence[Record]) -> str:
    """Return the excess from each start, by trust, and what is expected of it; empty without such runs.

    Expected by a user whose error is log-normal with a factor of three, over the starts that every trust has. Training
    losses only, and the tasks that have runs of each trust from the best learning rate and above; tasks that overfit
    are left out.
    """
    runs = {3.0: select(records, kind="start", method="hdet", probe=False)}
    runs |= {
        trust: [run for run in select(records, kind="trust") if run["options"]["trust"] == trust] for trust in TRUSTS
    }
    by_trust = {trust: found.of_runs([{**run, "kind": "start"} for run in some]) for trust, some in runs.items()}
    starts = sorted(TRUST_STARTS)
    means = {f"{trust:g}": [one.means(TRAINING, start) for start in starts] for trust, one in by_trust.items()}
    high = [of_start for cells in means.values() for of_start in cells[starts.index(1.0) :]]
    tasks = set.intersection(*map(set, high)) & GROUPS["most tasks"]
    if not tasks:
        return ""
    common = [at for at in range(len(starts)) if all(tasks <= cells[at].keys() for cells in means.values())]
    weights = np.exp(-0.5 * (np.log([starts[at] for at in common]) / np.log(3.0)) ** 2)
    rows = []
    for trust, cells in {"plain": [found.means(PLAIN, start) for start in starts], **means}.items():
        values = [[cell[task] for task in tasks] if tasks <= cell.keys() else [] for cell in cells]
        figures = [(median(some), fmean(some), max(some)) if some else () for some in values]
        shown = [" / ".join(map(percent, cell)) or NOTHING for cell in figures]
        complete = all(values[at] for at in common)
        expected = np.average([fmean(values[at]) for at in common], weights=weights) if complete else None
        rows.append([trust, *shown, NOTHING if expected is None else percent(expected)])
    return table([f"trust ({len(tasks)} tasks)", *map(start_name, starts), "expected"], rows)


def losses_table(report: Report) -> str:
    """Return mean and standard deviation over seeds of the validation loss.

    There is a row for each part, task and method, and a column for each start; a learning rate between two starts has
    none.
    """
    runs = pd.DataFrame(
        {
            "part": " ".join([run["kind"], *(run[key] for key in ("configuration", "schedule") if run.get(key))]),
            "task": run["task"],
            "method": run["method"] + ("" if run.get("probe", True) else ", training loss"),
            "start": run.get("factor") or (run["lr"] or 0.0) / report.best[run["task"]],
            "val": run["val"],
        }
        for run in report.records
        if "val" in run and run["kind"] != "scalar" and run["task"] in report.best
    )
    if runs.empty:
        return ""
    shown = {start: np.isclose(runs["start"], start, rtol=0.01) for start in STARTS}
    groups = {start: runs[at].groupby(["part", "task", "method"], sort=False)["val"] for start, at in shown.items()}
    cells = {start_name(start): group.agg(_spread) for start, group in groups.items()}
    wide = pd.DataFrame(cells).fillna(NOTHING)
    body = [[*index, *row] for index, row in zip(wide.index, wide.to_numpy(), strict=True)]
    return table(["part", "task", "method", *wide.columns], body, left=3)


def _spread(values: pd.Series) -> str:
    return f"{values.mean():.4f}" + (f" ± {values.std():.4f}" if len(values) > 1 else "")


def scalars_table(report: Report) -> str:
    """Return runs that explore another scalar: the direction of its movement, and the losses; nothing without any."""
    rows = []
    for name, scalar in SCALARS.items():
        fixed = {run["value"]: run["val"] for run in select(report.records, kind="scalar", name=name, explores=False)}
        best = min(fixed, key=lambda value: fixed[value], default=None)
        for start in scalar.starts:
            runs = select(report.records, kind="scalar", name=name, explores=True, value=start)
            if best is None or not runs:
                continue
            ends, val = [run["end"] for run in runs], fmean(run["val"] for run in runs)
            cells = [
                f"{best:g}",
                f"{start:g}",
                f"{median(ends):.3g}",
                f"{fixed[start]:.4f}" if start in fixed else NOTHING,
            ]
            rows.append([name, *cells, f"{val:.4f}", f"{fixed[best]:.4f}"])
    header = ["scalar", "best of the grid", "start", "ends at", "loss at the start", "explored", "at the best"]
    return table(header, rows) if rows else ""


def headline(found: Excesses, records: Sequence[Record]) -> str:
    """Return the harm at the best learning rate in a few words: mean, median and worst over the zoo, in both modes."""
    said, acted = [], []
    for mode, name in ((PROBE, "with a probe"), (TRAINING, "with training losses only")):
        one = found.summary(mode, 1.0)
        if one is None:
            continue
        error = f" ± {one.error:.1f}" if one.error is not None else ""
        said.append(
            f"by {percent(one.mean)}{error} % on average {name} (median {percent(one.median)} %; worst "
            f"{percent(one.worst)} %: {one.worst_task}; worse by two standard errors on {one.worse} of "
            f"{one.compared} tasks)"
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
    loud = {
        task: ruler.relative_deviation for task, ruler in found.yardsticks.items() if ruler.relative_deviation >= 10
    }
    names = [f"{task} {percent(loud[task])} %" for task in sorted(loud, key=lambda task: -loud[task])]
    return f"Plain training's σ over seeds is large on some: {', '.join(names)} of the loss." if names else ""


def bars_met(found: Excesses) -> str:
    """Say how many goals are met."""
    figures = [(goal, goal.measured(found)) for goal in GOALS]
    met = sum(figure is not None and figure <= goal.limit for goal, figure in figures)
    return f"Goals met: {met} of {len(GOALS)}."


def bars_table(found: Excesses) -> str:
    """Return every goal with what was measured."""
    rows = []
    for goal in GOALS:
        figure = goal.measured(found)
        if figure is not None:
            met = "met" if figure <= goal.limit else NOTHING
            rows.append([start_name(goal.start), goal.text, f"{goal.limit:g}", percent(figure), met])
    return table(["start", "figure", "goal", "measured", ""], rows, left=2)


def groups_table(found: Excesses) -> str:
    """Return median, nine in ten and worst excess of groups of tasks, for plain training and HDET with its defaults."""
    rows = []
    for group, names in GROUPS.items():
        some = found.of_tasks(names)
        for way, name in ((PLAIN, PLAIN), (TRAINING, "HDET")):
            known = {start: some.summary(way, start) for start in HIGH_STARTS}
            cells = [
                " / ".join(map(percent, (one.median, one.nine_in_ten, one.worst))) if one else NOTHING
                for one in known.values()
            ]
            count = max((one.tasks for one in known.values() if one), default=0)
            rows.append([f"{group} ({count}), {name}", *cells])
    return table(["", *map(start_name, HIGH_STARTS)], rows)


def starts_table(found: Excesses) -> str:
    """Return median, mean and worst excess over the tasks from each start, for plain training and the modes that ran.

    *Worse* and *better* than plain training are those of the default, which reads training losses.
    """
    ways = [way for way in (PLAIN, *MODES) if any(found.summary(way, start) for start in EVERY_START)]
    rows = []
    for start in EVERY_START:
        cells = [_three(found, way, start) for way in ways]
        one = found.summary(TRAINING, start)
        against = [f"{one.worse} of {one.compared}", one.better] if one and one.compared else [NOTHING, NOTHING]
        if set(cells) != {NOTHING}:
            rows.append([start_name(start), *cells, *against])
    return table(["start", *ways, "worse", "better"], rows)


def _three(found: Excesses, way: str, start: Start) -> str:
    one = found.summary(way, start)
    return " / ".join(map(percent, (one.median, one.mean, one.worst))) if one else NOTHING


def sensitivities(found: Excesses) -> dict[str, dict[str, float]]:
    """Return the sensitivity by method and task, the lowest mean first; runs without a learning rate are a method."""
    all_ways = {way: found.sensitivity(way) for way in found.ways}
    all_ways |= {f"{mode}, no learning rate": found.means(mode, None) for mode in MODES}
    known = {name: by_task for name, by_task in all_ways.items() if by_task}
    return dict(sorted(known.items(), key=lambda item: fmean(item[1].values())))


def sensitivity_table(found: Excesses) -> str:
    """Return the learning-rate sensitivity of every method, then those that were run at the best only."""
    rows, ours = [], found.sensitivity(PROBE)
    shown = sensitivities(found)
    for name, by_task in shown.items():
        values, best = list(by_task.values()), found.summary(name, 1.0)
        same = [ours[task] for task in by_task if task in ours]
        cells = [percent(fmean(values)), percent(median(values)), percent(best.mean) if best else "same"]
        rows.append([name, *cells, percent(fmean(same)) if same else NOTHING])
    for name in found.ways:
        best = found.summary(name, 1.0)
        if best is not None and name not in shown:
            rows.append([name, NOTHING, NOTHING, percent(best.mean), NOTHING])
    shown_columns = slice(5 if ours else 4)
    header = ["", "mean", "median", "at the best", "HDET there"]
    return table(header[shown_columns], [row[shown_columns] for row in rows])


def designs_table(outcomes: Sequence[designs.Outcome]) -> str:
    """Return the designs that were tried with training losses, the default, the least harmful first."""
    shown = sorted((one for one in outcomes if one.mode == TRAINING), key=lambda one: one.harm)
    rows = [[one.design, f"{one.harm:.2f}", percent(one.worst), f"{one.low:.1f}", f"{one.high:.1f}"] for one in shown]
    header = ["design", "at the best: mean", "worst", "10× too low: median", "10× too high: median"]
    return table(header, rows)


def tasks_table(found: Excesses) -> str:
    """Return HDET's excess with its defaults on each task; bold where plain training from there is better by two
    errors."""
    starts = HIGH_STARTS[:-1]
    means = {start: found.means(TRAINING, start) for start in starts}
    worse = {start: {task for task, one in found.differences(TRAINING, start).items() if one.worse} for start in starts}
    rows = []
    for task, ruler in found.yardsticks.items():
        cells = [percent(means[start][task]) if task in means[start] else NOTHING for start in starts]
        cells = [f"**{c}**" if task in worse[start] else c for c, start in zip(cells, starts, strict=True)]
        rows.append([task, percent(ruler.relative_deviation), *cells])
    return table(["task", "σ", *map(start_name, starts)], rows)


def start_name(start: Start) -> str:
    """Return a start in words."""
    if start is None:
        return "no learning rate"
    return "at the best" if start == 1.0 else f"{1 / start:.0f}× too low" if start < 1 else f"{start:.0f}× too high"


def draw_plots(reports: Sequence[Report], folder: Path) -> None:
    """Draw the plots of the zoo into ``folder``."""
    found = excesses(zoo_of(reports).records)
    plot_starts(found, folder / STARTS_PLOT)
    plot_sensitivity(found, folder / SENSITIVITY_PLOT)


def plot_starts(found: Excesses, path: Path) -> None:
    """Plot the excess of plain training and both modes against the start: median, 10 to 90 %, and range over tasks."""
    ways = {way: [start for start in STARTS if found.means(way, start)] for way in COLOURS}
    ways = {way: starts for way, starts in ways.items() if starts}  # not every mode is run from every start
    figure, axes = new_figure(1, len(ways), 4.2, 3.6, sharey=True)
    for axis, (way, starts) in zip(axes[0], ways.items(), strict=True):
        colour, values = COLOURS[way], [list(found.means(way, start).values()) for start in starts]
        for low, high, alpha in ((0, 100, 0.15), (10, 90, 0.3)):
            band = [[float(np.percentile(seen, share)) for seen in values] for share in (low, high)]
            axis.fill_between(starts, *band, color=colour, alpha=alpha, linewidth=0)
        axis.plot(starts, list(map(median, values)), color=colour, marker="o", label="median; 10 to 90 %; range")
        if none := list(found.means(way, None).values()):
            axis.axhline(median(none), color=colour, linestyle="--", label="median without a learning rate")
        axis.set(xscale="log", xlabel="start, as a factor of the best", title=way)
        axis.set_xticks(STARTS, ["1/30", "1/10", "1/3", "1", "3", "10", "30"])
        axis.grid(axis="y", color="0.92")
        axis.legend(frameon=False, fontsize=8, loc="upper center")
        _scale_excess(axis, "y", 3 * CAP)  # room for the legends
    axes[0][0].set_ylabel("excess, % of the loss")
    save(figure, path)


def plot_sensitivity(found: Excesses, path: Path) -> None:
    """Plot the sensitivity of every method as a bar (mean over tasks), with its median as a mark."""
    shown = sensitivities(found)
    figure, axes = new_figure(1, 1, 8.0, 1.2 + 0.3 * len(shown))
    axis = axes[0][0]
    for row, (name, by_task) in enumerate(shown.items()):
        mean, middle = fmean(by_task.values()), median(by_task.values())
        colour = next((COLOURS[mode] for mode in MODES if name.startswith(mode)), COLOURS[PLAIN])
        axis.barh(row, mean, color=colour, alpha=0.85 if name in COLOURS else 0.5)
        axis.plot([middle], [row], "|", color="k", markersize=12, markeredgewidth=1.6)
        axis.annotate(f"  {mean:.1f}", (max(mean, middle, 0.0), row), va="center", fontsize=8)
    axis.set_yticks(range(len(shown)), [f"{name} ({len(tasks)} tasks)" for name, tasks in shown.items()], fontsize=8)
    axis.invert_yaxis()
    _scale_excess(axis, "x", 1.6 * CAP)
    axis.set_xlabel("mean excess over seven starts, % of the loss (bar: mean over tasks, mark: median)")
    save(figure, path)


def _scale_excess(axis: Any, name: str, most: float) -> None:
    getattr(axis, f"set_{name}scale")("symlog", linthresh=1.0, linscale=0.6)
    getattr(axis, f"set_{name}ticks")(TICKS, [f"{tick}".replace("-", "−") for tick in TICKS])
    getattr(axis, f"set_{name}lim")(-1.3, most)
    axis.minorticks_off()
